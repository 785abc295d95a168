"""Derives a weight's matrices, and whether it decays, from its name and logical axes, for checks of optimizers.

It does not use src/step/matrices.py, which optimizers use, so that mistakes there show.

S: matrices that a weight stacks (layers, experts).  I: inputs, O: outputs of a matrix; a vector has I = 1.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from src.config.schema import Step
from src.model.params import STACKED, Axes, matches
from src.model.selection import Path

LOOKED_UP = {"vocab", "position"}  # logical axes of tables and of the output projection, which muon leaves to adamw
WIDTHS = {"embed", "expert_embed", "latent"}  # logical axes of what a layer's matrix reads or writes
# Words in names of weights that optimizers treat as vectors, whatever their dims. UNDECAYED ones have no weight decay;
# kernels of convolutions decay if they are declared so.
UNDECAYED, KERNELS = {"scale", "bias", "norm", "rate"}, {"conv"}

Matrices = np.ndarray  # [S, I, O], float64


class Kind(NamedTuple):
    """The dims of a weight that stack its matrices, and the matrices' input and output dims; a vector has no inputs."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    vocab: tuple[int, int] | None = None  # the dim of the vocabulary and its size without padding

    def matrices(self, weight: np.ndarray) -> Matrices:
        """Arranges a weight as matrices [S, I, O] in float64, without the rows or columns that pad a vocabulary."""
        weight = weight.astype(np.float64)
        if self.vocab:
            weight = np.take(weight, np.arange(self.vocab[1]), axis=self.vocab[0])
        groups = self.stack, self.inputs, self.outputs
        sizes = [int(np.prod([weight.shape[dim] for dim in dims], dtype=int)) for dims in groups]
        return weight.transpose(sum(groups, ())).reshape(sizes)


def kind_of(path: Path, axes: Axes, vocab_size: int) -> Kind | None:
    """Finds the dims of a weight's matrices; None if neither its name nor its axes tell. `vocab_size` is unpadded.

    One side of a matrix is a single dim, the first or the last one: the width of the model or of a latent, or the rank
    of an adapter. SwiGLU's two factors, [D, 2, F], are separate matrices.
    """
    own, last = tuple(dim for dim, axis in enumerate(axes) if axis not in STACKED), path[-1]
    stack = tuple(dim for dim in range(len(axes)) if dim not in own)
    if len(own) == 1 or _words(path) & (UNDECAYED | KERNELS):
        return Kind(stack, (), own)
    if path[0] == "lora":
        count, of = len(own) - 1 if last == "down" else 1, path[-2]
    elif axes[own[0]] in WIDTHS:
        count, of = 1, last
    elif axes[own[-1]] in WIDTHS:
        count, of = len(own) - 1, last
    else:
        return None
    factors = own[1:2] if of == "wi" and len(own) == 3 else ()
    outputs = tuple(dim for dim in own[count:] if dim not in factors)
    return Kind(stack + factors, own[:count], outputs, (axes.index("vocab"), vocab_size) if "vocab" in axes else None)


def decays(path: Path, axes: Axes, declared: bool) -> bool:
    """Whether `adam_weight_decay` applies: to matrices and tables, and not to vectors.

    Kernels of convolutions and weights that `kind_of` does not know decay if that is `declared`.
    """
    kind, words = kind_of(path, axes, 0), _words(path)
    is_kernel = kind and len(kind.outputs) > 1 and words & KERNELS and not words & UNDECAYED
    return declared if kind is None or is_kernel else bool(kind.inputs)


def rule_of(keys: Step, path: Path) -> Mapping[str, Any]:
    """The first of `optimizer_rules` that matches a weight; empty if none does."""
    return next((rule for rule in keys.optimizer_rules if matches(path, [rule["match"]])), {})


def _words(path: Path) -> set[str]:
    return {*str(path[-1]).split("_")}
