"""Random tokens, for measuring speed."""

import numpy as np

from src.data import order
from src.data.types import Document


class SyntheticSource:
    """Random tokens without text: row n is a pure function of (seed, n).

    Args:
        vocab_size: V; ids are in [0, V).
        length: T; a row has T + 1 ids.
        seed: of the hash.
    """

    row_count = None

    def __init__(self, vocab_size: int, length: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._places = np.arange(length + 1, dtype=np.uint64)

    def row(self, i: int) -> list[Document]:
        """Row `i`, one document."""
        return [Document(self.ids(i))]

    def ids(self, n: int) -> np.ndarray:
        """The int32 [T + 1] ids of row `n`."""
        start = order.mix64(order.keys("synthetic", self._seed)[0] ^ n)
        return (order.mix64(self._places + np.uint64(start)) % np.uint64(self._vocab_size)).astype(np.int32)

    def fingerprint(self) -> dict[str, str | int]:
        """What makes two of them give the same ids, beside T."""
        return {"type": "synthetic", "vocab_size": self._vocab_size, "seed": self._seed}
