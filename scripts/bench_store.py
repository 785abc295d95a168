"""Tokens per second of TFDS and ArrayRecord data on gs:// beside the same on this disk: `scripts/bench_store.py`.

Needs `bash setup.sh dev` and `bash setup.sh data`. A server with Cloud Storage's interface runs in a process of its own
on this machine, and answers each request for data after a latency. The documents are the standard library's source in
pieces of up to 16 KiB, in 4 ArrayRecord files; the tokenizer is SentencePiece with 8,000 ids, or bytes.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BASE = str(Path(__file__).resolve().parents[1] / "configs" / "base.yml")
SHARDS, PIECE_BYTES, B, T = 4, 16 * 1024, 16, 2048


def serve(folder: str, latency: float, urls: "multiprocessing.Queue[str]") -> None:
    """Serves the folder's files as the bucket `data`, each request for contents after `latency` seconds."""
    from tests.gcs_server import GcsServer

    class Server(GcsServer):
        def __init__(self) -> None:
            super().__init__("data")
            self.request_queue_size = 256

            def send(handler: object, contents: bytes, generation: int) -> None:
                time.sleep(latency)
                first, _, last = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                start = int(first) if first else max(len(contents) - int(last), 0)
                stop = min(int(last) + 1 if first and last else len(contents), len(contents))
                handler.send_response(206)
                handler.send_header("Content-Length", str(stop - start))
                handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(contents)}")
                handler.send_header("x-goog-generation", str(generation))
                handler.end_headers()
                try:
                    for at in range(start, stop, 1 << 16):  # a client that has what it wants hangs up
                        handler.wfile.write(memoryview(contents)[at : min(at + (1 << 16), stop)])
                except OSError:
                    handler.close_connection = True

            self.RequestHandlerClass = type("Handler", (self.RequestHandlerClass,), {"send_contents": send})

    server = Server()
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    server.objects = {str(path.relative_to(folder)): (path.read_bytes(), n) for n, path in enumerate(files, start=1)}
    urls.put(server.url)
    time.sleep(1e6)


def write(folder: Path) -> None:
    """Writes the documents as a dataset of TFDS, and a SentencePiece model of them."""
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
    """Returns tokens per second of a pipeline with these keys, once its first batches are made."""
    from src import command_line
    from src.data.loader import train_batches
    from src.data.open import open_sources
    from src.data.tokenizer import make_tokenizer
    from src.data.types import InputSpec

    config = command_line.load([BASE, f"max_target_length={T}", "eval_interval=-1", *keys])
    inputs = InputSpec.of(config, make_tokenizer(config.data, config.vocab_size))
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
    """Prints a line for each type of data and tokenizer: both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--threads", type=int, default=64)
    options = parser.parse_args()
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
            for root, threads in ((place, 1), (place, 2), ("gs://data", options.threads)):
                named = [key.replace("ROOT", root) for key in keys]
                rates.append(rate([*named, *tokenizer, f"data_threads={threads}"], options.seconds))
            best = max(rates[:2])
            print(
                f"{kind:13} {name:14} local {rates[0]:12,.0f} (2 threads {rates[1]:12,.0f})  store {rates[2]:12,.0f}"
                f"  {rates[2] / best:.2f} of the better",
                flush=True,
            )
        server.terminate()


if __name__ == "__main__":
    main()
