"""Weights that multiply in their own way, and one of them: with an adapter beside it (src/model/lora.py makes them)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax import Array


class Wrapped(ABC):
    """Stands for a weight where products take one; `[...]` returns it, `[..., part]` that part of its last dim."""

    @abstractmethod
    def multiply(self, x: Array, einsum: str, matmul: Callable[[Array, Any, str], Array]) -> Array:
        """Multiplies `x` by it as `einsum` says; `matmul` multiplies by any other weight."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted(Wrapped):
    """A weight plus `down` times `up`, two thin matrices (LoRA, Hu et al. 2021); no product forms the sum."""

    base: Array | Wrapped
    down: Array  # the dims that are summed over, then the rank
    up: Array  # the rank, then the other dims; it carries alpha / rank

    def __getitem__(self, index: Any) -> Self:
        """Returns all of it for `...`, or for `[..., part]` that part of the last dim, which `up` has too."""
        return self if index is Ellipsis else Adapted(self.base[index], self.down, self.up[index])

    def grouped(self, x: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Multiplies `x` by it, by `product` of plain weights of groups."""
        return product(x, self.base) + product(product(x, self.down), self.up)

    def multiply(self, x: Array, einsum: str, matmul: Callable[[Array, Array, str], Array]) -> Array:
        """Multiplies `x` by it as `einsum` says, by `matmul` of plain weights."""
        inputs, out = einsum.split("->")
        x_dims, dims = inputs.split(",")
        inner = self.down.ndim - 1
        thin_matrices = [(self.down, dims[:inner] + "r"), (self.up, "r" + dims[inner:])]
        if dims[0] in out:  # the product sums over the weight's outputs: transposed, it takes `up` first
            thin_matrices.reverse()
        (first, first_dims), (second, second_dims) = thin_matrices
        thin = "".join(dim for dim in x_dims if dim in out) + "r"
        added = matmul(matmul(x, first, f"{x_dims},{first_dims}->{thin}"), second, f"{thin},{second_dims}->{out}")
        return matmul(x, self.base, einsum) + added
