"""Finds which dims of a weight form a matrix, for optimizers that treat matrices and vectors differently."""

from dataclasses import dataclass
from typing import Any

from src.model.params import STACKED, by_path, field, nested
from src.model.selection import LOOKED_UP


@dataclass(frozen=True)
class MatrixDims:
    """A weight as a matrix for each index of its `batch` dims: layers, experts, the factors of a feed-forward layer."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]  # the dims that matmuls sum over, or that lookups index
    output: tuple[int, ...]  # a layer's other dims; all of them, without `reduction`, for a norm's scale or a bias
    hidden: bool  # a matrix other than embeddings, position tables and the output projection
    vocab: tuple[int, int] | None = None  # the dim of the vocabulary and its size without padding

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims of a matrix or vector."""
        return (*self.reduction, *self.output)


def matrices(declarations: Any, vocab_size: int) -> Any:
    """Finds the `MatrixDims` of each weight, in the nesting of the declarations; `vocab_size` is without padding."""
    axes, fan_in = by_path(field(declarations, "out_sharding")), by_path(field(declarations, "fan_in"))
    return nested({path: _matrix(axes[path], fan_in[path], vocab_size) for path in axes})


def _matrix(axes: tuple[str | None, ...], fan_in: tuple[int, ...], vocab_size: int) -> MatrixDims:
    stacks = tuple(dim for dim, axis in enumerate(axes) if axis in STACKED)
    is_table = len(axes) > 1 and axes[0] in LOOKED_UP
    inputs = (0,) if is_table else fan_in
    outputs = tuple(dim for dim in range(len(axes)) if dim not in (*stacks, *inputs))
    if inputs and any(axes[dim] for dim in outputs):
        # If another output has a logical axis, a dim without one counts matrices: SwiGLU's [D, 2, F] is two of [D, F].
        stacks += tuple(dim for dim in outputs if axes[dim] is None)
        outputs = tuple(dim for dim in outputs if axes[dim] is not None)
    hidden = bool(inputs) and not set(LOOKED_UP).intersection(axes)
    vocab = (axes.index("vocab"), vocab_size) if "vocab" in axes else None
    return MatrixDims(stacks, inputs, outputs, hidden, vocab)
