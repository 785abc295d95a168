"""Matmuls with weights in 8 bits, forward and backward: int8 with a scale per channel, float8 with one per tensor.

Scales come from the current largest magnitude, or from fixed bounds: no state is carried between steps. Weights and
activations are quantized once, and the backward pass reuses them. If their scales vary along a dim that the backward
pass sums over, the gradient is multiplied by them before it is quantized (docs/quantization.md).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from src.model.matmul import with_gradient
from src.parallel.mesh import MeshLayout
from src.system.errors import UserError

SCOPE = "in_8_bits"  # marks every 8-bit matmul, for checks of compiled programs (src/extras/aot/eight_bits.py)
Shards = Mapping[str, tuple[str, ...]]  # the mesh axes that shard each dim, outermost first
MAX_SUMMED = (2**31 - 1) // 127**2  # the most int8 products whose sum always fits in an int32


class Format(NamedTuple):
    """How the operands of matmuls are quantized."""

    forward: Any  # dtype of weights and activations
    backward: Any  # dtype of gradients
    per_channel: bool  # one scale for each entry of the dims that are not summed over; otherwise one for all


FORMATS = {
    "int8": Format(jnp.int8, jnp.int8, per_channel=True),
    "fp8": Format(jnp.float8_e4m3fn, jnp.float8_e5m2, per_channel=False),  # Micikevicius et al. 2022, section 3
}


class QTensor(NamedTuple):
    """An array as `qvalue` times `scale`, or the shardings of both.

    The scale is float32, with size 1 along dims in which it does not vary; in MXFP8, E8M0 with a value per block.
    """

    qvalue: Any
    scale: Any


def encode(x: Array, bound: Array, dtype: Any, in_float32: bool = False) -> QTensor:
    """Quantizes x to `dtype`; magnitudes above `bound`, which broadcasts to x, are clipped.

    The largest value of an integer dtype represents `bound`. Scales of float8 are powers of two, so that `bound` maps
    to a value between half the largest one and the largest one.

    `in_float32` stores the codes' values in float32, for CPUs, which convert to float8 slowly.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scales = jnp.maximum(bound, 1e-30) / limit  # a bound that is not finite makes results not finite
    if not is_integer:  # the next power of two, which is exact in bfloat16
        exponents = jax.lax.bitcast_convert_type(scales, jnp.uint32) & 0x7F800000
        scales = 2 * jax.lax.bitcast_convert_type(exponents, jnp.float32)
    codes = jnp.clip(x.astype(jnp.float32), -bound, bound) * (1 / scales)
    if not is_integer:
        return QTensor(to_float8(codes, dtype, in_float32), scales)
    codes = jnp.round(codes)
    return QTensor(codes if in_float32 else codes.astype(dtype), scales)


def to_float8(x: Array, dtype: Any, in_float32: bool) -> Array:
    """Rounds float32 values within the range of `dtype`, a float8, to it; `in_float32` as in `encode`."""
    if not in_float32:
        return x.astype(dtype)
    digits, least = jnp.finfo(dtype).nmant, float(jnp.finfo(dtype).smallest_normal)
    quantum = least / 2**digits
    subnormal = jnp.round(x / quantum) * quantum
    return jnp.where(jnp.abs(x) < least, subnormal, jax.lax.reduce_precision(x, 8, digits))


