"""What attention remembers of a text while it is generated: one dict of arrays per layer, [B, K, S, H] each.

A layer that sees a window or a block of positions remembers no more than that: position p stands in slot p mod S, so
a cache of S slots is a ring that holds the last S positions. Heads come before slots: so a token's products with all
of a head's keys and values are products with matrices as they lie in memory.
"""

import jax
import jax.numpy as jnp

from src.model.forward_context import Context
from src.model.spec import AttentionSpec, LayerSpec, ModelSpec

Cache = dict[str, jax.Array]


def slots(spec: AttentionSpec, length: int) -> int:
    """S of a layer's cache for texts of up to `length` tokens."""
    return min(length, spec.window or spec.chunk or length)


def empty(layer: LayerSpec, model: ModelSpec, rows: int, length: int) -> Cache:
    """A layer's cache for `rows` texts of up to `length` tokens."""
    spec = layer.attention
    S = slots(spec, length)
    if spec.latent:
        shapes = {"latent": (rows, 1, S, spec.latent.kv_rank + spec.latent.rope_dim)}
    else:
        shapes = dict.fromkeys(("key", "value"), (rows, spec.num_kv_heads, S, spec.head_dim))
    return {name: jnp.zeros(shape, model.dtype) for name, shape in shapes.items()}


def axes(layer: LayerSpec) -> dict[str, tuple[str | None, ...]]:
    """The logical axis of each dim of a layer's cache."""
    if layer.attention.latent:
        return {"latent": ("batch", None, None, None)}
    return dict.fromkeys(("key", "value"), ("batch", "kv_heads", None, "head_dim"))


def update(cache: Cache, new: Cache, context: Context) -> Cache:
    """The cache with the arrays [B, T, K, H] of these positions in it.

    Where `context.decoding`, T is 1 and the position of each row's token says which slot it takes. Else rows are
    prompts from position 0, padded on the right, and take the place of whatever the cache held.
    """
    S = next(iter(cache.values())).shape[2]
    if context.decoding:
        slot_B = context.positions_BT[:, 0] % S

        def write(old_BKSH: jax.Array, new_BKTH: jax.Array) -> jax.Array:
            # A slot for each head, though a row's are all the same: XLA's CPU backend copies the whole cache to write
            # a single slot, and writes several in place.
            slot_BK = jnp.broadcast_to(slot_B[:, None], old_BKSH.shape[:2])
            write_head = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
            return jax.vmap(write_head, (0, 0, 0, None))(old_BKSH, new_BKTH, slot_BK, 0)
    else:
        last_B1 = jnp.sum(context.segment_ids_BT > 0, axis=1, keepdims=True) - 1
        position_BS = last_B1 - (last_B1 - jnp.arange(S)) % S  # the newest of the slot's; negative: none yet

        def write(_: jax.Array, new_BKTH: jax.Array) -> jax.Array:
            return jnp.take_along_axis(new_BKTH, jnp.maximum(position_BS, 0)[:, None, :, None], axis=2)

    return {name: write(old, jnp.swapaxes(new[name], 1, 2).astype(old.dtype)) for name, old in cache.items()}


def in_order(cached_BKSH: jax.Array) -> jax.Array:
    """A cache's array as attention reads it, [B, S, K, H]."""
    return jnp.swapaxes(cached_BKSH, 1, 2)


def visible_BTS(spec: AttentionSpec, positions_BT: jax.Array, S: int) -> jax.Array:
    """Which of a cache's slots the newest token of each row sees; its own is among them. T is 1."""
    key_BTS = positions_BT[:, :, None] - (positions_BT[:, :, None] - jnp.arange(S)) % S
    first_BTS = (positions_BT - positions_BT % spec.chunk if spec.chunk else jnp.zeros_like(positions_BT))[:, :, None]
    return key_BTS >= first_BTS
