"""Compares the input pipeline's tokens per second with Grain's on the same text: `scripts/bench_data.py [case ...]`.

Needs `bash setup.sh dev` (Grain) and `bash setup.sh data`. The text is the source code of Python's standard library as
an ArrayRecord file, which both read with the package array_record and encode with the same function. Our side is
`train_batches`; Grain's is MapDataset.source, seed, shuffle, repeat, map, to_iter_dataset, one of its packers, batch.
They take turns. Each turn starts a new pipeline, and its first batches are not counted. It prints medians: of tokens
per second, without padding, and of the ratios of neighboring turns. Single-threaded runs are timed by CPU time, which
other load on the machine hardly affects; the others by wall-clock time.

cases:
    byte, sentencepiece, huggingface    the tokenizer (the last two with 8,000 ids)
    tokens                              ids that src.tokenize_dataset wrote, only ours
    conversations                       prompts and completions packed whole, compared with concatenating and cutting
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import numpy as np
from absl import flags
from array_record.python.array_record_module import ArrayRecordWriter

from src.data import packing
from src.data.loader import train_batches
from src.data.open import open_sources
from src.data.readers.text import TextSource
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec, Tokenizer
from src.extras.datasets import tokenize_dataset, train_tokenizer
from src.run import resolve_config
from src.system.exit_codes import run_command

BASE = str(Path(__file__).resolve().parents[1] / "configs" / "base.yml")
B, T = 16, 2048
VOCAB_SIZE = 8_000
TOKENIZERS = ("byte", "sentencepiece", "huggingface")
CASES = (*TOKENIZERS, "tokens", "conversations")
# Maximum bytes per document: the config's default, and a size that fits into a row with any tokenizer.
DOCUMENTS = {"documents of up to 64 KiB": 64 * 1024, "documents of up to 2,000 bytes": 2_000}
WARM_UP_TOKENS = 4 * B * T

Batches = Iterator[np.ndarray]
"""`segment_ids` of batches, without end: 0 is padding."""
Named = tuple[str, Callable[[], Batches]]


def main(argv: list[str]) -> None:
    """Runs the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each turn, after warm-up")
    options = parser.parse_intermixed_args(argv)
    cases = options.cases or CASES
    if unknown := set(cases).difference(CASES):
        parser.error(f"no case {unknown.pop()}")
    flags.FLAGS.mark_as_parsed()  # Grain's processes read some
    print(f"grain {grain.__version__}, Python {sys.version.split()[0]}, {B} rows x {T} tokens; tokens per second")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for cut, (what, most_bytes) in enumerate(DOCUMENTS.items()):
            count = write_records(folder / f"{cut}.array_record", most_bytes)
            print(f"{what}: {count:,}, {(folder / f'{cut}.array_record').stat().st_size / 1e6:.1f} MB")
        for case in cases:
            if case == "tokens":
                bench_tokens(folder, options.turns, options.seconds)
            elif case == "conversations":
                bench_conversations(folder, options.turns, options.seconds)
            else:
                settings = write_tokenizer(folder, case)
                for cut, what in enumerate(DOCUMENTS):
                    print(f"{case}, {what}:", flush=True)
                    argv = [BASE, "dataset_type=array_record", "array_record_format=text", *settings]
                    argv += [f"dataset_path={folder}/{cut}.array_record", "eval_interval=-1"]
                    compare(argv, options.turns, options.seconds, has_short_documents=cut == 1)


def compare(argv: list[str], turns: int, seconds: float, has_short_documents: bool) -> None:
    """Prints both sides' tokens per second on one thread, and on two cores: with two threads, or Grain's processes.

    Grain's packers are compared on one thread: concat then split, and with short documents first fit too.
    """
    config = resolve_config.load(argv)
    path, tokenizer = config.data.dataset_path, make_tokenizer(config.data, config.model.vocab_size)
    packers = {"concat then split": concat_then_split}
    if has_short_documents:
        packers["first fit"] = first_fit
    for name, pack in packers.items():
        report(
            ("ours, 1 thread", lambda: ours(argv, 1)),
            (f"Grain, 1 thread, {name}", lambda pack=pack: grains(path, tokenizer, pack, grain.ReadOptions(0, 0))),
            *(turns, seconds, True),
        )
    for name, read, processes in (("threads", grain.ReadOptions(2, 64), 0), ("processes", grain.ReadOptions(0, 0), 2)):
        report(
            ("ours, 2 threads", lambda: ours(argv, 2)),
            (
                f"Grain, 2 {name}, concat then split",
                lambda read=read, processes=processes: grains(path, tokenizer, concat_then_split, read, processes),
            ),
            *(turns, seconds, False),
        )


def report(mine: Named, other: Named, turns: int, seconds: float, by_core: bool) -> None:
    """Prints the speeds of two pipelines that take turns.

    With `by_core`, speeds are per second of the process's CPU time, otherwise of wall-clock time.
    """
    rates = [[measure(make, seconds)[by_core] for _, make in (mine, other)] for _ in range(turns)]
    medians = [statistics.median(found) for found in zip(*rates, strict=True)]
    ratio = statistics.median(own / its for own, its in rates)
    print(f"  {mine[0]:18} {medians[0]:13,.0f}   {other[0]:40} {medians[1]:13,.0f}   {ratio:.2f} times", flush=True)


