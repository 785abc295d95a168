"""Batches for the train step and for evaluations: the rows of this host, made ahead of time.

A batch is a dict of numpy arrays as `packing.empty_batch` describes them. Which rows a host has changes nothing in a
row: it depends on the data, the seed, the global batch size, T and the step alone.

B: rows of a batch, over all hosts.  T: tokens per row.  S: sources.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from src.data.feeds import Documents, Feed, encode, make_feed, row_layout, rows_an_epoch
from src.data.mixture import Mixture
from src.data.open import EvalSet, RowSource, Source, TrainData
from src.data.packing import Batch, after_documents, empty_batch, rows_needed
from src.data.tokenizer import Tokenizer
from src.errors import UserError
from src.user_code import load_function

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

_PREFETCHED_BATCHES = 2
_BEGUN_BATCHES = 4  # beside these, so that threads need not keep step


def train_batches(
    config: "FrozenConfigDict",
    data: TrainData,
    tokenizer: Tokenizer | None,
    rows: Sequence[int],
    global_batch: int,
    rows_taken: int = 0,
    position: np.ndarray | None = None,
    rows_before: Mapping[str, int] | None = None,
) -> Iterator[Batch]:
    """Endless batches, made ahead of time in a thread. Errors in it are raised here; closing the iterator ends it.

    Args:
        config: the run's.
        data: the sources and their weights.
        tokenizer: None where nothing is text.
        rows: the rows of the global batch to make, ascending: see `host_rows`.
        global_batch: B.
        rows_taken: rows of the run, over all hosts, that came before.
        position: int32 [rows, S, 2], `data_position` of the batch before; None: from the start of every source.
        rows_before: rows of each source by name that came before `rows_taken` was counted, of sources of rows.

    Returns:
        Batches of `len(rows)` rows, which have `data_position` too: int32 [rows, S, 2], the `Lane.position` of each
        row's lanes after this batch. With `use_sft` also `cuts`: int32 [rows, 2], `packing.Cuts` of each row.

    Raises:
        UserError: a source has less text than one row.
    """
    for name, source in zip(data.names, data.sources, strict=True):
        _check_length(config, name, source, tokenizer)
    feeds = [
        make_feed(
            config,
            source,
            tokenizer,
            rows,
            global_batch,
            name=name,
            before=(rows_before or {}).get(name, 0),
            positions=None if position is None else position[:, index],
        )
        for index, (name, source) in enumerate(zip(data.names, data.sources, strict=True))
    ]
    closing = threading.Event()
    batches = _batches(config, feeds, Mixture(data.weights), rows, global_batch, closing, rows_taken)
    made = (
        batch | {"data_position": positions} | ({"cuts": cuts} if config.use_sft else {})
        for batch, positions, cuts in batches
    )
    return _prefetch(made, closing)


class EvalBatches:
    """The batches of one evaluation set.

    With `steps` = N an evaluation is N batches of an endless stream, which repeats the data if they are fewer: the
    first N each time, or with `eval_mode`=rolling the N after those of the last evaluation. With -1 it is one epoch:
    each document once, what is left of the last rows padded, and the same number of batches on every host. For that
    each host counts its rows the first time, which reads and tokenizes its documents once more.

    Args:
        config: the run's.
        data: the set.
        tokenizer: None where nothing is text.
        rows: the rows of the global batch to make, ascending.
        global_batch: B of the evaluation.
        position: of a rolling set, as `position` gave it; None: from the start.

    Raises:
        UserError: the source has no text, or has no end (synthetic) and one epoch is asked for.
    """

    def __init__(
        self,
        config: "FrozenConfigDict",
        data: EvalSet,
        tokenizer: Tokenizer | None,
        rows: Sequence[int],
        global_batch: int,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        source, one_epoch = data.source, data.steps == -1
        of = f" of {data.name}" if data.name else ""
        if one_epoch and rows_an_epoch(config, source) == math.inf:
            raise UserError(
                f"the evaluation data{of} have no end to evaluate to: set eval_steps to a number of batches"
            )
        if not count_pairs(config, source, tokenizer, 1):
            raise UserError(f"the evaluation data{of} have no text: give other data with eval_dataset_path=PATH")
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        self._rows = rows
        self._global_batch = global_batch
        self._steps = None if one_epoch else data.steps
        self._one_epoch = one_epoch
        self._rolls = config.eval_mode == "rolling"
        self._start(position)

    def __iter__(self) -> Iterator[Batch]:
        """The batches, made ahead of time in a thread. They have no `data_position`."""
        if not self._rolls:
            self._start(None)
        count, before = self.steps(), self._rows_taken
        self._rows_taken += count * self._global_batch
        closing, mixture = threading.Event(), Mixture([1])
        batches = _batches(self._config, [self._feed], mixture, self._rows, self._global_batch, closing, before, count)
        return _prefetch((batch for batch, *_ in batches), closing)

    def steps(self) -> int:
        """How many batches an evaluation has. The first call, by `iter` or directly, waits for that of other hosts."""
        if self._steps is None:
            self._steps = self._count_steps()
        return self._steps

    def position(self) -> dict[str, Any]:
        """How far a rolling set has come, of all hosts, in lists: the next evaluation goes on there.

        Every process calls it, after an evaluation's last batch was taken.
        """
        from src.data.host_arrays import max_over_hosts

        lanes = np.full((self._global_batch, 2), np.iinfo(np.int32).min, np.int32)  # less than what other hosts have
        lanes[list(self._rows)] = [self._feed.position(row) for row in range(len(self._rows))]
        return {"rows_taken": self._rows_taken, "lanes": max_over_hosts(lanes).tolist()}

    def _start(self, position: Mapping[str, Any] | None) -> None:
        """Goes to the first batch, or to a position."""
        lanes = None
        if position is not None:
            lanes = np.array(position["lanes"], np.int32)
            if len(lanes) != self._global_batch:
                lanes = after_documents(lanes, self._global_batch)
            lanes = lanes[list(self._rows)]
        self._rows_taken = 0 if position is None else position["rows_taken"]
        self._feed = make_feed(
            self._config,
            self._source,
            self._tokenizer,
            self._rows,
            self._global_batch,
            positions=lanes,
            one_epoch=self._one_epoch,
        )

    def _count_steps(self) -> int:
        """How many batches one epoch has: as many as the host with the most rows needs."""
        from src.data.host_arrays import max_over_hosts

        if (count := rows_an_epoch(self._config, self._source)) is not None:
            return math.ceil(count / self._global_batch)
        documents = Documents(self._config, self._source, self._tokenizer, name="")
        most = 0
        for row in self._rows:
            ordinals = range(row, len(self._source), self._global_batch)
            sizes = ([len(document.ids) for document in documents(n)] for n in ordinals)
            most = max(most, rows_needed(sizes, self._config.max_target_length, row_layout(self._config)))
        return int(max_over_hosts(np.int32(most)))


class Fact(NamedTuple):
    """What an entry of `data_fingerprint` is about.

    source: the source's name, "" for the only one; None where the entry is about the run.
    name: the fact, as the source's own fingerprint has it; the entry itself where it is about the run.
    """

    source: str | None
    name: str

    @classmethod
    def of(cls, entry: str, sources: Sequence[str]) -> Self:
        """Reads an entry of a run with these sources."""
        for source in sorted(filter(None, sources), key=len, reverse=True):
            if entry.startswith(prefix := f"source {source} "):
                return cls(source, entry.removeprefix(prefix))
        if entry.startswith("source ") and entry != "source weights":
            return cls("", entry.removeprefix("source "))
        return cls(None, entry)

    @property
    def is_file(self) -> bool:
        """Whether it is one file's size; `files.fingerprint` has these of few files only."""
        return self.source is not None and self.name.startswith("file ")


