"""Multiplies rows by the weight of their group: for experts, whose tokens are contiguous.

In 8 bits, rows and gradients are quantized as in low_precision.py, and weights before they are gathered.

Letters: R rows, G groups, X summed dim, Y output dim.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from src.model.lora import Adapted
from src.model.low_precision import SCOPE, EightBitMatmul, EightBitMatmuls, QTensor, check_summed, encode, largest
from src.model.matmul import with_gradient
from src.model.quantization import Quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedCodes:
    """Weights of groups in 8 bits, [G, X, Y] or [G, Y, X].

    Integer codes have no gradient, so the weights' gradient goes to `wide`: the weights before quantization. No matmul
    reads `wide`, so XLA removes operations on it, such as gathering.
    """

    wide: Array
    coded: QTensor
    products: EightBitMatmuls = field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Self:
        return jax.tree.map(lambda each: each[index], self)


def encoded(weight: Quantized, dtype: Any) -> GroupedCodes:
    """Quantizes a weight to int8; the gradient of the weight has `dtype`."""
    products, limit = weight.products, jnp.iinfo(jnp.int8).max
    # Round scales up to exact bfloat16 values: the backward pass looks up a scale for every entry of the gradient, and
    # that array is half as large in bfloat16.
    bound = limit * (weight.bound / limit * (1 + 2**-8)).astype(jnp.bfloat16).astype(jnp.float32)
    coded = encode(jax.lax.stop_gradient(weight.weight), bound, products.format.forward, products.on_cpu)
    return GroupedCodes(weight.weight.astype(dtype), coded, products)


def grouped_matmul(
    x_RX: Array,
    kernel_GXY: Array | Adapted | GroupedCodes,
    rows_G: Array,
    platform: str,
    transposed: bool = False,
    interpret: bool = False,
) -> Array:
    """Multiplies rows of `x` by their group's weight: [R, X] and [G, X, Y], or [G, Y, X] `transposed`, to [R, Y].

    The first rows_G[0] rows are in group 0, the next rows_G[1] in group 1, and so on. Rows past the last group cost
    nothing if `platform` has a kernel; their output is undefined, and they contribute no gradient.

    Forward and both gradients are Pallas kernels on TPUs (JAX's megablox) and on GPUs (this project's): XLA would
    compute dense matmuls over all groups for the weight gradient on a TPU, and for all three on a GPU. `interpret` runs
    the kernels without an accelerator, slowly, for tests. With int8 weights, the gradient raises UserError as
    `check_summed` does.
    """
    how = {"rows_G": rows_G, "platform": platform, "transposed": transposed, "interpret": interpret}
    if isinstance(kernel_GXY, Adapted):
        return kernel_GXY.grouped(x_RX, functools.partial(grouped_matmul, **how))
    if isinstance(kernel_GXY, GroupedCodes):
        return _grouped_codes(x_RX, kernel_GXY, **how)
    kernel_GXY = kernel_GXY.astype(x_RX.dtype)
    if platform == "cpu":
        return jax.lax.ragged_dot(x_RX, kernel_GXY.swapaxes(1, 2) if transposed else kernel_GXY, rows_G)
    if platform == "tpu":  # imported here because Pallas takes a second
        from src.model.moe import grouped_tpu as kernels
    else:
        from src.model.moe import grouped_gpu as kernels

    def run(x_RX: Array, kernel: Array, rows_G: Array) -> tuple[Array, tuple]:
        out_RY = kernels.rows_times_kernel(x_RX, kernel, rows_G, interpret, transposed=transposed)
        return out_RY, (x_RX, kernel, rows_G)

    def gradients(residuals: tuple, gradient_RY: Array) -> tuple[Array, Array, None]:
        x_RX, kernel, rows_G = residuals
        to_x_RX = kernels.rows_times_kernel(gradient_RY, kernel, rows_G, interpret, transposed=not transposed)
        factors = (gradient_RY, x_RX) if transposed else (x_RX, gradient_RY)
        return to_x_RX, kernels.rows_times_rows(*factors, rows_G, interpret), None

    return with_gradient(run, gradients)(x_RX, kernel_GXY, rows_G)


def batched_matmul(x_GRX: Array, kernel_GXY: Array | Adapted | GroupedCodes, transposed: bool = False) -> Array:
    """Multiplies each group's rows by its weight: [G, R, X] and [G, X, Y], or [G, Y, X] `transposed`, to [G, R, Y].

    With int8 weights, raises UserError as `check_summed` does.
    """
    if isinstance(kernel_GXY, Adapted):
        return kernel_GXY.grouped(x_GRX, functools.partial(batched_matmul, transposed=transposed))
    if isinstance(kernel_GXY, GroupedCodes):
        return _batched_codes(x_GRX, kernel_GXY, transposed)
    return jnp.einsum("grx,gyx->gry" if transposed else "grx,gxy->gry", x_GRX, kernel_GXY.astype(x_GRX.dtype))


def add_by_group(x: Array, bias: Array, factor_R1: Array | None = None, *, rows_G: Array) -> Array:
    """Adds to rows [R, ...] their group's bias [G, ...] times the row's factor (None: 1); 0 past the last group."""
    group_R = _group_of_rows(rows_G, len(x))
    # A one-hot matmul, because the gradient of a lookup would be a scatter-add.
    of_row_RG = jax.nn.one_hot(group_R, len(rows_G), dtype=x.dtype)
    of_row_RG = of_row_RG if factor_R1 is None else of_row_RG * factor_R1
    bias_RY = of_row_RG @ bias.reshape(len(bias), -1).astype(x.dtype)
    in_group_R = (group_R < len(rows_G)).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(in_group_R, x + bias_RY.reshape(x.shape), 0)


def _batched_codes(x_GRX: Array, kernel: GroupedCodes, transposed: bool) -> Array:
    weight_dims = "gyx" if transposed else "gxy"
    triples = (weight_dims, "grx", "gry"), (weight_dims, "gry", "grx"), ("grx", "gry", weight_dims)
    no_axes: Any = dict.fromkeys("grxy", ())  # all dims are local to this device
    forward, to_x, to_kernel = (EightBitMatmul(kernel.products, *dims, no_axes, no_axes) for dims in triples)
    formats = kernel.products.format

    def run(x: Array, wide: Array, coded: QTensor) -> tuple[Array, tuple[QTensor, QTensor]]:
        out, quantized_x = forward.on_device(coded, x, 0.0, formats.forward)
        return out, (coded, quantized_x)

    def gradients(residuals: tuple[QTensor, QTensor], gradient: Array) -> tuple[Array, Array, None]:
        coded, quantized_x = residuals
        dx, _ = to_x.on_device(coded, gradient, 0.0, formats.backward)
        dw, _ = to_kernel.on_device(quantized_x, gradient, 0.0, formats.backward)
        return dx, dw, None

    return with_gradient(run, gradients)(x_GRX, kernel.wide, kernel.coded)


def _grouped_codes(
    x_RX: Array, kernel: GroupedCodes, rows_G: Array, platform: str, transposed: bool, interpret: bool
) -> Array:
    """Multiplies rows by the weight of their group in int8, like `grouped_matmul`.

    Each row, and each output channel of a group, has a scale. For the weight gradient, a channel has one scale for all
    groups' rows. Its computation raises UserError as `check_summed` does.
    """
    on_cpu, how = platform == "cpu", {"platform": platform, "interpret": interpret}

    def run(x_RX: Array, wide: Array, coded: QTensor, rows_G: Array) -> tuple[Array, tuple]:
        x = encode(x_RX, largest(x_RX, (1,)), jnp.int8, on_cpu)
        scales_GY = coded.scale.reshape(len(coded.scale), -1)
        out_RY = _rows_times_kernel(x.qvalue, coded.qvalue, scales_GY, rows_G, x_RX.dtype, transposed=transposed, **how)
        return (out_RY * x.scale).astype(x_RX.dtype), (x, coded.qvalue, scales_GY, rows_G)

    def gradients(residuals: tuple, gradient_RY: Array) -> tuple[Array, Array, None, None]:
        (x, codes, scales_GY, rows_G), dtype = residuals, gradient_RY.dtype
        check_summed(len(gradient_RY))
        gradient_RY, group_R = gradient_RY.astype(jnp.float32), _group_of_rows(rows_G, len(gradient_RY))
        to_x_RY = gradient_RY * scales_GY.astype(jnp.bfloat16)[jnp.minimum(group_R, len(rows_G) - 1)]
        to_x = encode(to_x_RY, largest(to_x_RY, (1,)), jnp.int8, on_cpu)
        ones_GX = jnp.ones((len(rows_G), x.qvalue.shape[1]))
        dx_RX = _rows_times_kernel(to_x.qvalue, codes, ones_GX, rows_G, dtype, transposed=not transposed, **how)
        # Rows past the last group may hold anything, and would affect the scales of the others.
        to_kernel_RY = jnp.where((group_R < len(rows_G))[:, None], gradient_RY * x.scale, 0)
        to_kernel = encode(to_kernel_RY, largest(to_kernel_RY, (0,)), jnp.int8, on_cpu)
        if transposed:
            dw = _rows_times_rows(to_kernel.qvalue, x.qvalue, to_kernel.scale.T, rows_G, dtype, **how)
        else:
            dw = _rows_times_rows(x.qvalue, to_kernel.qvalue, to_kernel.scale, rows_G, dtype, **how)
        return (dx_RX * to_x.scale).astype(dtype), dw, None, None

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
    from src.model.moe import grouped_tpu_int8 as kernels

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


def _group_of_rows(rows_G: Array, rows: int) -> Array:
    return jnp.searchsorted(jnp.cumsum(rows_G), jnp.arange(rows), side="right", method="compare_all")
