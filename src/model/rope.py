"""Rotary position embeddings (RoPE): rotates queries and keys by their positions."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from src.model.spec import LayerSpec


def rope(x_BTNH: Array, positions_BT: Array, spec: LayerSpec) -> Array:
    """Rotates the first `partial_rotary_factor` of a head's dims by position, pair by pair, in float32.

    Su et al. 2021, section 3.4.2. Pair i is (i, i + dim / 2), as in Llama's Hugging Face checkpoints, or (2i, 2i + 1)
    with `rope_interleave`. With rope_type=proportional, pairs span the whole head, and later pairs do not turn.
    """
    factor = 1.0 if spec.rope_type == "proportional" else spec.partial_rotary_factor
    dim = int(x_BTNH.shape[-1] * factor)
    pair = np.arange(dim // 2, dtype=np.float32)
    frequencies = 1.0 / float(spec.rope_max_timescale) ** (pair / np.float32(dim // 2))
    size = 1.0
    if spec.rope_type != "default":
        from src.model.rope_stretching import stretch

        frequencies, size = stretch(frequencies, spec)
    angle_BT1P = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = size * jnp.sin(angle_BT1P), size * jnp.cos(angle_BT1P)
    rotated, rest = jnp.split(x_BTNH, [dim], axis=-1)
    if spec.rope_interleave:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    # Cast before joining, so that the backward pass splits the gradient before it is converted to float32.
    turned = [(first * cos - second * sin).astype(x_BTNH.dtype), (second * cos + first * sin).astype(x_BTNH.dtype)]
    if spec.rope_interleave:
        turned = [jnp.stack(turned, -1).reshape(rotated.shape)]
    # Halves are split and concatenated, not stacked: on a TPU, XLA would copy a dim of size 2 to another layout, in
    # float32.
    return jnp.concatenate([*turned, rest], axis=-1)
