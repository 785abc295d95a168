"""A store with the semantics of Google Cloud Storage, in memory: the part of its JSON API that clients here use.

Objects are replaced whole and have a generation, which conditional requests compare. There is no append, no rename
and no folder. The real clients talk to it: gcsfs by STORAGE_EMULATOR_HOST, TensorStore by TENSORSTORE_GCS_HTTP_URL.
"""

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class GcsServer(ThreadingHTTPServer):
    """Serves one bucket at `url` until `close`. `objects[name]` is (contents, generation)."""

    daemon_threads = True

    def __init__(self, bucket):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket = bucket
        self.objects = {}
        self.uploads = {}
        self.generation = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that hangs up early is not worth a traceback; anything else is a bug in here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def close(self):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        name, query = self.parse()
        if name is None:
            return self.answer(404)
        if name == "":
            return self.list(query) if self.path_is_listing else self.answer_json({"name": self.server.bucket})
        with self.server.lock:
            contents, generation = self.server.objects.get(name, (None, 0))
        if contents is None:
            return self.answer(404)
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        if query.get("ifGenerationMatch") not in (None, str(generation)):
            return self.answer(412)
        if query.get("alt") != "media":
            return self.answer_json(self.describe(name))
        return self.send_contents(contents, generation)

    def do_POST(self):
        name, query = self.parse()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if name is None:
            return self.answer(404)
        if "/moveTo/o/" in name:
            return self.move(*name.split("/moveTo/o/"))
        if query["uploadType"] == "multipart":
            boundary = b"--" + re.search('boundary="?([^"]+)', self.headers["Content-Type"]).group(1).encode()
            metadata, body = (part.split(b"\n\n", 1)[1][:-1] for part in body.split(boundary)[1:3])
            query["name"] = json.loads(metadata)["name"]
        elif query["uploadType"] == "resumable" and "upload_id" not in query:
            return self.answer(200, headers={"Location": f"{self.server.url}{self.path}&upload_id={time.time_ns()}"})
        elif query["uploadType"] == "resumable":
            body = self.server.uploads.pop(query["upload_id"], b"") + body
            if self.headers["Content-Range"].endswith("/*"):
                self.server.uploads[query["upload_id"]] = body
                return self.answer(308, headers={"Range": f"bytes=0-{len(body) - 1}"})
        return self.put(query["name"], body, query.get("ifGenerationMatch"))

    def put(self, name, body, expected_generation):
        with self.server.lock:
            current = self.server.objects.get(name, (None, 0))[1]
            if expected_generation not in (None, str(current)):
                return self.answer(412)
            self.server.generation += 1
            self.server.objects[name] = (body, self.server.generation)
        return self.answer_json(self.describe(name))

    def move(self, name, target):
        with self.server.lock:
            if name not in self.server.objects:  # gcsfs asks for folders too
                return self.answer(404)
            self.server.objects[target] = self.server.objects.pop(name)
        return self.answer_json(self.describe(target))

    def do_DELETE(self):
        name, _ = self.parse()
        with self.server.lock:
            found = self.server.objects.pop(name, None)
        return self.answer(204 if found else 404)

    def parse(self):
        """(object's name or "", query); the name is None where the bucket does not exist."""
        parts = urlsplit(self.path)
        match = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]+)(/o)?(?:/(.+))?", parts.path)
        if match is None:  # TensorStore asks whether this is a machine in the cloud.
            return None, {}
        self.path_is_listing = bool(match.group(2))
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return (unquote(match.group(3) or "") if match.group(1) == self.server.bucket else None), query

    def list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        items, folders = [], set()
        with self.server.lock:
            names = sorted(self.server.objects)
        for name in names:
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                folders.add(prefix + name[len(prefix) :].split(delimiter)[0] + delimiter)
            else:
                items.append(self.describe(name))
        self.answer_json({"items": items, "prefixes": sorted(folders)})

    def describe(self, name):
        contents, generation = self.server.objects[name]
        return {"name": name, "bucket": self.server.bucket, "size": str(len(contents)), "generation": str(generation)}

    def send_contents(self, contents, generation):
        headers = {"x-goog-generation": str(generation)}
        if not (wanted := self.headers.get("Range")):
            return self.answer(200, contents, headers)
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted).groups()
        start = int(first) if first else len(contents) - int(last)
        stop = min(int(last) + 1 if first and last else len(contents), len(contents))
        if start >= len(contents):
            return self.answer(416)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(contents)}"
        return self.answer(206, contents[start:stop], headers)

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
