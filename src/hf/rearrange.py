"""Maps the dims of a tensor in a file to those of a weight here, in both directions and by slices.

"(N H) D -> D N H" reads: the file's first dim is the head, then the place in the head; its second is D; the weight's
dims are D, N, H. One of several equal parts of a dim of the file is written "i/n": GPT-2's c_attn holds queries, keys
and values, and "D (0/3 N H) -> D N H" are its queries. Letters of the weight that the file's dims lack are dims that
are split over several tensors, one for each index.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from src.hf.safetensors import Tensor

Range = tuple[int, int]  # start, stop


class Rearrangement:
    """A pattern, and the size of each of its letters.

    Attributes:
        dims: the weight's letters.
        split: those that are split over several tensors.
        file_shape: of the file's tensor.
    """

    def __init__(self, pattern: str, sizes: Mapping[str, int]) -> None:
        file_side, _, weight_side = pattern.partition(" -> ")
        groups = re.findall(r"\(([^)]*)\)|(\S+)", file_side)
        self._file_dims = [(group or single).split() for group, single in groups]  # factors, outermost first
        self._factors = [factor for dim in self._file_dims for factor in dim]
        parts = {factor: tuple(map(int, factor.split("/"))) for factor in self._factors if "/" in factor}
        self._parts: dict[str, Range] = {factor: (part, part + 1) for factor, (part, _) in parts.items()}
        self.sizes = {**sizes, **{factor: count for factor, (_, count) in parts.items()}}
        self.dims = weight_side.split()
        self.split = [letter for letter in self.dims if letter not in self._factors]
        self.file_shape = tuple(math.prod(self.sizes[factor] for factor in dim) for dim in self._file_dims)

    def read(self, tensor: Tensor, wanted: Mapping[str, Range]) -> np.ndarray:
        """Returns the part of the weight in the range `wanted` of each letter, split dims of size 1.

        Of each dim of the file it reads the shortest run of whole inner factors that holds the ranges.
        """
        ranges = {**wanted, **self._parts}
        index, shape, cut = [], [], []
        for dim in self._file_dims:
            start, length = 0, 1  # in elements of the factors so far
            for factor in dim:
                size, (first, last) = self.sizes[factor], ranges[factor]
                start *= size
                if length == 1:  # one index of all factors further out: this one's range is contiguous
                    start, length = start + first, last - first
                    shape.append(length)
                    cut.append(slice(None))
                else:
                    length *= size
                    shape.append(size)
                    cut.append(slice(first, last))
            index.append(slice(start, start + length))
        return self._to_weight(tensor.read(tuple(index)).reshape(shape)[tuple(cut)])

    def write(self, part: np.ndarray, tensor: np.ndarray) -> None:
        """Copies `part` of a weight, with split dims of size 1, into the file's `tensor`."""
        by_factor = tensor.reshape([self.sizes[factor] for factor in self._factors])  # a view
        taken = tuple(slice(*self._parts.get(factor, (None,))) for factor in self._factors)
        self._to_weight(by_factor[taken])[...] = part

    def _to_weight(self, block: np.ndarray) -> np.ndarray:
        """Returns a view of `block`, whose dims are the file's factors, with the weight's dims."""
        letters = [factor for factor in self._factors if factor not in self._parts]
        block = block.squeeze(tuple(place for place, factor in enumerate(self._factors) if factor in self._parts))
        block = block.transpose([letters.index(letter) for letter in self.dims if letter in letters])
        return np.expand_dims(block, tuple(self.dims.index(letter) for letter in self.split))
