"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), trained in place of the weights they add to.

They are nested as the weights are, under `lora` in the trainable part of the state, with `down` and `up` in place of an
adapted weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from src.config.step_keys import Trainable
from src.model.adapted import Adapted
from src.model.params import Rngs, Tree, by_path, field, matches, nested, values, weight
from src.model.selection import multiplied, require_matches

STACKED = ("layers", "other_layers", "expert")  # dims of several weights in one array: each has its own adapter

ADAPTER_DTYPE = "float32"  # whatever the base weights have: updates and adapters are small


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
    changed = dict(weights)
    for name, below in adapters.items():
        if isinstance(weights[name], dict):
            changed[name] = _with_adapters(weights[name], below, change)
        else:
            changed[name] = change(weights[name], below["down"], below["up"])
    return changed
