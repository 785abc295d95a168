"""Writes the data of a config as token ids, to train on with dataset_type=tokens without tokenizing again.

    python -m src.tokenize_dataset configs/base.yml dataset_path=TEXT tokenized_path=FOLDER

Takes a run's config and writes every document that it would train on or hold out, in the data's own order and by its
tokenizer, into the local folder `tokenized_path`; src/data/tokens.py says what is in it. A run on the folder holds out
a part of it as of any other data. Every core works on a shard of its own. Which documents a shard has depends on the
data alone, so the same command writes the same bytes on any machine, and goes on after its finished shards if it was
killed.
"""

import array
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from src import config as configuration
from src.data import sources
from src.data.source_spec import SETTINGS, train_specs
from src.data.tokenizer import make_tokenizer
from src.data.tokens import FORMAT, SUMMARY, UNFINISHED, Shard, compare, ids_name, index_name, missing_files
from src.errors import UserError, run_command

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

USAGE = """python -m src.tokenize_dataset CONFIG.yml [key=value ...] tokenized_path=FOLDER
python -m src.tokenize_dataset --help KEY         what a key does, and its default"""

# Small data make enough shards for the cores of a machine, large data no more files than a folder takes well.
_SHARD_IDS = 1 << 26
_SMALL_SHARD_IDS = 1 << 20
_SHARDS_OF_SMALL_DATA = 64
_MOST_SHARDS = 1 << 14
_SAMPLED_ITEMS = 32

_MOST_UINT16 = 1 << 16  # the largest vocabulary whose ids are uint16

_REPORT_SECONDS = 0.2  # between the reports of a worker, at which it may stop
_SHOW_SECONDS = 0.5
_LINE_SECONDS = 10  # between lines where there is no terminal


def main(argv: Sequence[str]) -> None:
    """Writes the tokens of the config that `argv` gives, or answers --help.

    Raises:
        UserError: the config names no data to tokenize or no folder, the folder has other files or tokens of other
            data, an item can't be read, or the folder can't be written.
    """
    if (help_text := configuration.help_for(argv, USAGE)) is not None:
        print(help_text)
        return
    notes: list[str] = []
    config = configuration.load(argv, notes)
    for note in notes:
        print(note)
    _check(config)
    items = Items(config)
    folder = Path(config.tokenized_path).expanduser()
    try:
        with _locked(folder):
            if (folder / SUMMARY).exists():
                _read_plan(folder / SUMMARY, items)
                print(f"{folder} is finished already", flush=True)
            else:
                _write(config, folder, items)
            for note in (folder / UNFINISHED, *folder.glob("[0-9]*.json")):  # tokens.json has it all
                note.unlink(missing_ok=True)
            shards = [Shard(**shard) for shard in json.loads((folder / SUMMARY).read_bytes())["shards"]]
    except OSError as error:
        raise UserError(f"tokenized_path={config.tokenized_path} can't be written: {error}") from error
    size = sum(shard.ids_bytes + shard.index_bytes for shard in shards)
    print(
        f"{folder}: {sum(shard.documents for shard in shards):,} documents, "
        f"{sum(shard.ids for shard in shards):,} tokens, {size / 1e6:,.1f} MB"
    )
    if config.eval_dataset_path or config.eval_dataset_name:
        print("data to evaluate on are of type tokens then too: write them likewise, each with dataset_path=DATA")
    print(f"train on it: {_train_command(config, argv)}")


