"""Products of rows with the weight of their group: experts whose tokens lie one after the other.

Letters: R rows, G groups, X summed over, Y made.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from src.model.params import Adapted


def grouped_matmul(
    x_RX: jax.Array, kernel: jax.Array | Adapted, rows_G: jax.Array, platform: str, interpret: bool = False
) -> jax.Array:
    """Rows of `x` times the weight of their group: [R, X] and [G, X, ...] to [R, ...].

    The first rows_G[0] rows are group 0's, the next rows_G[1] group 1's, and so on. Rows past the last group cost
    nothing where `platform` has a kernel for it, what comes out of them is undefined, and no gradient comes from them.

    Forward and both gradients are Pallas kernels on a TPU (JAX's megablox), where the compiler makes the gradient to
    the weights a dense product over all groups, and on a GPU (ours), where it makes all three such. `interpret` runs
    them without an accelerator, slowly, for tests.
    """
    if isinstance(kernel, Adapted):
        product = functools.partial(grouped_matmul, rows_G=rows_G, platform=platform, interpret=interpret)
        return product(x_RX, kernel.base) + product(product(x_RX, kernel.down), kernel.up)
    kernel_GXY = kernel.astype(x_RX.dtype).reshape(*kernel.shape[:2], -1)
    if platform == "cpu":
        out_RY = jax.lax.ragged_dot(x_RX, kernel_GXY, rows_G)
    else:
        out_RY = _product(x_RX, kernel_GXY, rows_G, platform, interpret)
    return out_RY.reshape(-1, *kernel.shape[2:])


def batched_matmul(x_GRX: jax.Array, kernel: jax.Array | Adapted) -> jax.Array:
    """Each group's rows times its weight: [G, R, X] and [G, X, ...] to [G, R, ...]."""
    if isinstance(kernel, Adapted):
        return batched_matmul(x_GRX, kernel.base) + batched_matmul(batched_matmul(x_GRX, kernel.down), kernel.up)
    kernel_GXY = kernel.astype(x_GRX.dtype).reshape(*kernel.shape[:2], -1)
    return jnp.matmul(x_GRX, kernel_GXY).reshape(*x_GRX.shape[:2], *kernel.shape[2:])


def add_by_group(x: jax.Array, bias: jax.Array, factor_R1: jax.Array | None = None, *, rows_G: jax.Array) -> jax.Array:
    """Rows [R, ...] plus the bias [G, ...] of their group, times the row's factor; 0 past the last group."""
    group_R = jnp.searchsorted(jnp.cumsum(rows_G), jnp.arange(len(x)), side="right", method="compare_all")
    # A product, for the gradient of a table that is looked up would add to scattered rows.
    of_row_RG = jax.nn.one_hot(group_R, len(rows_G), dtype=x.dtype)
    of_row_RG = of_row_RG if factor_R1 is None else of_row_RG * factor_R1
    bias_RY = of_row_RG @ bias.reshape(len(bias), -1).astype(x.dtype)
    real_R = (group_R < len(rows_G)).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real_R, x + bias_RY.reshape(x.shape), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x_RX: jax.Array, kernel_GXY: jax.Array, rows_G: jax.Array, platform: str, interpret: bool) -> jax.Array:
    return _kernels(platform).rows_times_kernel(x_RX, kernel_GXY, rows_G, interpret, transposed=False)


def _forward(
    x_RX: jax.Array, kernel_GXY: jax.Array, rows_G: jax.Array, platform: str, interpret: bool
) -> tuple[jax.Array, tuple]:
    return _product(x_RX, kernel_GXY, rows_G, platform, interpret), (x_RX, kernel_GXY, rows_G)


def _backward(platform: str, interpret: bool, kept: tuple, gradient_RY: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_RX, kernel_GXY, rows_G = kept
    to_x_RX = _kernels(platform).rows_times_kernel(gradient_RY, kernel_GXY, rows_G, interpret, transposed=True)
    return to_x_RX, _kernels(platform).rows_times_rows(x_RX, gradient_RY, rows_G, interpret), None


_product.defvjp(_forward, _backward)


def _kernels(platform: str) -> ModuleType:
    if platform == "tpu":  # here, for a second of import that is spared where no product needs Pallas
        from src.model.moe import grouped_tpu as kernels
    else:
        from src.model.moe import grouped_gpu as kernels
    return kernels
