"""Normalisations over an array's last dims, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from src.model.params import weight
from src.model.spec import NormSpec


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) by `spec.kind`, over the last dims `shape`."""

    def __init__(
        self, spec: NormSpec, shape: tuple[int, ...], dtype: str, rngs: nnx.Rngs, axes: tuple[str | None, ...] = (None,)
    ) -> None:
        self.spec = spec
        self.dims = tuple(range(-len(shape), 0))
        self.scale = weight(rngs, shape, axes, dtype, constant=1.0 - spec.scale_offset, decays=False)
        if spec.kind == "layer":
            self.bias = weight(rngs, shape, axes, dtype, constant=0.0, decays=False)

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises [..., *shape], in `x`'s dtype."""
        y = x.astype(jnp.float32)
        if self.spec.kind == "layer":
            y = y - jnp.mean(y, axis=self.dims, keepdims=True)
        y = root_mean_square(y, self.spec.epsilon, self.dims)
        y = y * (self.spec.scale_offset + self.scale[...].astype(jnp.float32))
        if self.spec.kind == "layer":
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def root_mean_square(x: jax.Array, epsilon: float, dims: tuple[int, ...] = (-1,)) -> jax.Array:
    """Divides `x` by the root of the mean of its squares along `dims`, in `x`'s dtype, without a scale."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=dims, keepdims=True) + epsilon)).astype(x.dtype)
