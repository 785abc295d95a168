"""Writes a config's training data, including any held-out part, as token ids for dataset_type=tokens.

Each CPU core works on a separate shard (src/extras/readers/tokens.py). A shard's documents depend only on the data and
the keys, so the same command writes the same bytes on any machine, and skips its finished shards if it was killed.
"""

import array
import concurrent.futures
import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from src.config import load as configuration
from src.config.dataset_spec import SETTINGS, train_specs
from src.config.schema import Config, Data
from src.config.usage import Usage
from src.data.document_stream import encode
from src.data.open import open_source
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.extras.readers.tokens import (
    FORMAT,
    IDS_FILE,
    INDEX_FILE,
    SUMMARY,
    UNFINISHED,
    ShardEntry,
    differences,
    missing_files,
)
from src.run import resolve_config
from src.system.disk import lock, new_file
from src.system.errors import UserError, first_few, show
from src.system.json_text import parse_json
from src.system.storage_errors import Failure, failure_of

USAGE = Usage(
    """Writes a run's data as token ids, for dataset_type=tokens.

python -m src.tokenize_dataset CONFIG [key=value ...] tokenized_path=FOLDER""",
    ("Tools for data", "Data"),
)

# Enough shards for a machine's cores; not so small that files are a burden, nor so large that one takes more than a
# minute or so: progress is counted in shards, and a killed command loses the unfinished ones.
_SHARDS = 64
_MIN_SHARD_IDS = 1 << 20
_MAX_SHARD_IDS = 1 << 24
_SAMPLED_ITEMS = 32

_MAX_UINT16_VOCABULARY = 1 << 16
_LINE_SECONDS = 10  # between progress lines


def main(argv: Sequence[str] | ConfigDict) -> None:
    """Runs the command line `argv`: writes the tokens of a config's data, or answers --help.

    Raises UserError if the keys name several datasets, conversations or data that are ids already, or the folder can't
    be written, is in use or has other data; also as `of_command` and `Items` do.
    """
    config = resolve_config.of_command(argv, USAGE)
    if config is None:
        return
    _check(config.data, config.tools.tokenized_path)
    items = Items(config_text := configuration.to_yaml(config))
    folder = Path(config.tools.tokenized_path).expanduser()
    try:
        with _locked(folder):
            summary = _plan(folder, items)
            if "shards" in summary:
                show(f"{folder} is already finished")
            else:
                summary = _write(config_text, folder, len(items), summary)
            for note in (folder / UNFINISHED, *folder.glob("[0-9]*.json")):  # tokens.json has their content
                note.unlink(missing_ok=True)
    except OSError as error:
        if failure_of(error) is Failure.TRANSIENT:
            raise
        raise UserError(f"tokenized_path={config.tools.tokenized_path} can't be written: {error}") from error
    shards = [ShardEntry(**shard) for shard in summary["shards"]]
    size = sum(shard.ids_bytes + shard.index_bytes for shard in shards)
    show(
        f"{folder}: {sum(shard.documents for shard in shards):,} documents, "
        f"{sum(shard.ids for shard in shards):,} tokens, {size / 1e6:,.1f} MB"
    )
    show(
        f"train on it: dataset_type=tokens dataset_path={config.tools.tokenized_path}"
        f"{' datasets=[]' * bool(config.data.datasets)}, instead of the keys that name the data here; keep the others"
    )


def _check(data: Data, tokenized_path: str) -> None:
    if not tokenized_path:
        raise UserError("tokenized_path is empty: expected the folder to write the tokens into")
    if "://" in tokenized_path:
        raise UserError(
            f"tokenized_path={tokenized_path}: expected a local folder. Copy it to the store when it is complete; "
            "dataset_path may then point there"
        )
    if len(data.datasets) > 1:
        names = ", ".join(entry["name"] for entry in data.datasets)
        raise UserError(
            f"datasets has {names}: they are tokenized one at a time, each into its own folder. Give one with "
            "datasets=[] and its dataset_path, then mix the folders"
        )
    if data.use_sft:
        raise UserError("use_sft=true: a folder of tokens has no loss mask; set use_sft=false")
    if (kind := train_specs(data)[0].dataset_type) in ("tokens", "synthetic"):
        raise UserError(f"dataset_type={kind} already has token ids: expected data of another type")