def measure(make: Callable[[], Batches], seconds: float) -> tuple[float, float]:
    """Measures a pipeline's tokens per second of wall-clock time, and of the process's CPU time."""
    with contextlib.closing(make()) as batches:
        warm_up = 0
        while warm_up < WARM_UP_TOKENS:
            warm_up += np.count_nonzero(next(batches))
        tokens, begin, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < begin + seconds:
            tokens += np.count_nonzero(next(batches))
        return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu)


def ours(argv: list[str], threads: int) -> Batches:
    """Yields the `segment_ids` [B, T] of MinText's batches."""
    config = resolve_config.load([*argv, f"max_target_length={T}", f"data_threads={threads}"])
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    inputs = InputSpec.of(config, tokenizer)
    data, _ = open_sources(inputs, config.evaluation)
    with contextlib.closing(train_batches(inputs, data, range(B), B)) as batches:
        for batch in batches:
            yield batch.arrays["segment_ids"]


def grains(path: str, tokenizer: Tokenizer, pack: Callable[..., Any], read: Any, processes: int = 0) -> Batches:
    """Yields the segment ids [B, T] of Grain's batches."""

    def tokenize(record: bytes) -> dict[str, np.ndarray]:
        return {"tokens": tokenizer.encode(record.decode())}

    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path))
    dataset = dataset.seed(0).shuffle().repeat(None).map(tokenize).to_iter_dataset(read)
    dataset = pack(dataset).batch(B)
    if processes:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=4))
    for batch in iter(dataset):
        yield batch["tokens_segment_ids"]


def concat_then_split(dataset: Any) -> Any:
    """Concatenates documents and cuts every T tokens, as MinText does."""
    return grain.experimental.ConcatThenSplitIterDataset(dataset, length_struct={"tokens": T})


def first_fit(dataset: Any) -> Any:
    """Packs whole documents, with padding."""
    return grain.experimental.FirstFitPackIterDataset(dataset, length_struct={"tokens": T}, num_packing_bins=B)


def bench_tokens(folder: Path, turns: int, seconds: float) -> None:
    """Prints tokens per second for pre-tokenized data, on one thread."""
    settings = write_tokenizer(folder, "sentencepiece")
    argv = [BASE, *settings, "eval_interval=-1"]
    print("tokens:", flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        tokenize_dataset.main([*argv, f"tokenized_path={folder}/ids"])
    argv += ["dataset_type=tokens", f"dataset_path={folder}/ids"]
    found = [measure(lambda: ours(argv, 1), seconds) for _ in range(turns)]
    by_clock, by_core = (statistics.median(rates) for rates in zip(*found, strict=True))
    print(f"  ours, 1 thread {by_clock:,.0f} tokens/s; {by_core:,.0f} per second of CPU time")


def bench_conversations(folder: Path, turns: int, seconds: float) -> None:
    """Prints tokens per second for conversations packed whole, and for the same ones cut at the ends of rows."""
    source = TextSource("", 2_000)
    with (folder / "pairs.jsonl").open("w") as file:
        for i in range(len(source)):
            prompt, newline, completion = source[i].partition("\n")
            if completion.strip():
                file.write(json.dumps({"prompt": prompt + newline, "completion": completion}) + "\n")
    for tokenizer in ("byte", "sentencepiece"):
        argv = [BASE, *write_tokenizer(folder, tokenizer), "use_sft=true", f"dataset_path={folder}/pairs.jsonl"]
        print(f"conversations, {tokenizer}:", flush=True)
        report(("whole", lambda argv=argv: ours(argv, 1)), ("cut", lambda argv=argv: cut(argv)), turns, seconds, True)


def cut(argv: list[str]) -> Batches:
    """Yields MinText's batches with conversations concatenated and cut like texts."""
    with unittest.mock.patch("src.extras.conversation_packing.best_fit", packing.concatenate):
        yield from ours(argv, 1)


def write_records(file: Path, most_bytes: int) -> int:
    """Writes the standard library's source as an ArrayRecord file; returns the number of records."""
    source = TextSource("", most_bytes)
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for i in range(len(source)):
        writer.write(str(source[i]).encode())
    writer.close()
    return len(source)


def write_tokenizer(folder: Path, kind: str) -> list[str]:
    """Trains a tokenizer on part of the text if it needs training; returns the settings that select it."""
    if kind == "byte":
        return ["tokenizer_type=byte"]
    path = folder / kind
    if not path.exists():
        source = TextSource("", 64 * 1024)
        texts = [source[i] for i in range(0, len(source), 20)]
        if kind == "sentencepiece":
            path.write_bytes(train_tokenizer.train(texts, VOCAB_SIZE))
        else:
            write_tokenizer_json(path, texts)
    return [f"tokenizer_type={kind}", f"tokenizer_path={path}"]


def write_tokenizer_json(folder: Path, texts: list[str]) -> None:
    """Trains a byte-level BPE tokenizer like GPT-2's, and writes it to a new folder."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')


if __name__ == "__main__":
    run_command(main, may_exit=True)
