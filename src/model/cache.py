"""The layers' cache for text generation: one dict of arrays per layer, such as keys and values [B, K, S, H].

A layer with a window or a chunk caches no more than that: position p is in slot p mod S, so a cache of S slots is a
ring of the last S positions. Heads come before slots, so that attending from one token to a head's keys and values is a
matmul without a transpose in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from src.model.attention_kernels.scores import ScoreSpec
from src.model.forward_context import ForwardContext

Cache = dict[str, Array]


class CacheArray(NamedTuple):
    """One array of a layer's cache, as declared by a mixer's `cache_arrays`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axis of each dim
    dtype: str = ""  # empty: the dtype of activations


def cache_slots(scores: ScoreSpec, length: int) -> int:
    """Number of tokens that the cache holds for sequences of up to `length` tokens: at most the window or chunk."""
    return min(length, scores.window or scores.chunk or length)


def update(cache: Cache, new: Cache, context: ForwardContext) -> Cache:
    """Returns the cache with the arrays [B, T, K, H] of the positions in `context` written to it.

    With `context.decoding`, T is 1 and each token's position selects its slot. Otherwise the sequences are prompts from
    position 0, padded on the right, and replace the whole cache.
    """
    S = next(iter(cache.values())).shape[2]
    if context.decoding:
        slot_B = context.positions_BT[:, 0] % S

        def write(old_BKSH: Array, new_BKTH: Array) -> Array:
            # One slot index per head, though all heads use the same: XLA's CPU backend copies the whole cache to write
            # a single slot, but writes several in place.
            slot_BK = jnp.broadcast_to(slot_B[:, None], old_BKSH.shape[:2])
            write_head = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
            return jax.vmap(write_head, (0, 0, 0, None))(old_BKSH, new_BKTH, slot_BK, 0)
    else:
        last_B1 = jnp.sum(context.segment_ids_BT > 0, axis=1, keepdims=True) - 1
        position_BS = last_B1 - (last_B1 - jnp.arange(S)) % S  # the newest position in each slot; negative: none yet

        def write(_: Array, new_BKTH: Array) -> Array:
            return jnp.take_along_axis(new_BKTH, jnp.maximum(position_BS, 0)[:, None, :, None], axis=2)

    return {name: write(old, jnp.swapaxes(new[name], 1, 2).astype(old.dtype)) for name, old in cache.items()}


def decode_mask(spec: ScoreSpec, positions_BT: Array, S: int) -> Array:
    """Mask [B, T, S] of the cache slots that each sequence's newest token sees, including its own; T is 1."""
    key_BTS = positions_BT[:, :, None] - (positions_BT[:, :, None] - jnp.arange(S)) % S
    first_BTS = (positions_BT - positions_BT % spec.chunk if spec.chunk else jnp.zeros_like(positions_BT))[:, :, None]
    return key_BTS >= first_BTS
