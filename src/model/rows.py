"""Gathers rows of a table."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from src.model.matmul import with_gradient


def rows(table_VD: Array, ids: Array, **outside: Any) -> Array:
    """Gathers rows by index, and sums their gradients in float32; `outside`: JAX's keywords for indices out of bounds.

    In bfloat16, the sum of a frequent token's gradients would stop growing.
    """

    def gather(table_VD: Array, ids: Array) -> Array:
        return table_VD.at[ids].get(**outside)

    def gradients(ids: Array, gradient: Array) -> tuple[Array, None]:
        wide = jax.ShapeDtypeStruct(table_VD.shape, jnp.float32)
        (sums_VD,) = jax.linear_transpose(lambda table_VD: gather(table_VD, ids), wide)(gradient.astype(jnp.float32))
        return sums_VD.astype(table_VD.dtype), None

    return with_gradient(lambda table_VD, ids: (gather(table_VD, ids), ids), gradients)(table_VD, ids)
