"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), trained instead of the weights that they modify.

Adapters have the nesting of the weights, under `lora` in the trainable weights, with `down` and `up` replacing an
adapted weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from src.config.step_keys import Step, Trainable
from src.model.params import (
    ADAPTER_DTYPE,
    ADAPTERS,
    STACKED,
    Rngs,
    Tree,
    by_path,
    field,
    matches,
    nested,
    random_stream,
    values,
    weight,
)
from src.model.selection import multiplied, require_matches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight plus `down` times `up`, two thin matrices (LoRA, Hu et al. 2021); the sum is never formed."""

    base: Any  # an array, or a quantized weight
    down: Any  # an array, or its axes: the summed dims, then the rank
    up: Any  # the rank, then the other dims; includes alpha / rank

    def __getitem__(self, index: Any) -> "Adapted":
        """Supports `...`, and an ellipsis followed by indices of the last dims, which `up` has too."""
        return self if index is Ellipsis else Adapted(self.base[index], self.down, self.up[index])

    def grouped(self, x: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Multiplies `x` by the adapted weight; `product` multiplies by the base weight, or by `down` or `up`."""
        return product(x, self.base) + product(product(x, self.down), self.up)

    def multiply(self, x: Array, einsum: str, matmul: Callable[[Array, Array, str], Array]) -> Array:
        """Computes the einsum of `x` and the adapted weight; `matmul` multiplies by the base, `down` and `up`."""
        inputs, out = einsum.split("->")
        x_dims, dims = inputs.split(",")
        inner = self.down.ndim - 1
        thin_matrices = [(self.down, dims[:inner] + "r"), (self.up, "r" + dims[inner:])]
        if dims[0] in out:  # the sum is over the weight's outputs: transposed, so `up` comes first
            thin_matrices.reverse()
        (first, first_dims), (second, second_dims) = thin_matrices
        thin = "".join(dim for dim in x_dims if dim in out) + "r"
        added = matmul(matmul(x, first, f"{x_dims},{first_dims}->{thin}"), second, f"{thin},{second_dims}->{out}")
        return matmul(x, self.base, einsum) + added


def initial(keys: Step, declarations: Tree) -> Tree:
    """Makes initial adapters, which leave outputs unchanged, for these declarations; raises as `declare` does."""
    return values(declare(keys, declarations)(Rngs(random_stream(keys.init_weights_seed, ADAPTERS))))


def declare(keys: Trainable, declarations: Tree) -> Callable[[Rngs], Tree]:
    """Prepares a function that makes adapters for these declarations.

    Raises UserError if a pattern of `lora_parameters` matches no weight that is used in matmuls.
    """
    patterns, paths = tuple(map(str, keys.lora_parameters)), multiplied(declarations)
    require_matches("lora_parameters", patterns, paths, "used in matmuls:")
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
    """Replaces each adapted weight by an `Adapted`, scaled by `alpha` over the rank."""
    return _with_adapters(weights, adapters, lambda base, down, up: Adapted(base, down, up * (alpha / down.shape[-1])))


def merge(weights: Tree, adapters: Tree, alpha: float) -> Tree:
    """Adds adapters, scaled as in `attach`, to the weights, keeping their dtypes and shardings; donates the weights."""

    def add(base: Array, down: Array, up: Array) -> Array:
        stacked, rank = up.ndim - 1 - (base.ndim - down.ndim + 1), down.shape[-1]
        down, up = down.astype(jnp.float32), up.astype(jnp.float32)
        product = down.reshape(*down.shape[:stacked], -1, rank) @ up.reshape(*up.shape[: stacked + 1], -1)
        return (base.astype(jnp.float32) + alpha / rank * product.reshape(base.shape)).astype(base.dtype)

    # Compiled, so that no device holds the full update of a sharded weight.
    return _with_adapters(
        weights, adapters, lambda base, *pair: jax.jit(add, out_shardings=base.sharding, donate_argnums=0)(base, *pair)
    )


def _with_adapters(weights: Tree, adapters: Tree, change: Callable[..., Any]) -> Tree:
    changed, parts = by_path(weights), by_path(adapters)
    for path in dict.fromkeys(path[:-1] for path in parts):
        changed[path] = change(changed[path], parts[(*path, "down")], parts[(*path, "up")])
    return nested(changed)