def largest(x: Array, dims: Sequence[int] | None = None) -> Array:
    """Largest magnitudes over some dims (None: all), which are kept with size 1, in float32."""
    return jnp.max(jnp.abs(x), axis=dims, keepdims=True).astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class EightBitMatmuls:
    """Computes a step's matmuls in 8 bits."""

    format: Format
    layout: MeshLayout
    bounds: tuple[float, ...] = (0.0, 0.0, 0.0)  # fixed bounds of weights, activations, gradients; 0: measured

    @property
    def on_cpu(self) -> bool:
        """True if codes are multiplied in float32, where products are exact: CPUs lack 8-bit matmuls."""
        return self.layout.platform == "cpu"

    def bound(self, weight: Array, dims: Sequence[int]) -> Array:
        """Computes the `bound` argument of `multiply`: a weight's largest magnitudes over `dims`, or a fixed bound."""
        magnitudes = largest(jax.lax.stop_gradient(weight), dims)
        return jnp.full_like(magnitudes, self.bounds[0]) if self.bounds[0] else magnitudes

    def multiply(self, x: Array, weight: Array, bound: Array, axes: tuple[str | None, ...], einsum: str) -> Array:
        """Computes the einsum of `x` and a weight, whose dims have the logical axes `axes`, with quantized operands.

        `bound` is what the method `bound` returns for the weight. Dims of x that the weight lacks are batch and
        sequence. The gradients are matmuls of quantized arrays too, and pass straight through the quantization itself.
        Raises UserError as `check_summed` does.
        """
        x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")
        parts, scattered = shards(self.layout, einsum, axes)
        forward = EightBitMatmul(self, w_dims, x_dims, out_dims, parts, parts)
        to_x = EightBitMatmul(self, w_dims, out_dims, x_dims, parts, parts)
        to_weight = EightBitMatmul(self, x_dims, out_dims, w_dims, parts, scattered)
        _, x_bound, gradient_bound = self.bounds

        def run(x: Array, weight: Array, bound: Array) -> tuple[Array, tuple[QTensor, QTensor]]:
            w = encode(weight, bound, self.format.forward, self.on_cpu)
            # Otherwise XLA on a TPU would gather the weight and encode it afterwards.
            w = w._replace(qvalue=self.layout.constrain(w.qvalue, *axes))
            out, quantized_x = forward(w, x, x_bound, self.format.forward)
            return out, (w, quantized_x)

        def gradients(coded: tuple[QTensor, QTensor], gradient: Array) -> tuple[Array, Array, None]:
            w, quantized_x = coded
            dx, _ = to_x(w, gradient, gradient_bound, self.format.backward)
            dw, _ = to_weight(quantized_x, gradient, gradient_bound, self.format.backward)
            return dx, dw.astype(weight.dtype), None

        return with_gradient(run, gradients)(x, weight, bound)


@dataclass(frozen=True)
class EightBitMatmul:
    """Matmul of a quantized array with an array that it quantizes first.

    A device quantizes its shard of the second array, multiplies it by its shard of the first, and applies the scales
    before results are summed over devices: the sums then move the activations' dtype instead of 32 bits, and no device
    waits for another's largest magnitude.
    """

    how: EightBitMatmuls
    coded: str  # dims of the coded array, of the other one, and of the output
    other: str
    out: str
    parts: Shards  # sharding of the operands
    out_parts: Shards  # sharding of the output

    def __call__(self, coded: QTensor, x: Array, bound: float, dtype: Any) -> tuple[Array, QTensor]:
        """Returns the product in x's dtype, and x as quantized to `dtype`: by `bound`, or if that is 0 as measured."""
        on_device = functools.partial(self.on_device, bound=bound, dtype=dtype)
        if self.how.layout.mesh.size == 1:
            return on_device(coded, x)
        codes_spec, x_spec = spec(self.coded, self.parts), spec(self.other, self.parts)
        varying = (part if size > 1 else None for part, size in zip(codes_spec, coded.scale.shape, strict=True))
        in_specs = QTensor(codes_spec, PartitionSpec(*varying)), x_spec
        # Each device has its own scales of x, so they are sharded like x, also along dims where a device has only one.
        out_specs = spec(self.out, self.out_parts), QTensor(x_spec, x_spec)
        return self.how.layout.shard_map(on_device, in_specs, out_specs)(coded, x)

    def on_device(self, coded: QTensor, x: Array, bound: float, dtype: Any) -> tuple[Array, QTensor]:
        """Computes `__call__` for one device's shards. Raises UserError as `check_summed` does."""
        summed = [dim for dim in self.other if dim not in self.out]
        scales, scaled, is_integer = coded.scale, x, self.how.format.per_channel
        if varies := any(scales.shape[self.coded.index(dim)] > 1 for dim in summed):
            scaled = x.astype(jnp.float32) * aligned(scales, self.coded, self.other)
        if bound:
            bounds = jnp.full((1,) * x.ndim, bound)
        else:
            bounds = largest(scaled, tuple(map(self.other.index, summed)) if is_integer else None)
        quantized_x = encode(scaled, bounds, dtype, self.how.on_cpu)
        if is_integer:
            check_summed(math.prod(coded.qvalue.shape[self.coded.index(dim)] for dim in summed))
        wide = jnp.float32 if self.how.on_cpu else jnp.int32 if is_integer else x.dtype
        with jax.named_scope(SCOPE):
            einsum = f"{self.coded},{self.other}->{self.out}"
            out = jnp.einsum(einsum, coded.qvalue, quantized_x.qvalue, preferred_element_type=wide)
        factors = [aligned(quantized_x.scale, self.other, self.out)]
        factors += [] if varies else [aligned(scales, self.coded, self.out)]
        if not is_integer:  # cuBLASLt multiplies by a single number of the output's dtype
            factors = [jnp.asarray(math.prod(factors), x.dtype)]
        for factor in factors:  # one at a time: the product of row and channel scales would be as large as `out`
            out = out * factor
        out = out.astype(x.dtype)
        return sum_over_devices(out, self.out, summed, self.parts, self.out_parts, self.how.on_cpu), quantized_x