class Items:
    """Tokenizes the items of a run's data. The config is passed as YAML because some of it can't be pickled.

    Raises as `make_tokenizer` and `open_source` do, and when an item is read, as the source and `encode` do.
    """

    def __init__(self, config_text: str) -> None:
        config = Config.of(configuration.from_yaml(config_text))
        self._inputs = inputs = InputSpec.of(config, make_tokenizer(config.data, config.model.vocab_size))
        self._spec = train_specs(inputs.data)[0]
        self._source: Any = open_source(self._spec, inputs)
        self.dtype = "uint16" if inputs.vocab_size <= _MAX_UINT16_VOCABULARY else "uint32"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> np.ndarray:
        """Returns the int32 ids of item `i`; empty for an empty text."""
        (document,) = encode(self._inputs, self._source[i])
        return document.ids

    def summary(self) -> dict[str, Any]:
        """Returns everything that the tokens depend on, as stored in tokens.json."""
        tokenizer = self._inputs.tokenizer
        return {
            "dtype": self.dtype,
            "vocab_size": self._inputs.vocab_size,
            "tokenizer": tokenizer.fingerprint() if tokenizer and isinstance(self._source[0], str) else None,
            "source": self._source.fingerprint(),
            "settings": {
                name: value for name in SETTINGS if name != "dataset_path" and (value := getattr(self._spec, name))
            },
        }

    def per_shard(self) -> int:
        """Returns the number of items for a shard, by the mean number of ids of a sample of items."""
        count = len(self)
        sampled = min(count, _SAMPLED_ITEMS)
        ids = sum(len(self[count * k // sampled]) for k in range(sampled)) * count // sampled
        shards = max(ids // min(max(ids // _SHARDS, _MIN_SHARD_IDS), _MAX_SHARD_IDS), 1)
        return -(-count // shards)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Creates a folder and locks it; removes partial files at the end.

    Raises UserError if another process of this command has locked it.
    """
    descriptor = lock(folder, f"another process is writing tokenized_path={folder}: wait for it")
    try:
        yield
    finally:
        for part in folder.glob(".*.part"):
            if re.fullmatch(r"\.(\d{6}|tokens|unfinished)\..*\.\d+-\d+\.part", part.name):  # as named by `new_file`
                part.unlink()
        os.close(descriptor)


def _plan(folder: Path, items: Items) -> dict[str, Any]:
    """Returns the content of tokens.json or, without it, of unfinished.json, which has no `shards` yet.

    Writes unfinished.json if the folder is new. Raises UserError if the folder has tokens of other data or settings, or
    unrelated files.
    """
    expected = items.summary()
    for path in (folder / SUMMARY, folder / UNFINISHED):
        if path.exists():
            plan = _read_json(path)
            # Report differing keys first: they are clearer than their effect on the source.
            names = sorted(expected, key=lambda name: name == "source")
            if changes := differences({name: plan.get(name) for name in names}, expected):
                raise UserError(
                    f"tokenized_path={folder} has tokens of other data or settings ({first_few(changes, '; ')}): "
                    "name a new folder, or delete this one"
                )
            return plan
    if other_files := sorted(path.name for path in folder.iterdir() if path.suffix != ".part"):
        raise UserError(f"tokenized_path={folder} has other files ({first_few(other_files)}): name a new folder")
    plan = expected | {"format": FORMAT, "items_per_shard": items.per_shard()}
    _write_json(folder / UNFINISHED, plan)
    return plan


def _write(config_text: str, folder: Path, items: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Writes missing or incomplete shards, on all cores, then tokens.json; returns its content.

    Raises UserError if the data contains no text, or a process is killed.
    """
    per_shard = plan["items_per_shard"]
    parts = [range(items)[start : start + per_shard] for start in range(0, items, per_shard)]
    written = {int(path.stem): _read_json(path, ShardEntry) for path in folder.glob("[0-9]*.json")}
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    shards = {number: shard for number, shard in written.items() if not missing_files({number: shard}, sizes)}
    going_on = f"resuming: {len(shards)} of {len(parts)} shards are finished"
    print(going_on if shards else f"{items:,} items in {len(parts)} shards", flush=True)
    done, ids = sum(len(parts[number]) for number in shards), 0
    start = last_line = time.monotonic()
    with _processes(len(parts) - len(shards)) as pool:
        missing = [number for number in range(len(parts)) if number not in shards]
        pending = {pool.submit(_write_shard, config_text, folder, number, parts[number]): number for number in missing}
        for future in concurrent.futures.as_completed(pending):
            number = pending[future]
            shards[number] = future.result()
            done, ids, now = done + len(parts[number]), ids + shards[number].ids, time.monotonic()
            if done == items or now - last_line > _LINE_SECONDS:
                last_line = now
                speed = f"{ids:,} tokens, {ids / (now - start):,.0f} tokens/s"
                print(f"{done:,} of {items:,} items ({done / items:.0%}), {speed}", flush=True)
    if not any(shard.documents for shard in shards.values()):
        raise UserError("the data contains no text: there is nothing to write")
    summary = {**plan, "format": FORMAT, "shards": [shards[number]._asdict() for number in range(len(parts))]}
    _write_json(folder / SUMMARY, summary)
    return summary


@contextlib.contextmanager
def _processes(limit: int) -> Generator[concurrent.futures.Executor]:
    """Starts a process for each core, but no more than `limit`; they are killed if the block raises."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Spawn, don't fork: the source may have threads, whose locks would be copied in whatever state they are.
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(max(1, min(cores, limit)), context, _start_process) as pool:
            try:
                yield pool
            except BaseException:
                for process in multiprocessing.active_children():
                    process.kill()
                raise
    except BrokenProcessPool:
        raise UserError(
            "a process was killed, perhaps for lack of memory. The same command continues after the finished shards"
        ) from None


def _start_process() -> None:
    def end_with_parent() -> None:
        parent: Any = multiprocessing.parent_process()
        parent.join()  # however the parent ends, even by a kill
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which then kills this process
    threading.Thread(target=end_with_parent, daemon=True).start()


_items_of_process = functools.cache(Items)


def _write_shard(config_text: str, folder: Path, number: int, part: range) -> ShardEntry:
    items = _items_of_process(config_text)
    dtype = np.dtype(items.dtype).newbyteorder("<")
    pair_starts = array.array("q", [0])  # a list would take four times the memory
    digest, largest_id = hashlib.sha256(), 0
    with new_file(folder / IDS_FILE.format(number)) as file:
        for i in part:
            ids = items[i]
            if len(ids) > 1:  # a shorter document has no pair of an input and its target
                pair_starts.append(pair_starts[-1] + len(ids) - 1)
                largest_id = max(largest_id, int(ids.max()))
                data = ids.astype(dtype).tobytes()
                digest.update(data)
                file.write(data)
        ids_bytes = file.tell()
    np.save(index := io.BytesIO(), np.array(pair_starts, "<i8"))
    with new_file(folder / INDEX_FILE.format(number)) as file:
        file.write(index.getvalue())
    counts, of_index = (len(pair_starts) - 1, ids_bytes // dtype.itemsize), hashlib.sha256(index.getvalue())
    shard = ShardEntry(*counts, largest_id, digest.hexdigest(), ids_bytes, index.tell(), of_index.hexdigest())
    _write_json(folder / f"{number:06d}.json", shard._asdict())
    return shard


def _read_json(path: Path, make: Callable[..., Any] = dict) -> Any:
    try:
        return make(**parse_json(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, or name a new folder") from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with new_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
