"""Maps the dims of a tensor in a file to those of a weight here, in both directions and by slices.

"(N H) D -> D N H" reads: the file's first dim is the head, then the place in the head; its second is D; the weight's
dims are D, N, H. One of several equal parts of a dim of the file is written "i/n": GPT-2's c_attn holds queries, keys
and values, and "D (0/3 N H) -> D N H" are its queries. Letters of the weight that the file's dims lack are dims that
are split over several tensors, one for each index.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from src.hf.safetensors import Tensor

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Rearrangement:
    """A parsed pattern."""

    file_dims: tuple[tuple[str, ...], ...]  # the factors of each dim of the file's tensor, outermost first
    dims: tuple[str, ...]  # the weight's

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors of the file's dims in order."""
        return tuple(factor for dim in self.file_dims for factor in dim)

    @property
    def split(self) -> tuple[str, ...]:
        """The weight's dims that are split over several tensors."""
        return tuple(letter for letter in self.dims if letter not in self.factors)

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the file's tensor."""
        return tuple(math.prod(_size(factor, sizes) for factor in dim) for dim in self.file_dims)

    def read(self, tensor: Tensor, sizes: Mapping[str, int], wanted: Mapping[str, Range]) -> np.ndarray:
        """Returns the part of the weight that `wanted` spans, split dims of size 1; reads little else of the file.

        Args:
            tensor: the file's.
            sizes: of each letter.
            wanted: the range of each letter.
        """
        index, shape, cut = [], [], []
        for dim in self.file_dims:
            at, dim_shape, dim_cut = _enclose(dim, sizes, wanted)
            index.append(at)
            shape += dim_shape
            cut += dim_cut
        block = tensor.read(tuple(index)).reshape(shape)[tuple(cut)]
        return self._to_weight(block)

    def write(self, part: np.ndarray, tensor: np.ndarray, sizes: Mapping[str, int]) -> None:
        """Copies `part` of a weight, with split dims of size 1, into the file's `tensor`."""
        by_factor = tensor.reshape([_size(factor, sizes) for factor in self.factors])  # a view
        taken = tuple(slice(*_range(factor, {})) if "/" in factor else slice(None) for factor in self.factors)
        self._to_weight(by_factor[taken])[...] = part

    def _to_weight(self, block: np.ndarray) -> np.ndarray:
        """Returns a view of `block`, whose dims are the file's factors, with the weight's dims."""
        parts = tuple(place for place, factor in enumerate(self.factors) if "/" in factor)
        letters = [factor for factor in self.factors if "/" not in factor]
        block = block.squeeze(parts).transpose([letters.index(letter) for letter in self.dims if letter in letters])
        return np.expand_dims(block, tuple(self.dims.index(letter) for letter in self.split))


def parse(pattern: str) -> Rearrangement:
    """Parses a pattern (see above)."""
    file_side, _, weight_side = pattern.partition(" -> ")
    file_dims = [tuple((group or single).split()) for group, single in re.findall(r"\(([^)]*)\)|(\S+)", file_side)]
    return Rearrangement(tuple(file_dims), tuple(weight_side.split()))


def _enclose(
    factors: tuple[str, ...], sizes: Mapping[str, int], wanted: Mapping[str, Range]
) -> tuple[slice, list[int], list[slice]]:
    """Returns the shortest run of whole inner factors of one file dim that holds the wanted ranges of its letters.

    Beside the run are its shape by factor and the slices that cut the wanted part out of that.
    """
    start, length = 0, 1  # in elements of the factors so far
    shape, cut = [], []
    for factor in factors:
        size, (first, last) = _size(factor, sizes), _range(factor, wanted)
        start *= size
        if length == 1:  # One index of all factors further out: this one's range is contiguous.
            start, length = start + first, last - first
            shape.append(length)
            cut.append(slice(None))
        else:
            length *= size
            shape.append(size)
            cut.append(slice(first, last))
    return slice(start, start + length), shape, cut


def _size(factor: str, sizes: Mapping[str, int]) -> int:
    return int(factor.partition("/")[2]) if "/" in factor else sizes[factor]


def _range(factor: str, wanted: Mapping[str, Range]) -> Range:
    if "/" in factor:
        part = int(factor.partition("/")[0])
        return part, part + 1
    return wanted[factor]
