"""Compares reading TFDS and ArrayRecord data from gs:// and from local disk: `scripts/evidence/bench_store.py`.

It measures small datasets, which are copied to this machine, and large ones, which take a request per document.

Needs `bash setup.sh dev` and `bash setup.sh data`. A server with Cloud Storage's interface runs in a separate process
on this machine, and answers each data request after a latency. The documents are the standard library's source in
pieces of up to 16 KiB, in 4 ArrayRecord files; the tokenizer is SentencePiece with 8,000 ids, or bytes.
"""

import argparse
import io
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BASE = str(Path(__file__).resolve().parents[2] / "configs" / "base.yml")
SHARDS, PIECE_BYTES, B, T = 4, 16 * 1024, 16, 2048


def serve(folder: str, latency: float, urls: "multiprocessing.Queue[str]") -> None:
    """Serves the folder's files as the bucket `data`, delaying each request for contents by `latency` seconds."""
    from tests.gcs_server import GcsServer

    class Server(GcsServer):
        request_queue_size = 1024  # connection queue; a client retries a second after a refused connection

        def __init__(self) -> None:
            super().__init__("data")

            # Bypasses http.server's parser, which would use up the two cores.
            def answer_quickly(handler: Any) -> None:
                head = handler.rfile.readline(65537)
                line = first = head
                while line not in (b"\r\n", b""):
                    line = handler.rfile.readline(65537)
                    head += line
                wanted = re.search(rb"\r\nrange: bytes=(\d*)-(\d*)", head, re.IGNORECASE)
                if not wanted or b"/o/" not in first:  # anything but contents
                    handler.rfile, stream = io.BufferedReader(io.BytesIO(head)), handler.rfile
                    handler_class.handle_one_request(handler)
                    handler.rfile = stream
                    return
                handler.close_connection = False
                name = unquote(urlsplit(first.split()[1].decode()).path.partition("/o/")[2])
                contents, generation = self.objects[name]
                begin, end = (int(number) if number else None for number in wanted.groups())
                start = len(contents) - end if begin is None else begin
                stop = len(contents) if begin is None or end is None else min(end + 1, len(contents))
                time.sleep(latency)
                answer = f"HTTP/1.1 206 OK\r\nContent-Length: {stop - start}\r\nx-goog-generation: {generation}\r\n"
                answer += f"Content-Range: bytes {start}-{stop - 1}/{len(contents)}\r\n\r\n"
                try:
                    for at in range(start, stop, 1 << 16):  # a client may hang up once it has enough
                        part = contents[at : min(at + (1 << 16), stop)]
                        handler.wfile.write(answer.encode() + part if at == start else part)
                except OSError:
                    handler.close_connection = True

            handler_class: Any = self.RequestHandlerClass
            self.RequestHandlerClass = type("Handler", (handler_class,), {"handle_one_request": answer_quickly})

    server = Server()
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    server.objects = {str(path.relative_to(folder)): (path.read_bytes(), n) for n, path in enumerate(files, start=1)}
    urls.put(server.url)
    time.sleep(1e6)


def write(folder: Path) -> None:
    """Writes the documents as a TFDS dataset, and a SentencePiece model trained on them."""
    import sentencepiece

    from src.data.readers.text import TextSource
    from tests.data.every_source import write_tfds

    source = TextSource("", PIECE_BYTES)
    write_tfds(folder / "data", [source[number] for number in range(len(source))], SHARDS)
    texts = (source[number] for number in range(0, len(source), 8))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "sp"), vocab_size=8000, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip


def rate(keys: list[str], seconds: float) -> float:
    """Returns a pipeline's tokens per second with these keys, after its first batches."""
    from src.data.loader import train_batches
    from src.data.open import open_sources
    from src.data.tokenizer import make_tokenizer
    from src.data.types import InputSpec
    from src.run import resolve_config

    config = resolve_config.load([BASE, f"max_target_length={T}", "eval_interval=-1", *keys])
    inputs = InputSpec.of(config, make_tokenizer(config.data, config.model.vocab_size))
    data, _ = open_sources(inputs, config.evaluation)
    batches = train_batches(inputs, data, range(B), B)
    for _ in itertools.islice(batches, 8):
        pass
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        next(batches)
        count += 1
    elapsed = time.perf_counter() - begin
    batches.close()
    return count * B * T / elapsed


def main() -> None:
    """Prints a line for each type of data and tokenizer: rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--threads", type=int, default=64)
    options = parser.parse_args()
    from src.extras.readers import array_record

    copied_bytes = array_record.COPIED_BYTES
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder)
        urls: multiprocessing.Queue[str] = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(str(folder), options.latency, urls), daemon=True)
        server.start()
        url = urls.get()
        os.environ |= {"STORAGE_EMULATOR_HOST": url, "CLOUD_STORAGE_EMULATOR_ENDPOINT": url}
        os.environ |= {"GCE_METADATA_ROOT": url.removeprefix("http://"), "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        tokenizers = {
            "sentencepiece": ["tokenizer_type=sentencepiece", f"tokenizer_path={folder}/sp.model", "vocab_size=8000"],
            "byte": ["vocab_size=258"],
        }
        kinds = {
            "tfds": ["dataset_type=tfds", "dataset_name=documents", "dataset_path=ROOT/data"],
            "array_record": ["dataset_type=array_record", "dataset_path=ROOT/data/documents/1.0.0/*array_record*"],
        }
        for (kind, keys), (name, tokenizer) in itertools.product(kinds.items(), tokenizers.items()):
            rates = []
            runs = (place, 1, 0), (place, 2, 0), ("gs://data", 1, copied_bytes), ("gs://data", options.threads, 0)
            for root, threads, array_record.COPIED_BYTES in runs:
                named = [key.replace("ROOT", root) for key in keys]
                rates.append(rate([*named, *tokenizer, f"data_threads={threads}"], options.seconds))
            one, two, copied, requests = (f"{each:12,.0f}" for each in rates)
            print(
                f"{kind:13} {name:14} local {one} (2 threads {two})  store, copied {copied}  requests {requests}: "
                f"{rates[3] / rates[0]:.2f} of one thread, {rates[3] / rates[1]:.2f} of two",
                flush=True,
            )
        server.kill()


if __name__ == "__main__":
    main()
