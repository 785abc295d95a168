"""Applies a family's table of tensors to a model: which tensor of the files has which slice of which weight.

A table row is (weight, file, dims):

    ("layer.feed_forward.wi", "model.layers.{layer}.mlp.experts.{E}.{A:gate_proj,up_proj}.weight", "F D -> E D A F")

`weight` is a dotted path in the model's nested dict, in which "layer." means any layer and "mtp." any extra prediction
layer. `file` is a tensor's name; `{layer}` in it is the layer's number, `{E}` the index along the weight's dim E,
`{A:a,b}` the name for each index along A. A row applies to weights with its number of dims; a weight stacked over
layers has one more in front. A row with a fourth entry only applies to weights whose module also has a weight of that
name.

`dims` maps a tensor's dims to its weight's, in both directions and by slices. "(N H) D -> D N H" means: the file's
first dim is the head, then the position in the head; its second is D; the weight's dims are D, N, H. A dim in which
several weights are concatenated is written with bars, and a star marks this row's weight: GPT-2's c_attn concatenates
the heads of queries, keys and values, and "D (N|K*|K H) -> D K H" are its keys. Letters of the weight that the file's
dims lack are dims that are split over several tensors, one per index.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from src.extras.hf.safetensors import Tensor
from src.system.errors import UserError, first_few

Range = tuple[int, int]  # start, stop
WeightPath = tuple[Any, ...]  # names and numbers in the model's nested dict
Shapes = Mapping[WeightPath, tuple[int, ...]]


class TensorMap(NamedTuple):
    """A row of a family's table; the module's docstring describes the columns."""

    weight: str
    file: str
    dims: str
    requires: str = ""


class Rearrangement:
    """The parsed `dims` of a table row, with the sizes of its letters, and of letters of the module's other weights."""

    def __init__(self, pattern: str, sizes: Mapping[str, int]) -> None:
        file_side, _, weight_side = pattern.partition(" -> ")
        self.sizes, self._file_sizes, self._offsets = sizes, dict(sizes), dict.fromkeys(sizes, 0)
        for before, starred, after in re.findall(r"([\w|]*)(\w)\*([\w|]*)", file_side):
            self._offsets[starred] = sum(sizes[letter] for letter in before.replace("|", ""))
            self._file_sizes[starred] = sum(sizes[letter] for letter in (before + starred + after).replace("|", ""))
            file_side = file_side.replace(f"{before}{starred}*{after}", starred)
        groups = re.findall(r"\(([^)]*)\)|(\S+)", file_side)
        self.file_dims = [(group or single).split() for group, single in groups]  # factors, outermost first
        self._factors = [factor for dim in self.file_dims for factor in dim]
        self.dims = weight_side.split()  # the weight's letters, including those split over several tensors
        self.split = [letter for letter in self.dims if letter not in self._factors]
        self.file_shape = tuple(math.prod(self._file_sizes[factor] for factor in dim) for dim in self.file_dims)

    def read(self, tensor: Tensor, wanted: Mapping[str, Range]) -> np.ndarray:
        """Reads a slice of the weight, the range `wanted` of each letter; dims split over tensors have size 1."""
        # In each dim of the file, reads the shortest run of whole inner factors that covers the ranges.
        index, shape, cut = [], [], []
        for dim in self.file_dims:
            start, length = 0, 1  # in elements of the factors so far
            for factor in dim:
                size, (first, last) = self._file_sizes[factor], (at + self._offsets[factor] for at in wanted[factor])
                start *= size
                if length == 1:  # one index of all outer factors: this range is contiguous
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
        by_factor = tensor.reshape([self._file_sizes[factor] for factor in self._factors])  # a view
        spans = [(self._offsets[factor], self._offsets[factor] + self.sizes[factor]) for factor in self._factors]
        self._to_weight(by_factor[tuple(slice(*span) for span in spans)])[...] = part

    def _to_weight(self, block: np.ndarray) -> np.ndarray:
        block = block.transpose([self._factors.index(letter) for letter in self.dims if letter in self._factors])
        return np.expand_dims(block, tuple(self.dims.index(letter) for letter in self.split))


