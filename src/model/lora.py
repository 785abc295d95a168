"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), trained in place of the weights they add to.

They are nested as the weights are, under `lora` in the trainable part of the state, with `down` and `up` in place of an
adapted weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from src.config.step_keys import Trainable
from src.model.params import ADAPTER_DTYPE, STACKED, Rngs, Tree, by_path, field, matches, nested, values, weight
from src.model.selection import multiplied, require_matches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight plus `down` times `up`, two thin matrices (LoRA, Hu et al. 2021); no product forms the sum."""

    base: Any  # an array, or a quantized weight
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


def declare(keys: Trainable, declarations: Tree) -> Callable[[Rngs], Tree]:
    """Returns a function that makes adapters for these declarations; raises UserError if a pattern fits none."""
    patterns, paths = tuple(map(str, keys.lora_parameters)), multiplied(declarations)
    require_matches("lora_parameters", patterns, paths, "that is multiplied by:")
    axes, fan_ins = by_path(field(declarations, "out_sharding")), by_path(field(declarations, "fan_in"))
    sizes = by_path(values(declarations))

    def make(rngs: Rngs) -> Tree:
        adapted = [path for path in paths if matches(path, patterns)]
        rank = keys.lora_rank
        return nested({path: _pair(rngs, sizes[path].shape, axes[path], fan_ins[path], rank) for path in adapted})

    return make


def _pair(rngs: Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: tuple[int, ...], rank: int) -> Tree:
    stacked = sum(axis in STACKED for axis in axes)
    end = stacked + len(fan_in)
    assert fan_in == tuple(range(stacked, end)), "weights have the dims that are summed over first"
    down = weight(rngs, (*shape[:end], rank), (*axes[:end], None), ADAPTER_DTYPE, fan_in=fan_in)
    up_shape, up_axes = (*shape[:stacked], rank, *shape[end:]), (*axes[:stacked], None, *axes[end:])
    return {"down": down, "up": weight(rngs, up_shape, up_axes, ADAPTER_DTYPE, fan_in=(stacked,), constant=0.0)}


def attach(weights: Tree, adapters: Tree, alpha: float) -> Tree:
    """Replaces each adapted weight by an `Adapted`; their product is scaled by `alpha` over their rank."""
    return _with_adapters(weights, adapters, lambda base, down, up: Adapted(base, down, up * (alpha / down.shape[-1])))


def merge(weights: Tree, adapters: Tree, alpha: float) -> Tree:
    """Adds adapters, scaled as by `attach`, to their weights, in these' dtypes and shardings; donates these."""

    def add(base: Array, down: Array, up: Array) -> Array:
        stacked, rank = up.ndim - 1 - (base.ndim - down.ndim + 1), down.shape[-1]
        down, up = down.astype(jnp.float32), up.astype(jnp.float32)
        product = down.reshape(*down.shape[:stacked], -1, rank) @ up.reshape(*up.shape[: stacked + 1], -1)
        return (base.astype(jnp.float32) + alpha / rank * product.reshape(base.shape)).astype(base.dtype)

    # Compiled, so that no device makes the whole product of a sharded weight.
    return _with_adapters(
        weights, adapters, lambda base, *pair: jax.jit(add, out_shardings=base.sharding, donate_argnums=0)(base, *pair)
    )


def _with_adapters(weights: Tree, adapters: Tree, change: Callable[..., Any]) -> Tree:
    changed, parts = by_path(weights), by_path(adapters)
    for path in dict.fromkeys(path[:-1] for path in parts):
        changed[path] = change(changed[path], parts[(*path, "down")], parts[(*path, "up")])
    return nested(changed)