def spec(dims: str, at: Shards) -> PartitionSpec:
    """PartitionSpec of an array with the dims `dims`, sharded as in `at`."""
    return PartitionSpec(*(at[dim] or None for dim in dims))


def shards(layout: MeshLayout, einsum: str, axes: Sequence[str | None]) -> tuple[Shards, Shards]:
    """Shardings of the dims of a matmul with a weight of these logical axes; x's other dims are batch and sequence.

    The first is the sharding during the matmul, when the weight is gathered along the mesh axes of batch and sequence;
    the second is the sharding of stored arrays. In the second, those mesh axes come last in a dim, whatever order the
    rules give.
    """
    x_dims, w_dims, _ = einsum.replace("->", ",").split(",")
    rows = [dim for dim in x_dims if dim not in w_dims]
    axis_of = dict(zip((*w_dims, *rows), (*axes, "batch", "length"), strict=False))
    stored = {dim: layout.axes(axis) for dim, axis in axis_of.items()}
    by_rows = {name for dim in rows for name in stored[dim]}
    parts = {dim: tuple(n for n in stored[dim] if dim in rows or n not in by_rows) for dim in stored}
    return parts, {dim: (*parts[dim], *(n for n in stored[dim] if n not in parts[dim])) for dim in stored}


def sum_over_devices(
    out: Array, dims: str, summed: Sequence[str], parts: Shards, out_parts: Shards, on_cpu: bool
) -> Array:
    """Sums an output with dims `dims` over the mesh axes of the summed dims, and shards it by `out_parts`."""
    axes = tuple(name for dim in summed for name in parts[dim])
    if not axes:
        return out
    # XLA's CPU compiler aborts on a bfloat16 sum within a map over some of the axes.
    sums = out.astype(jnp.float32) if on_cpu else out
    for index, dim in enumerate(dims):
        if scattered := tuple(name for name in out_parts[dim] if name in axes):
            sums = jax.lax.psum_scatter(sums, scattered, scatter_dimension=index, tiled=True)
            axes = tuple(name for name in axes if name not in scattered)
    return (jax.lax.psum(sums, axes) if axes else sums).astype(out.dtype)


def check_summed(count: int) -> None:
    """Raises UserError if an int32 may not hold the sum of `count` products of two int8."""
    if count > MAX_SUMMED:
        raise UserError(
            f"quantization=int8 sums {count:,} products on a device, and their sum may exceed 32 bits beyond "
            f"{MAX_SUMMED:,}: use fewer tokens at once (per_device_batch_size, gradient_accumulation_steps)"
        )


def aligned(scales: Array, dims: str, onto: str) -> Array:
    """Transposes and expands scales with dims `dims` to broadcast to an array with dims `onto`."""
    scales = jnp.einsum(f"{dims}->{''.join(dim for dim in onto if dim in dims)}", scales)
    return jnp.expand_dims(scales, [index for index, dim in enumerate(onto) if dim not in dims])