def _check(config: "FrozenConfigDict") -> None:
    """Raises UserError for a config whose data can't be written as tokens, or not there."""
    if not config.tokenized_path:
        raise UserError("tokenized_path is empty: expected the folder to write the tokens into")
    if "://" in config.tokenized_path:
        raise UserError(
            f"tokenized_path={config.tokenized_path}: expected a local folder. Copy it to the store once it is "
            "written; dataset_path may then name it there"
        )
    if len(config.datasets) > 1:
        names = ", ".join(entry["name"] for entry in config.datasets)
        raise UserError(
            f"datasets has {names}: they are tokenized one at a time, each into a folder of its own. Give one with "
            "datasets=[] and its dataset_path, then mix the folders"
        )
    if config.use_sft:
        raise UserError("use_sft=true: a folder of tokens does not keep which of them are learned; set use_sft=false")
    if (kind := train_specs(config)[0].type) in ("tokens", "synthetic"):
        raise UserError(f"dataset_type={kind} has token ids already: expected data of another type")


class Items:
    """The items of a config's data as ids.

    Raises:
        UserError: the data or the tokenizer can't be read, or items not by their number.
    """

    def __init__(self, config: "FrozenConfigDict") -> None:
        self._spec = train_specs(config)[0]
        self._tokenizer = make_tokenizer(config)
        self._source = sources.open_source(self._spec, config, self._tokenizer)
        if isinstance(self._source, sources.RowSource):
            raise UserError(f"{self._spec.setting('dataset_type')} gives rows: expected documents to tokenize")
        self._vocab_size = config.vocab_size

    def __len__(self) -> int:
        """How many there are."""
        return len(self._source)

    def __getitem__(self, i: int) -> np.ndarray:
        """The ids of item `i`; none of an empty text, which has nothing to learn but its own end."""
        item = self._source[i]
        if isinstance(item, str):
            return self._tokenizer.encode(item) if item else np.empty(0, np.int32)
        if len(item) and not 0 <= item.min() <= item.max() < self._vocab_size:
            raise UserError(
                f"{self._spec.setting('dataset_path')}: item {i} has ids from {item.min()} to {item.max()}: expected "
                f"them from 0 to {self._vocab_size - 1}, by vocab_size={self._vocab_size}"
            )
        return item

    def facts(self) -> dict[str, Any]:
        """What the tokens depend on, as tokens.json has it."""
        is_text = len(self) > 0 and isinstance(self._source[0], str)
        return {
            "format": FORMAT,
            "dtype": "uint16" if self._vocab_size <= _MOST_UINT16 else "uint32",
            "vocab_size": self._vocab_size,
            "tokenizer": self._tokenizer.fingerprint() if is_text else None,
            "source": self._source.fingerprint(),
            "settings": {
                name: value for name, value in self._spec.settings.items() if value and name != "dataset_path"
            },
        }


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes a folder, keeps other processes of this command out of it, and frees it of what a killed one left."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process, however that ends
        for part in folder.glob(".*.part"):
            part.unlink()
        yield
    except BlockingIOError:
        raise UserError(f"another process is writing tokenized_path={folder}: wait for it") from None
    finally:
        os.close(descriptor)


def _write(config: "FrozenConfigDict", folder: Path, items: Items) -> None:
    """Writes the shards that are not there yet, then tokens.json."""
    plan = _make_plan(folder, items)
    per_shard = plan["items_per_shard"]
    ranges = [range(len(items))[start : start + per_shard] for start in range(0, len(items), per_shard)]
    done = _finished_shards(folder)
    if done:
        print(f"going on: {len(done)} of {len(ranges)} shards are finished", flush=True)
    _write_in_parallel(
        config, folder, {number: part for number, part in enumerate(ranges) if number not in done}, items
    )
    shards = _finished_shards(folder)
    if not any(shard.documents for shard in shards.values()):
        raise UserError("the data have no text: there is nothing to write")
    _write_json(folder / SUMMARY, {**plan, "shards": [shards[number]._asdict() for number in range(len(ranges))]})


def _make_plan(folder: Path, items: Items) -> dict[str, Any]:
    """What tokens.json is to have beside its shards: as the folder was begun with, or new.

    Raises:
        UserError: the folder was begun with something else, or has other files.
    """
    if (folder / UNFINISHED).exists():
        return _read_plan(folder / UNFINISHED, items)
    if others := sorted(path.name for path in folder.iterdir()):
        raise UserError(f"tokenized_path={folder} has other files ({', '.join(others[:3])}): name a new folder")
    plan = items.facts() | {"items_per_shard": items_per_shard(items)}
    _write_json(folder / UNFINISHED, plan)
    return plan


