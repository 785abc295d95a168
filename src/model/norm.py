"""Normalisations over an array's last dims, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from src.config.model_keys import NormSettings
from src.model.params import Axes, Rngs, weight


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dims `shape`."""

    def __init__(
        self,
        spec: NormSettings,
        shape: tuple[int, ...],
        dtype: str,
        rngs: Rngs,
        axes: Axes = (None,),
        epsilon: float = 0.0,  # 0: normalization_layer_epsilon
    ) -> None:
        self.spec, self.epsilon = spec, epsilon or spec.normalization_layer_epsilon
        self.dims = tuple(range(-len(shape), 0))
        self.scale = weight(rngs, shape, axes, dtype, constant=1.0 - spec.normalization_scale_offset, decays=False)
        if spec.normalization == "layer":
            self.bias = weight(rngs, shape, axes, dtype, constant=0.0, decays=False)

    @jax.named_scope("norm")
    def __call__(self, x: Array) -> Array:
        """Normalises [..., *shape] and applies the learned scale, and LayerNorm's bias; keeps `x`'s dtype."""
        spec = self.spec
        y = x.astype(jnp.float32)
        if spec.normalization == "layer":
            y = y - jnp.mean(y, axis=self.dims, keepdims=True)
        y = rms_normalise(y, self.epsilon, self.dims)
        y = y * (spec.normalization_scale_offset + self.scale[...].astype(jnp.float32))
        if spec.normalization == "layer":
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def rms_normalise(x: Array, epsilon: float, dims: tuple[int, ...] = (-1,)) -> Array:
    """Divides `x` by its root mean square along `dims`, keeping `x`'s dtype, without a learned scale."""
    y = x.astype(jnp.float32)
    mean_square = jnp.mean(y * y, axis=dims, keepdims=True)
    return (y * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)
