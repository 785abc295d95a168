"""Batches of a run of B rows on any number of hosts."""

import itertools

import numpy as np

from src.data.tokenizer import ByteTokenizer
from src.data.types import TrainData
from tests.data.one_source import alone, train_batches

B = 8
TOKENIZER = ByteTokenizer()


def take(batches, count):
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def hosts_of(count):
    """The rows of each of `count` hosts."""
    return np.split(np.arange(B), count)


def joined(config, data, hosts, steps, rows_taken=0, position=None, tokenizer=TOKENIZER):
    """`steps` batches of [B, ...], from that many hosts, each of which makes its own rows alone.

    data: TrainData, a source, or a function that opens TrainData for a host.
    """
    parts = []
    for rows in hosts_of(hosts):
        opened = data() if callable(data) else data if isinstance(data, TrainData) else alone(data)
        here = None if position is None else position[rows]
        parts.append(take(train_batches(config, opened, tokenizer, rows, B, rows_taken, here), steps))
    return [{name: np.concatenate([part[k][name] for part in parts]) for name in parts[0][k]} for k in range(steps)]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype
            assert batch[name].tobytes() == other[name].tobytes(), name


def rows_of(batches, row):
    return {name: np.stack([batch[name][row] for batch in batches]) for name in batches[0]}
