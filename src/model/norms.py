"""Normalisations over the embedding dim, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from src.model.spec import NormSpec
from src.model.weights import weight


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016), as `spec.kind` says."""

    def __init__(self, spec: NormSpec, dim: int, dtype: str, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.scale = weight(rngs, (dim,), (None,), dtype, constant=1.0, decays=False)
        if spec.kind == "layer":
            self.bias = weight(rngs, (dim,), (None,), dtype, constant=0.0, decays=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to [..., D], in `x`'s dtype."""
        y = x.astype(jnp.float32)
        if self.spec.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.spec.epsilon)
        y = y * self.scale[...].astype(jnp.float32)
        if self.spec.kind == "layer":
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
