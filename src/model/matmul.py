"""Matmuls of activations with weights: as einsums, or on a single CPU as two-dimensional matmuls."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LARGE = 2**18  # elements of a weight from which `_multiply` is used: with fewer, it made the quickstart's step slower


def weight_matmul(x: Array, kernel: Array, einsum: str, precision: str | None) -> Array:
    """Computes the einsum of `x` and a weight of the same dtype.

    XLA's CPU compiler transposes both operands of a matmul that sums over several dims, such as a weight's gradient
    over batch and sequence; for two-dimensional operands it does not. Batch and sequence can be one dim if neither is
    sharded; on TPUs and GPUs the compiler chooses layouts for matmuls itself.
    """
    dims_x, dims_kernel, dims_y = einsum.replace("->", ",").split(",")
    summed = "".join(dim for dim in dims_x if dim not in dims_y)
    out = "".join(dim for dim in dims_kernel if dim not in summed)
    rows = dims_x.removesuffix(summed)
    if not _on_one_cpu(x) or dims_y != rows + out or dims_kernel not in (summed + out, out + summed):
        return jnp.einsum(einsum, x, kernel, precision=precision)
    sizes = dict(zip(dims_x + dims_kernel, x.shape + kernel.shape, strict=True))
    width = math.prod(sizes[dim] for dim in summed)
    matrix = kernel.reshape(width, -1) if dims_kernel == summed + out else kernel.reshape(-1, width).T
    multiply = _multiply if kernel.size >= LARGE else jnp.matmul
    y = multiply(x.reshape(-1, width), matrix, precision=precision)
    return y.reshape([sizes[dim] for dim in dims_y])


def _multiply(x_RI: Array, kernel_IO: Array, precision: str | None) -> Array:
    """Multiplies matrices on a CPU, where XLA takes up to three times as long if the first operand is transposed.

    A kernel's gradient is such a matmul, so the narrower of its operands is copied in the order in which it is read.
    """
    matmul, barrier = functools.partial(jnp.matmul, precision=precision), jax.lax.optimization_barrier

    def gradients(kept: tuple[Array, Array], d_out_RO: Array) -> tuple[Array, Array]:
        x_RI, kernel_IO = kept
        # Without barriers XLA would turn the matmuls below into transposed ones again.
        if x_RI.shape[1] <= d_out_RO.shape[1]:
            d_kernel_IO = barrier(matmul(barrier(x_RI.T), d_out_RO))
        else:
            d_kernel_IO = barrier(matmul(barrier(d_out_RO.T), x_RI)).T
        return matmul(d_out_RO, kernel_IO.T), d_kernel_IO

    return with_gradient(lambda x, kernel: (matmul(x, kernel), (x, kernel)), gradients)(x_RI, kernel_IO)


def with_gradient(run: Callable[..., tuple[Any, Any]], gradients: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Builds a differentiable function of arrays from `run`, which returns the result and residuals.

    `gradients(residuals, gradient of the result)` returns one entry per array; None for an array without a gradient.
    """
    function = jax.custom_vjp(lambda *arrays: run(*arrays)[0])
    function.defvjp(run, gradients)
    return function


def _on_one_cpu(x: Array) -> bool:
    mesh = jax.typeof(x).sharding.mesh  # empty outside a compiled step
    return not mesh.empty and mesh.size == 1 and mesh.abstract_device.platform == "cpu"