def _read_plan(path: Path, items: Items) -> dict[str, Any]:
    """The plan in a file of the folder; raises UserError where it is not one for these items."""
    plan = json.loads(path.read_bytes())
    facts = items.facts()
    if differences := compare(_flat({name: plan.get(name) for name in facts}), _flat(facts)):
        raise UserError(
            f"tokenized_path={path.parent} has tokens of other data or settings ({'; '.join(differences)}): name a new "
            "folder, or delete this one"
        )
    return plan


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with those inside another beside it, `tokenizer digest` for one."""
    flat = {}
    for name, value in facts.items():
        flat |= {f"{name} {inner}": fact for inner, fact in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def items_per_shard(items: Items) -> int:
    """How many items to put into a shard, judged by the mean size of a few."""
    count = len(items)
    sampled = min(count, _SAMPLED_ITEMS)
    ids = sum(len(items[count * k // sampled]) for k in range(sampled)) * count // max(sampled, 1)
    shards = max(ids // _SHARD_IDS, min(ids // _SMALL_SHARD_IDS, _SHARDS_OF_SMALL_DATA), 1)
    return max(-(-count // min(shards, _MOST_SHARDS)), 1)


def _finished_shards(folder: Path) -> dict[int, Shard]:
    """The shards that are there whole, by number: such a one has a NUMBER.json, written last."""
    shards = {int(path.stem): Shard(**json.loads(path.read_bytes())) for path in folder.glob("[0-9]*.json")}
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return {number: shard for number, shard in shards.items() if not missing_files({number: shard}, sizes)}


def _write_in_parallel(config: "FrozenConfigDict", folder: Path, todo: Mapping[int, range], items: Items) -> None:
    """Writes shards, each with a range of the items, on all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Started anew, not forked: the source may have threads, whose locks a fork would copy as they are.
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", 2), context.Event()
    left = sum(map(len, todo.values()))
    with (
        _Display(len(items), len(items) - left) as display,
        concurrent.futures.ProcessPoolExecutor(
            max(1, min(cores, len(todo))), context, _start_worker, (configuration.to_yaml(config), folder, counts, stop)
        ) as pool,
    ):
        pending = {pool.submit(_write_shard, number, part) for number, part in todo.items()}
        try:
            while pending:
                finished, pending = concurrent.futures.wait(pending, _SHOW_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                display.update(*counts)
        except BrokenProcessPool:
            raise UserError(
                "a process was killed, perhaps for want of memory. The same command goes on after the finished shards"
            ) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


class _Worker:
    """What a process that writes shards has.

    Args:
        config: names the data.
        folder: to write the shards into.
        counts: int64 [2], shared: the items and ids of this start that all workers together have written.
        stop: shared: set when shards are to be left as they are.
    """

    def __init__(self, config: "FrozenConfigDict", folder: Path, counts: Any, stop: Any) -> None:
        self.config = config
        self.folder = folder
        self.counts = counts
        self.stop = stop

    @functools.cached_property
    def items(self) -> Items:
        """Opened with the first shard, whose future then has what may be wrong with them."""
        return Items(self.config)

    def report(self, items: int, ids: int) -> None:
        """Adds to the counts."""
        with self.counts.get_lock():
            self.counts[0] += items
            self.counts[1] += ids


_this_worker: _Worker


def _start_worker(config_text: str, folder: Path, counts: Any, stop: Any) -> None:
    """Takes the config as text: what it holds can't all be pickled."""
    global _this_worker
    _this_worker = _Worker(configuration.from_yaml(config_text), folder, counts, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process too, which then sets `stop`
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the one that started it has ended, be it by a kill."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _write_shard(number: int, part: range) -> None:
    """Writes the shard with these items, its NUMBER.json last; nothing if told to stop before the end."""
    worker = _this_worker
    dtype = np.dtype("<u2" if worker.config.vocab_size <= _MOST_UINT16 else "<u4")
    pair_starts = array.array("q", [0])  # a list would take four times the memory
    digest, largest_id = hashlib.sha256(), 0
    with contextlib.suppress(_Stopped):
        with _new_file(worker.folder / ids_name(number)) as file:
            for ids in _reported(worker, part):
                if len(ids) > 1:  # else it has no pair
                    pair_starts.append(pair_starts[-1] + len(ids) - 1)
                    largest_id = max(largest_id, int(ids.max()))
                    data = ids.astype(dtype).tobytes()
                    digest.update(data)
                    file.write(data)
            ids_bytes = file.tell()
        with _new_file(worker.folder / index_name(number)) as file:
            np.save(file, np.array(pair_starts, "<i8"))
            index_bytes = file.tell()
        total = ids_bytes // dtype.itemsize
        shard = Shard(len(pair_starts) - 1, total, largest_id, digest.hexdigest(), ids_bytes, index_bytes)
        _write_json(worker.folder / f"{number:06d}.json", shard._asdict())


class _Stopped(Exception):
    """The shard is to be left as it is."""


def _reported(worker: _Worker, part: range) -> Iterator[np.ndarray]:
    """The ids of each item, counted now and then; raises _Stopped when told to stop."""
    items = ids = 0
    last_report = time.monotonic()
    for i in part:
        item_ids = worker.items[i]
        yield item_ids
        items, ids = items + 1, ids + len(item_ids)
        if time.monotonic() - last_report > _REPORT_SECONDS:
            if worker.stop.is_set():
                raise _Stopped
            worker.report(items, ids)
            items, ids, last_report = 0, 0, time.monotonic()
    worker.report(items, ids)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is there once this ends without an error: whole, or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    with _new_file(path) as file:
        file.write(json.dumps(facts, indent=1).encode() + b"\n")


class _Display:
    """Shows how far it is, and tokens a second: a bar on a terminal, else a line now and then.

    Args:
        items: how many there are.
        done: how many of them were finished before this start.
    """

    def __init__(self, items: int, done: int) -> None:
        self._items = items
        self._done = done
        self._terminal = sys.stdout.isatty()
        self._start = self._last_line = time.monotonic()
        # As in metrics.py: rich by itself would also draw in a notebook, and in a log if FORCE_COLOR is set.
        console = Console(force_terminal=self._terminal, force_jupyter=False, highlight=False)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, auto_refresh=False, disable=not self._terminal)
        self._task = self._bar.add_task("", total=items, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, items: int, ids: int) -> None:
        """Takes how many items and ids this start has written."""
        now = time.monotonic()
        speed = f"{ids:,} tokens, {ids / (now - self._start):,.0f} tokens/s"
        done = self._done + items
        self._bar.update(self._task, completed=done, description=speed, refresh=True)
        if not self._terminal and (done == self._items or now - self._last_line > _LINE_SECONDS):
            self._last_line = now
            print(f"{done:,} of {self._items:,} items ({done / self._items:.0%}), {speed}", flush=True)


def _train_command(config: "FrozenConfigDict", argv: Sequence[str]) -> str:
    """What to type to train on the folder: this command, with the folder in the place of what names other data."""
    data_keys = {"tokenized_path", "datasets", *(key for keys in SETTINGS.values() for key in keys)}
    kept = [argument for argument in argv if argument.lstrip("-").partition("=")[0] not in data_keys]
    data = [
        "dataset_type=tokens",
        f"dataset_path={config.tokenized_path}",
        *(["datasets=[]"] if config.datasets else []),
    ]
    return shlex.join(["python", "-m", "src.train", *kept, *data])


if __name__ == "__main__":
    run_command(main)
