"""Batches for the train step and for evaluations: the rows of this host, and the global arrays made of them.

A batch is a dict of numpy arrays as `packing.empty_batch` describes them. Which rows a host has changes nothing in a
row: it depends on the data, the seed, the global batch size, T and the step alone.

B: rows of a batch, over all hosts.  T: tokens a row.  S: sources (1; the dim is there for mixtures to come).
"""

import collections
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from src.data import order
from src.data.conversations import Conversation, encode_conversation
from src.data.packing import Batch, Document, Documents, Lane, empty_batch, rows_needed
from src.data.sources import Source, SyntheticSource
from src.data.tokenizer import Tokenizer
from src.errors import UserError

if TYPE_CHECKING:
    import jax
    from ml_collections import FrozenConfigDict

_SOURCE = 0
_PREFETCHED_BATCHES = 2


def train_batches(
    config: "FrozenConfigDict",
    source: Source | SyntheticSource,
    tokenizer: Tokenizer | None,
    rows: Sequence[int],
    global_batch: int,
    position: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Endless batches, made ahead of time in a thread. Errors in it are raised here; closing the iterator ends it.

    Args:
        config: `packing`, `max_target_length`, `data_shuffle_seed` and `sft_train_on_completion_only` of it.
        source: the documents.
        tokenizer: None with a SyntheticSource.
        rows: the rows of the global batch to make, ascending: see `host_rows`.
        global_batch: B.
        position: int32 [rows, S, 2], `data_position` of the batch to go on after; None: from the start.

    Returns:
        Batches of `len(rows)` rows, which have `data_position` too: where each row's lane is after this batch, as int32
        [rows, S, 2] of (documents taken, pairs taken of the next one).

    Raises:
        UserError: the source has less text than one row.
    """
    length = config.max_target_length
    if (pairs := _count_pairs(config, source, tokenizer, length)) < length:
        raise UserError(
            f"the training data have {pairs} tokens, fewer than one row of max_target_length={length}: set "
            "max_target_length to less, or give a dataset_path with more text"
        )
    if position is None:
        position = np.zeros((len(rows), 1, 2), np.int32)
    documents = _documents(config, source, tokenizer)
    lanes = [Lane(documents, row, global_batch, config.packing, position[i, _SOURCE]) for i, row in enumerate(rows)]
    return _prefetch(_endless(lanes, length))


class EvalBatches:
    """The batches of one evaluation, the same each time they are iterated over.

    With `eval_steps` = N these are the first N batches of an endless stream, which repeats the data if they are fewer.
    With -1 they are one epoch: each document once, what is left of the last rows padded, and the same number of batches
    on every host. For that each host counts its rows the first time, which reads and tokenizes its documents once more.

    Args:
        config: `eval_steps`, `packing`, `max_target_length`, `data_shuffle_seed` and `sft_train_on_completion_only`.
        source: the documents.
        tokenizer: None with a SyntheticSource.
        rows: the rows of the global batch to make, ascending.
        global_batch: B of the evaluation.

    Raises:
        UserError: the source has no text, or has no end (synthetic) and one epoch is asked for.
    """

    def __init__(
        self,
        config: "FrozenConfigDict",
        source: Source | SyntheticSource,
        tokenizer: Tokenizer | None,
        rows: Sequence[int],
        global_batch: int,
    ) -> None:
        one_epoch = config.eval_steps == -1
        if one_epoch and isinstance(source, SyntheticSource):
            raise UserError("dataset_type=synthetic has no end to evaluate to: set eval_steps to a number of batches")
        if not _count_pairs(config, source, tokenizer, 1):
            raise UserError("the evaluation data have no text: give other data with eval_dataset_path=PATH")
        self._documents = _documents(config, source, tokenizer)
        self._end = len(source) if one_epoch else math.inf
        self._steps = None if one_epoch else config.eval_steps
        self._rows = rows
        self._global_batch = global_batch
        self._length = config.max_target_length
        self._packing = config.packing

    def __iter__(self) -> Iterator[Batch]:
        """The batches, made ahead of time in a thread. They have no `data_position`."""
        lanes = [Lane(self._documents, row, self._global_batch, self._packing, end=self._end) for row in self._rows]
        return _prefetch(_fill(lanes, self._length) for _ in range(self.steps()))

    def steps(self) -> int:
        """How many batches an evaluation has. The first call, by `iter` or directly, waits for that of other hosts."""
        if self._steps is None:
            self._steps = _max_over_hosts(max(self._count_rows(row) for row in self._rows))
        return self._steps

    def _count_rows(self, row: int) -> int:
        """How many rows the lane of this row has in one epoch."""
        sizes = (len(self._documents(ordinal).ids) for ordinal in range(row, self._end, self._global_batch))
        return rows_needed(sizes, self._length, self._packing)


def data_fingerprint(
    config: "FrozenConfigDict", source: Source | SyntheticSource, tokenizer: Tokenizer | None, global_batch: int
) -> dict[str, str | int]:
    """Everything the sequence of training batches depends on: while it is equal, so are the batches at each step."""
    parts = {"source": source.fingerprint(), "tokenizer": tokenizer.fingerprint() if tokenizer else {}}
    finetuning: dict[str, str | int] = {}
    if config.use_sft:
        template = (tokenizer.chat_template or "").encode()
        finetuning = {
            "chat template": hashlib.sha256(template).hexdigest()[:16],
            "sft_train_on_completion_only": config.sft_train_on_completion_only,
        }
    return {
        **{f"{part} {name}": value for part, facts in parts.items() for name, value in facts.items()},
        **finetuning,
        "global batch": global_batch,
        "max_target_length": config.max_target_length,
        "packing": config.packing,
        "data_shuffle_seed": config.data_shuffle_seed,
    }


def host_rows(sharding: "jax.sharding.Sharding", global_shape: Sequence[int]) -> np.ndarray:
    """int [rows], ascending: the rows (dim 0) of a global array that this process's devices hold any part of."""
    index_maps = sharding.addressable_devices_indices_map(tuple(global_shape)).values()
    return np.unique(np.concatenate([np.arange(*index[0].indices(global_shape[0])) for index in index_maps]))


def to_global(
    batch: Batch, shardings: Mapping[str, "jax.sharding.Sharding"], rows: Sequence[int], global_batch: int
) -> "dict[str, jax.Array]":
    """Global arrays [B, ...] on the devices of all hosts.

    Args:
        batch: this host's rows, [rows, ...].
        shardings: of each array of the batch; its other dims may be sharded too.
        rows: which rows of the global batch `batch` has, ascending: at least `host_rows` of every sharding.
        global_batch: B.
    """
    import jax  # the rest of this module is numpy

    def part(array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        return array[(_local(index[0], rows, global_batch), *index[1:])]

    return {
        name: jax.make_array_from_callback(
            (global_batch, *array.shape[1:]), shardings[name], functools.partial(part, array)
        )
        for name, array in batch.items()
    }


def to_host(array: "jax.Array", rows: Sequence[int]) -> np.ndarray:
    """The rows of a global array as `to_global` took them: a restored `data_position`, for `train_batches`.

    Args:
        array: [B, ...].
        rows: `host_rows` of its sharding.
    """
    host = np.empty((len(rows), *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        host[(_local(shard.index[0], rows, len(array)), *shard.index[1:])] = shard.data
    return host


def _local(global_rows: slice, rows: Sequence[int], global_batch: int) -> slice:
    """Where a range of global rows lies among this host's `rows`, which have all of it."""
    first, last, _ = global_rows.indices(global_batch)
    start = int(np.searchsorted(rows, first))
    return slice(start, start + last - first)


def _documents(config: "FrozenConfigDict", source: Source | SyntheticSource, tokenizer: Tokenizer | None) -> Documents:
    """The endless stream of documents: all of the source's in a random order, then all in another, and so on."""
    if isinstance(source, SyntheticSource):
        return lambda ordinal: Document(source.ids(ordinal))
    count = len(source)

    def document(ordinal: int) -> Document:
        epoch, i = divmod(ordinal, count)
        return _encode(config, tokenizer, source[order.permute(i, count, config.data_shuffle_seed, _SOURCE, epoch)])

    return document


def _encode(config: "FrozenConfigDict", tokenizer: Tokenizer, item: str | Conversation) -> Document:
    """A source's item in ids; none at all for an empty text, which has nothing to learn but its own end."""
    if isinstance(item, Conversation):
        return encode_conversation(tokenizer, item, config.sft_train_on_completion_only)
    return Document(tokenizer.encode(item) if item else np.empty(0, np.int32))


def _count_pairs(
    config: "FrozenConfigDict", source: Source | SyntheticSource, tokenizer: Tokenizer | None, enough: int
) -> int:
    """How many (token, target) pairs the documents have, not counted further than to `enough`: mostly a few reads."""
    if isinstance(source, SyntheticSource):
        return enough
    pairs = 0
    for i in range(len(source)):
        if pairs >= enough:
            break
        pairs += max(len(_encode(config, tokenizer, source[i]).ids) - 1, 0)
    return pairs


def _endless(lanes: list[Lane], length: int) -> Iterator[Batch]:
    while True:
        batch = _fill(lanes, length)
        batch["data_position"] = np.array([[lane.position] for lane in lanes], np.int32)
        yield batch


def _fill(lanes: list[Lane], length: int) -> Batch:
    """The next row of each lane."""
    batch = empty_batch(len(lanes), length)
    for row, lane in enumerate(lanes):
        lane.fill(batch, row)
    return batch


def _prefetch(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, with the next ones being made in a thread while the caller is busy with one.

    An error there is raised here at its batch. The thread ends with the iterator (its `close`, or being collected).
    """
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        ahead = collections.deque(thread.submit(next, batches, None) for _ in range(_PREFETCHED_BATCHES))
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch


def _max_over_hosts(value: int) -> int:
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))