def data_fingerprint(
    config: "FrozenConfigDict", data: TrainData, tokenizer: Tokenizer | None, global_batch: int
) -> dict[str, str | int]:
    """Everything the sequence of training batches depends on: while it is equal, so are the batches at each step."""
    facts: dict[str, str | int] = {}
    for name, source in zip(data.names, data.sources, strict=True):
        prefix = f"source {name} " if name else "source "
        facts |= {f"{prefix}{fact}": value for fact, value in source.fingerprint().items()}
    if len(data.sources) > 1:
        shares = (f"{name} {weight:g}" for name, weight in zip(data.names, data.weights, strict=True))
        facts["source weights"] = ", ".join(shares)
    facts |= {f"tokenizer {fact}": value for fact, value in (tokenizer.fingerprint() if tokenizer else {}).items()}
    if config.use_sft:
        template = (tokenizer.chat_template or "").encode()
        facts["chat template"] = hashlib.sha256(template).hexdigest()[:16]
        facts["sft_train_on_completion_only"] = config.sft_train_on_completion_only
        if config.packing:
            facts["packing of conversations"] = "whole"  # they were cut before
    if not config.packing and config.long_documents == "truncate":
        facts["long_documents"] = config.long_documents
    if config.batch_transform:
        facts["batch_transform"] = config.batch_transform
    return facts | {
        "global batch": global_batch,
        "max_target_length": config.max_target_length,
        "packing": config.packing,
        "data_shuffle_seed": config.data_shuffle_seed,
    }


