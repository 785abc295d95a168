"""Experts' products in 8 bits: rows and gradients are rounded as low_precision.py does, and weights before a gather.

Letters: R rows, G groups, X summed over, Y made.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from src.model.low_precision import SCOPE, Coded, Product, Products, check_summed, encode, largest
from src.model.products import with_gradient
from src.model.quantization import Quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedCodes:
    """Weights of groups as codes, [G, X, Y] or [G, Y, X].

    Codes are integers, which have no gradient: it goes to `wide`, the same weights, which no product reads. So XLA
    leaves out what is done with them, such as to gather them.
    """

    wide: Array
    coded: Coded
    products: Products = field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Self:
        return jax.tree.map(lambda each: each[index], self)


def encoded(weight: Quantized, dtype: Any) -> GroupedCodes:
    """Rounds a weight; its gradient is of `dtype`."""
    products, limit = weight.products, jnp.iinfo(jnp.int8).max
    # Up to a scale that is exact in bfloat16: backward a row's scales are looked up, an array as large as its gradient.
    bound = limit * (weight.bound / limit * (1 + 2**-8)).astype(jnp.bfloat16).astype(jnp.float32)
    coded = encode(jax.lax.stop_gradient(weight.weight), bound, products.format.forward, products.on_cpu)
    return GroupedCodes(weight.weight.astype(dtype), coded, products)


def batched_product(x_GRX: Array, kernel: GroupedCodes, transposed: bool) -> Array:
    """Multiplies each group's rows by its weight, as `batched_matmul`."""
    weight_dims = "gyx" if transposed else "gxy"
    triples = (weight_dims, "grx", "gry"), (weight_dims, "gry", "grx"), ("grx", "gry", weight_dims)
    no_axes = dict.fromkeys("grxy", ())  # all of it is on this device
    forward, to_x, to_kernel = (Product(kernel.products, *dims, no_axes, no_axes) for dims in triples)
    formats = kernel.products.format

    def run(x: Array, wide: Array, coded: Coded) -> tuple[Array, tuple[Coded, Coded]]:
        out, coded_x = forward.on_device(coded, x, 0.0, formats.forward)
        return out, (coded, coded_x)

    def gradients(residuals: tuple[Coded, Coded], gradient: Array) -> tuple[Array, Array, None]:
        coded, coded_x = residuals
        dx, _ = to_x.on_device(coded, gradient, 0.0, formats.backward)
        dw, _ = to_kernel.on_device(coded_x, gradient, 0.0, formats.backward)
        return dx, dw, None

    return with_gradient(run, gradients)(x_GRX, kernel.wide, kernel.coded)


def grouped_product(
    x_RX: Array, kernel: GroupedCodes, rows_G: Array, platform: str, transposed: bool, interpret: bool
) -> Array:
    """Multiplies rows by the weight of their group in int8, as `grouped_matmul`.

    A row has a scale, and each group's output channel. The gradient to weights rounds a channel for all groups' rows.
    """
    on_cpu, how = platform == "cpu", {"platform": platform, "interpret": interpret}

    def run(x_RX: Array, wide: Array, coded: Coded, rows_G: Array) -> tuple[Array, tuple]:
        x = encode(x_RX, largest(x_RX, (1,)), jnp.int8, on_cpu)
        scales_GY = coded.scales.reshape(len(coded.scales), -1)
        out_RY = _rows_times_kernel(x.codes, coded.codes, scales_GY, rows_G, x_RX.dtype, transposed=transposed, **how)
        return _scaled(out_RY, x.scales), (x, coded.codes, scales_GY, rows_G)

    def gradients(residuals: tuple, gradient_RY: Array) -> tuple[Array, Array, None, None]:
        (x, codes, scales_GY, rows_G), dtype = residuals, gradient_RY.dtype
        check_summed(len(gradient_RY))
        gradient_RY, group_R = gradient_RY.astype(jnp.float32), _group_of_rows(rows_G, len(gradient_RY))
        to_x_RY = gradient_RY * scales_GY.astype(jnp.bfloat16)[jnp.minimum(group_R, len(rows_G) - 1)]
        to_x = encode(to_x_RY, largest(to_x_RY, (1,)), jnp.int8, on_cpu)
        ones_GX = jnp.ones((len(rows_G), x.codes.shape[1]))
        dx_RX = _rows_times_kernel(to_x.codes, codes, ones_GX, rows_G, dtype, transposed=not transposed, **how)
        # Past the last group a row may be anything, and here it would have a part in the others' scales.
        to_kernel_RY = jnp.where((group_R < len(rows_G))[:, None], gradient_RY * x.scales, 0)
        to_kernel = encode(to_kernel_RY, largest(to_kernel_RY, (0,)), jnp.int8, on_cpu)
        if transposed:
            dw = _rows_times_rows(to_kernel.codes, x.codes, to_kernel.scales.T, rows_G, dtype, **how)
        else:
            dw = _rows_times_rows(x.codes, to_kernel.codes, to_kernel.scales, rows_G, dtype, **how)
        return _scaled(dx_RX, to_x.scales), dw, None, None

    return with_gradient(run, gradients)(x_RX, kernel.wide, kernel.coded, rows_G)


def _rows_times_kernel(
    x_RX: Array,
    codes: Array,
    scales_GY: Array,
    rows_G: Array,
    dtype: Any,
    platform: str,
    interpret: bool,
    transposed: bool,
) -> Array:
    if platform == "cpu":
        out_RY = jax.lax.ragged_dot(x_RX, codes.swapaxes(1, 2) if transposed else codes, rows_G)
        group_R = _group_of_rows(rows_G, len(x_RX))
        return (out_RY * scales_GY[jnp.minimum(group_R, len(rows_G) - 1)]).astype(dtype)
    from src.model.moe import grouped_tpu_int8 as kernels  # here: Pallas takes a second

    with jax.named_scope(SCOPE):
        return kernels.rows_times_kernel(x_RX, codes, scales_GY, rows_G, dtype, interpret, transposed)


def _rows_times_rows(
    x_RX: Array, y_RY: Array, scales: Array, rows_G: Array, dtype: Any, platform: str, interpret: bool
) -> Array:
    if platform == "cpu":
        zeros_GXY = jnp.zeros((len(rows_G), x_RX.shape[1], y_RY.shape[1]))
        _, transpose = jax.vjp(lambda kernel: jax.lax.ragged_dot(x_RX, kernel, rows_G), zeros_GXY)
        return (transpose(y_RY)[0] * scales).astype(dtype)
    from src.model.moe import grouped_tpu_int8 as kernels

    with jax.named_scope(SCOPE):
        return kernels.rows_times_rows(x_RX, y_RY, scales, rows_G, dtype, interpret)


def _scaled(x: Array, scales: Array) -> Array:
    return (x * scales).astype(x.dtype)


def _group_of_rows(rows_G: Array, rows: int) -> Array:
    return jnp.searchsorted(jnp.cumsum(rows_G), jnp.arange(rows), side="right", method="compare_all")
