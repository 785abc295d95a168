"""A server that speaks the endpoints of the Hugging Face hub that fetching a model takes, for huggingface_hub."""

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

MISSING = {"RepoNotFound": "Repository Not Found", "GatedRepo": "gated", "RevisionNotFound": "Invalid rev id"}


class HubServer(ThreadingHTTPServer):
    """Serves models at `url` until `close`; `fetched` has the path of each file that was sent, in order."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = {}  # name -> revision -> file -> bytes; a branch is the name of a commit
        self.gated, self.broken, self.slow = set(), False, 0.0
        self.fetched, self.asked = [], 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def push(self, name, folder, branch="main", **more):
        """Adds a commit with a folder's files, and `more` with __ for dots in their names; returns its hash."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        files |= {key.replace("__", "."): contents for key, contents in more.items()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.models.setdefault(name, {}).update({commit: files, branch: commit})
        return commit

    def close(self):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.asked += 1
        if self.server.broken:
            return self.answer(500, b"{}")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not (api or file):
            return self.refuse(404, "EntryNotFound")
        name, revision = (api[1], api[3]) if api else file.group(1, 2)
        revisions = self.server.models.get(name)
        if revisions is None:
            return self.refuse(401, "RepoNotFound")
        if name in self.server.gated and self.headers.get("Authorization") != "Bearer hf_granted":
            return self.refuse(401, "GatedRepo")
        commit = revisions.get(revision)
        commit, files = (revision, commit) if isinstance(commit, dict) else (commit, revisions.get(commit))
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        if api and api[2] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.answer(200, json.dumps({"_id": "1", "id": name, "sha": commit, "siblings": siblings}).encode())
        if api:
            return self.answer(200, json.dumps([_entry(name, files[name]) for name in files]).encode())
        if file[3] not in files:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.server.fetched.append(f"{name}/{file[3]}")
            time.sleep(self.server.slow)
        return self.answer(200, files[file[3]], {"X-Repo-Commit": commit, "ETag": f'"{_blob(files[file[3]])}"'})

    def refuse(self, status, code):
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": MISSING.get(code, code)})

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _blob(contents):
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()  # as git has it


def _entry(name, contents):
    return {"type": "file", "path": name, "size": len(contents), "oid": _blob(contents)}