class Piece(NamedTuple):
    """The slice of a weight that is stored in one tensor of the files."""

    weight: WeightPath
    file: str  # the tensor's name
    rearrangement: Rearrangement
    layer_index: tuple[int, ...] = ()  # along the dim of stacked layers; empty if there is none
    split_index: Mapping[str, int] | None = None  # along each dim that is split over several tensors

    def region(self) -> tuple[Range, ...]:
        """Returns the range of each dim of the weight that this piece covers."""
        ranges = [(at, at + 1) for at in self.layer_index]
        for letter in self.rearrangement.dims:
            at = (self.split_index or {}).get(letter)
            ranges.append((0, self.rearrangement.sizes[letter]) if at is None else (at, at + 1))
        return tuple(ranges)

    def read(self, tensor: Tensor, region: Sequence[Range]) -> np.ndarray:
        """Reads a region of the weight that is within this piece."""
        ranges = region[len(self.layer_index) :]
        block = self.rearrangement.read(tensor, dict(zip(self.rearrangement.dims, ranges, strict=True)))
        return block.reshape([stop - start for start, stop in region])

    def low_rank(self, down: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """Converts an adapter to matrices [r, in] and [out, r] for this piece's tensor.

        `down` [*in, r] and `up` [r, *out] have a leading dim if the weight is stacked over layers. The third result
        tells whether `in` is the tensor's first dim. Returns None for other forms, such as an adapter per expert.
        """
        down, up, dims = down[self.layer_index], up[self.layer_index], self.rearrangement.dims
        ins, outs, split = dims[: down.ndim - 1], dims[down.ndim - 1 :], self.split_index or {}
        groups = self.rearrangement.file_dims
        if len(ins) + len(outs) != down.ndim + up.ndim - 2 or len(groups) != 2 or set(ins) & split.keys():
            return None
        fan_in_first = set(groups[0]) <= set(ins)
        of_in, of_out = groups if fan_in_first else groups[::-1]
        up = up[(slice(None), *(split.get(letter, slice(None)) for letter in outs))]
        outs = [letter for letter in outs if letter not in split]
        if set(of_in) != set(ins) or set(of_out) != set(outs):
            return None
        down = down.transpose([*map(ins.index, of_in), len(ins)]).reshape(-1, down.shape[-1]).T
        up = up.transpose([0, *(1 + outs.index(letter) for letter in of_out)]).reshape(len(up), -1).T
        return down, up, fan_in_first

    def write(self, weight: np.ndarray, tensor: np.ndarray) -> None:
        """Copies this piece of `weight` into the file's `tensor`."""
        part = weight[tuple(slice(*span) for span in self.region())]
        self.rearrangement.write(part.reshape(part.shape[len(self.layer_index) :]), tensor)


def lay_out(
    rows: Sequence[TensorMap], shapes: Shapes, vocab_size: int, family: str, copied: Sequence[TensorMap] = ()
) -> list[Piece]:
    """Lists all pieces of a model's weights, weight by weight.

    Dim V has size `vocab_size` in the files, and may be padded in the weights. `copied` are table rows of tensors that
    repeat a weight for each extra prediction layer; `family` is the family's name in messages. Raises UserError if no
    row applies to one of the model's weights.
    """
    layers = _layer_numbers(shapes)
    pieces, unmapped, matched, module_sizes = [], [], {}, dict[WeightPath, dict[str, int]]()
    for weight, shape in shapes.items():
        (name, numbers), stacked = _place(weight, layers), weight[0] == "segments"
        row = next((row for row in rows if _is_for(row, name, shape[stacked:], weight, shapes)), None)
        if row is None:
            unmapped.append(f"{'.'.join(map(str, weight))} {list(shape)}")
            continue
        letters = dict(zip(row.dims.partition(" -> ")[2].split(), shape[stacked:], strict=True)) | {"V": vocab_size}
        matched[weight] = name, numbers, stacked, row, letters
        module_sizes.setdefault(weight[:-1], {}).update(letters)
    for weight, (name, numbers, stacked, row, letters) in matched.items():
        sizes = {**module_sizes[weight[:-1]], **letters}
        rearrangement = Rearrangement(row.dims, sizes)
        for at, number in enumerate(numbers):
            for file, split_index in _files(row.file.replace("{layer}", str(number)), sizes):
                pieces.append(Piece(weight, file, rearrangement, (at,) if stacked else (), split_index))
        for copy in (copy for copy in copied if copy.weight == name):
            files = [copy.file.replace("{layer}", str(at[0][0])) for (kind, _), at in layers.items() if kind == "mtp"]
            pieces += [Piece(weight, file, Rearrangement(copy.dims, sizes)) for file in files]
    if unmapped:
        raise UserError(
            f"{family}'s files have no tensor for {first_few(unmapped)}: the model's settings differ from "
            "its config.json, or use another family's features"
        )
    return pieces


def _layer_numbers(shapes: Shapes) -> dict[tuple[str, int], list[list[int]]]:
    """Maps ("segments", i) and ("mtp", i) to the layer numbers at each position of its pattern."""
    repeats = {weight[1]: shape[0] for weight, shape in shapes.items() if weight[0] == "segments"}
    numbers, first = {}, 0
    for segment in sorted(repeats):
        period = 1 + max(weight[2] for weight in shapes if weight[:2] == ("segments", segment))
        last = first + period * repeats[segment]
        numbers["segments", segment] = [list(range(first + position, last, period)) for position in range(period)]
        first = last
    for index in {weight[1] for weight in shapes if weight[0] == "mtp"}:
        numbers["mtp", index] = [[first + index]]
    return numbers


def _place(weight: WeightPath, layers: Mapping[tuple[str, int], list[list[int]]]) -> tuple[str, list[int]]:
    match weight:
        case ("segments", segment, position, *rest):
            return ".".join(["layer", *rest]), layers["segments", segment][position]
        case ("mtp", index, "block", *rest):
            return ".".join(["layer", *rest]), layers["mtp", index][0]
        case ("mtp", index, *rest):
            return ".".join(["mtp", *rest]), layers["mtp", index][0]
    return ".".join(map(str, weight)), [0]


def _is_for(row: TensorMap, name: str, shape: Sequence[int], weight: WeightPath, shapes: Shapes) -> bool:
    """Tests whether a row applies to the weight of this name and shape, without the dim of stacked layers."""
    dims = row.dims.partition(" -> ")[2].split()
    if row.weight != name or len(dims) != len(shape) or (row.requires and (*weight[:-1], row.requires) not in shapes):
        return False
    sizes, listed = dict(zip(dims, shape, strict=True)), re.findall(r"\{(\w):([^}]*)\}", row.file)
    return all(len(names.split(",")) == sizes[letter] for letter, names in listed)


def _files(template: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields each tensor name that a template stands for, with its index along each letter in the template."""
    match = re.search(r"\{(\w)(?::([^}]*))?\}", template)
    if match is None:
        yield template, {}
        return
    values = match[2].split(",") if match[2] else map(str, range(sizes[match[1]]))
    for index, value in enumerate(values):
        for name, rest in _files(template[: match.start()] + value + template[match.end() :], sizes):
            yield name, {match[1]: index, **rest}
