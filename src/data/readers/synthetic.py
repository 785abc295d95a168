"""Makes random tokens, for measuring speed: `dataset_type=synthetic`."""

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data import order
from src.data.types import Document, Fingerprint, InputSpec, RowSource


class SyntheticSource(RowSource):
    """Makes endless rows of `length` + 1 random ids in [0, vocab_size); `seed` and n determine row n."""

    row_count = None

    def __init__(self, vocab_size: int, length: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self._columns = np.arange(length + 1, dtype=np.uint64)

    def row(self, i: int) -> list[Document]:
        start = order.mix64(order.hash_keys("synthetic", self._seed)[0] ^ i)
        ids = order.mix64(self._columns + np.uint64(start)) % np.uint64(self._vocab_size)
        return [Document(ids.astype(np.int32))]

    def fingerprint(self) -> Fingerprint:
        return {"type": "synthetic", "vocab_size": self._vocab_size, "seed": self._seed}


def open_source(spec: DatasetSpec, inputs: InputSpec) -> SyntheticSource:
    """Opens the rows of a seed, at least 0 for training and negative for evaluation, so that their rows differ."""
    seed = inputs.data.data_shuffle_seed
    return SyntheticSource(inputs.vocab_size, inputs.batch.max_target_length, -1 - seed if spec.is_eval else seed)
