"""Sinusoidal position encodings, which the decoder adds to the embeddings."""

import jax.numpy as jnp
from jax import Array


def sinusoidal(positions_BT: Array, emb_dim: int) -> Array:
    """Computes position encodings, float32 [B, T, D] (Vaswani et al. 2017, section 3.5).

    Sines are in the first half of D, cosines in the second; wavelengths run from 2 pi to 10,000 times that.
    """
    half = emb_dim // 2
    timescale = 10_000.0 ** (jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angle = positions_BT[:, :, None].astype(jnp.float32) / timescale
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