def count_pairs(
    config: "FrozenConfigDict", source: Source | RowSource, tokenizer: Tokenizer | None, enough: int
) -> int:
    """How many (token, target) pairs a source has, not counted further than to `enough`: mostly a few reads."""
    if isinstance(source, RowSource):
        return enough  # a row is never empty
    pairs = 0
    for i in range(len(source)):
        if pairs >= enough:
            break
        pairs += sum(max(len(document.ids) - 1, 0) for document in encode(config, tokenizer, source[i]))
    return pairs


def _check_length(
    config: "FrozenConfigDict", name: str, source: Source | RowSource, tokenizer: Tokenizer | None
) -> None:
    length = config.max_target_length
    if (pairs := count_pairs(config, source, tokenizer, length)) < length:
        of = f" of {name}" if name else ""
        raise UserError(
            f"the training data{of} have {pairs} tokens, fewer than one row of max_target_length={length}: set "
            "max_target_length to less, or give a dataset_path with more text"
        )


def _batches(
    config: "FrozenConfigDict",
    feeds: Sequence[Feed],
    mixture: Mixture,
    rows: Sequence[int],
    global_batch: int,
    closing: threading.Event,
    rows_taken: int,
    count: int | None = None,
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Batches after so many rows of the run, `count` of them or without end: (batch, `data_position` after it, `cuts`).

    Thread n of N fills rows n, n + N, ... of one batch after the other. Rows differ in how long they take: a thread
    waits for the others only when it is some batches ahead of them. Once `closing` is set they begin no further row.
    """
    transform = None
    if config.batch_transform:
        from src.data.readers.custom import apply_transform

        function = load_function(config.batch_transform, "batch_transform")
        transform = functools.partial(apply_transform, function, config.vocab_size)

    def fill(batch: Batch, positions: np.ndarray, cuts: np.ndarray, dealt: list[tuple[int, int]], thread: int) -> None:
        for row in range(thread, len(rows), config.data_threads):
            if closing.is_set():
                return
            source, ordinal = dealt[row]
            cuts[row] = feeds[source].fill(batch, row, ordinal)
            positions[row] = [feed.position(row) for feed in feeds]

    def begin(before: int) -> tuple[Batch, np.ndarray, np.ndarray, list[Future[None]]]:
        batch = empty_batch(len(rows), config.max_target_length)
        positions, cuts = np.empty((len(rows), len(feeds), 2), np.int32), np.empty((len(rows), 2), np.int32)
        dealt = mixture.deal(before, rows, global_batch, config.data_shuffle_seed)
        begun = [thread.submit(fill, batch, positions, cuts, dealt, n) for n, thread in enumerate(threads)]
        return batch, positions, cuts, begun

    with contextlib.ExitStack() as exits:
        threads = [ThreadPoolExecutor(1, thread_name_prefix="rows") for _ in range(config.data_threads)]
        for thread in threads:
            exits.callback(thread.shutdown, cancel_futures=True)
        begun = map(begin, itertools.islice(itertools.count(rows_taken, global_batch), count))
        ahead = collections.deque(itertools.islice(begun, _BEGUN_BATCHES))
        while ahead:
            batch, positions, cuts, parts = ahead.popleft()
            for part in parts:
                part.result()
            ahead.extend(itertools.islice(begun, 1))
            yield transform(batch) if transform else batch, positions, cuts


def _prefetch(batches: Iterator[Batch], closing: threading.Event) -> Iterator[Batch]:
    """The same batches, with the next ones being made in a thread while the caller is busy with one.

    An error there is raised here at its batch. The thread ends with the iterator (its `close`, or being collected),
    which sets `closing` and waits for no more than the rows that are being made.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="data")
    try:
        ahead = collections.deque(thread.submit(next, batches, None) for _ in range(_PREFETCHED_BATCHES))
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch
    finally:
        closing.set()
        thread.shutdown(cancel_futures=True)
