"""Token embeddings and the three ways to say where a token stands."""

import jax
import jax.numpy as jnp


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, max_timescale: float) -> jax.Array:
    """Rotary positions (Su et al. 2021, section 3.4.2): rotates the pairs (h, h + H/2) of each head.

    Pair i turns by position / max_timescale**(2i/H) radians. The pairing of halves is that of Llama's
    Hugging Face checkpoints. Computed in float32, returned in `x_BTNH`'s dtype.
    """
    half = x_BTNH.shape[-1] // 2
    timescale = max_timescale ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) / timescale
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def sinusoidal(positions_BT: jax.Array, emb_dim: int) -> jax.Array:
    """Fixed positions (Vaswani et al. 2017, section 3.5), sines in the first half of D, cosines in the second.

    [B, T] to float32 [B, T, D]; wavelengths run from 2 pi to 10,000 times that.
    """
    half = emb_dim // 2
    timescale = 10_000.0 ** (jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle = positions_BT[:, :, None].astype(jnp.float32) / timescale
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
