"""Scales attention's queries: each dim by a weight (Pax's C4 models), and each query by its position (Llama 4)."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from src.model.spec import LayerSpec


def scale_queries(q_BTNH: Array, weight_H: Array | None, positions_BT: Array, spec: LayerSpec) -> Array:
    """Scales queries by softplus(weight) / log 2, if there is a weight, and by their position's temperature, if any."""
    if weight_H is not None:  # as praxis's PerDimScale: the scale is 1 if the weight is 0
        scale_H = jax.nn.softplus(weight_H.astype(jnp.float32)) / math.log(2)
        q_BTNH = (q_BTNH * scale_H).astype(q_BTNH.dtype)
    if spec.attn_temperature_scale:
        # Llama 4: attention flattens over long texts, so queries grow with the position.
        floors_BT = jnp.floor((positions_BT + 1.0) / spec.attn_temperature_floor)
        temperature_BT = 1.0 + spec.attn_temperature_scale * jnp.log1p(floors_BT)
        q_BTNH = (q_BTNH * temperature_BT[:, :, None, None]).astype(q_BTNH.dtype)
    return q_BTNH
