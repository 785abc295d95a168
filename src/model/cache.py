"""The cache of layers while text is generated: one dict of arrays per layer, such as keys and values [B, K, S, H].

A layer that attends within a window or a chunk caches no more than that: position p is in slot p mod S, so a cache of
S slots is a ring of the last S positions. Heads come before slots, so that a token's products with all of a head's
keys and values are matrix products as they lie in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from src.model.attention_kernels.scores import ScoreSpec
from src.model.forward_context import ForwardContext

Cache = dict[str, Array]


class CacheArray(NamedTuple):
    """One array of a layer's cache: a mixer's `cache_arrays` declares them."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # the logical axis of each dim
    dtype: str = ""  # empty: that of activations


def cache_slots(scores: ScoreSpec, length: int) -> int:
    """Returns the tokens that a cache holds for texts of up to `length` tokens."""
    return min(length, scores.window or scores.chunk or length)


def update(cache: Cache, new: Cache, context: ForwardContext) -> Cache:
    """Returns the cache with the arrays [B, T, K, H] of these positions in it.

    With `context.decoding`, T is 1 and the position of each row's token says which slot it takes. Otherwise rows are
    prompts from position 0, padded on the right, and replace whatever the cache held.
    """
    S = next(iter(cache.values())).shape[2]
    if context.decoding:
        slot_B = context.positions_BT[:, 0] % S

        def write(old_BKSH: Array, new_BKTH: Array) -> Array:
            # One slot per head, though a row's are all the same: XLA's CPU backend copies the whole cache to write a
            # single slot, and writes several in place.
            slot_BK = jnp.broadcast_to(slot_B[:, None], old_BKSH.shape[:2])
            write_head = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
            return jax.vmap(write_head, (0, 0, 0, None))(old_BKSH, new_BKTH, slot_BK, 0)
    else:
        last_B1 = jnp.sum(context.segment_ids_BT > 0, axis=1, keepdims=True) - 1
        position_BS = last_B1 - (last_B1 - jnp.arange(S)) % S  # the slot's newest; negative: none yet

        def write(_: Array, new_BKTH: Array) -> Array:
            return jnp.take_along_axis(new_BKTH, jnp.maximum(position_BS, 0)[:, None, :, None], axis=2)

    return {name: write(old, jnp.swapaxes(new[name], 1, 2).astype(old.dtype)) for name, old in cache.items()}


def decode_mask(spec: ScoreSpec, positions_BT: Array, S: int) -> Array:
    """Returns bool [B, T, S]: the cache slots that each row's newest token attends to, its own included; T is 1."""
    key_BTS = positions_BT[:, :, None] - (positions_BT[:, :, None] - jnp.arange(S)) % S
    first_BTS = (positions_BT - positions_BT % spec.chunk if spec.chunk else jnp.zeros_like(positions_BT))[:, :, None]
    return key_BTS >= first_BTS
