"""Matmuls with weights in MXFP8, forward and backward: float8 with one scale per 32 values of the summed dim.

All operands are E4M3, including gradients, and a scale is a power of two that covers its block's largest magnitude
("OCP Microscaling Formats" 1.0, section 5; Mishra et al. 2025, arXiv:2506.08027, which rounds it up). Blocks run along
the summed dim, so each of a layer's three matmuls quantizes both of its operands itself.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from src.model.low_precision import SCOPE, QTensor, Shards, shards, spec, sum_over_devices, to_float8
from src.model.matmul import with_gradient
from src.parallel.mesh import MeshLayout
from src.system.errors import Unsupported

BLOCK = 32
CODES = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(CODES).max)


def encode(x: Array, on_cpu: bool) -> QTensor:
    """Quantizes x [..., S] in blocks of 32 along S, a multiple of 32; the scales are [..., S / 32], in E8M0.

    `on_cpu`: returns the dequantized values in float32, with scales of one.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    least = 2.0**-126  # its reciprocal is a float32
    bound = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / _LARGEST, least)
    bits = jax.lax.bitcast_convert_type(bound, jnp.uint32)
    exponents = jnp.minimum((bits + 0x7FFFFF) >> 23, 255)  # rounded up; 255 encodes NaN, which the matmul propagates
    scales = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)
    codes = to_float8(blocks * (1 / scales), CODES, on_cpu)
    if on_cpu:
        return QTensor((codes * scales).reshape(x.shape), jnp.ones(()))
    e8m0 = jax.lax.bitcast_convert_type(exponents[..., 0].astype(jnp.uint8), jnp.float8_e8m0fnu)
    return QTensor(codes.reshape(x.shape), e8m0)


@dataclass(frozen=True, eq=False)
class BlockMatmuls:
    """Computes a step's matmuls in MXFP8."""

    layout: MeshLayout

    @property
    def on_cpu(self) -> bool:
        """True if matmuls run in float32 on dequantized values: CPUs lack 8-bit matmuls."""
        return self.layout.platform == "cpu"

    def multiply(self, x: Array, weight: Array, bound: None, axes: tuple[str | None, ...], einsum: str) -> Array:
        """Computes the einsum of `x` and a weight, whose dims have the logical axes `axes`, with quantized operands.

        Dims of x that the weight lacks are batch and sequence; `bound` is not used. Raises Unsupported if 32 divides
        neither a device's shard of a summed dim nor the gathered dim.
        """
        x_dims, w_dims, out_dims = einsum.replace("->", ",").split(",")
        parts, stored = shards(self.layout, einsum, axes)

        def on_devices(left: str, right: str, out: str, *, left_at: Shards, out_at: Shards) -> Any:
            product = BlockMatmul(self.on_cpu, left, right, out, left_at, parts, out_at, w_dims)
            if self.layout.mesh.size == 1:
                return product
            in_specs = spec(left, left_at), spec(right, parts)
            return self.layout.shard_map(product, in_specs, spec(out, out_at))

        def run(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
            return on_devices(w_dims, x_dims, out_dims, left_at=stored, out_at=parts)(weight, x), (x, weight)

        def gradients(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
            x, weight = operands
            dx = on_devices(w_dims, out_dims, x_dims, left_at=stored, out_at=parts)(weight, gradient)
            dw = on_devices(x_dims, out_dims, w_dims, left_at=parts, out_at=stored)(x, gradient)
            return dx, dw.astype(weight.dtype)

        return with_gradient(run, gradients)(x, weight)


@dataclass(frozen=True)
class BlockMatmul:
    """Quantizes a device's shards of two arrays, gathers the left one to the sharding `parts`, and multiplies them."""

    on_cpu: bool
    left: str  # dims of the operands and of the output
    right: str
    out: str
    left_at: Shards  # sharding of the left operand
    parts: Shards  # sharding of both operands during the matmul
    out_at: Shards
    weight: str  # the dims that belong to a weight, not to batch or sequence

    def __call__(self, left: Array, right: Array) -> Array:
        """Computes the device's shard of the output, in the right operand's dtype; raises as `_coded` does."""
        summed = "".join(dim for dim in self.right if dim not in self.out)
        rows, columns = ("".join(dim for dim in dims if dim not in summed) for dims in (self.right, self.left))
        by_row = self._coded(right, self.right, rows + summed, self.parts)
        by_column = self._coded(left, self.left, columns + summed, self.left_at)
        with jax.named_scope(SCOPE):
            if self.on_cpu:
                einsum = f"{rows}{summed},{columns}{summed}->{self.out}"
                out = jnp.einsum(einsum, by_row.qvalue, by_column.qvalue).astype(right.dtype)
            else:
                codes = _matrix(by_row.qvalue, rows), _matrix(by_column.qvalue, columns)
                scales = _matrix(by_row.scale, rows), _matrix(by_column.scale, columns)
                product = jax.nn.scaled_matmul(*codes, *scales, preferred_element_type=right.dtype)
                sizes = by_row.qvalue.shape[: len(rows)] + by_column.qvalue.shape[: len(columns)]
                out = jnp.einsum(f"{rows}{columns}->{self.out}", product.reshape(sizes))
        return sum_over_devices(out, self.out, summed, self.parts, self.out_at, self.on_cpu)

    def _coded(self, x: Array, dims: str, order: str, at: Shards) -> QTensor:
        """Transposes x to the dims `order`, quantizes it along the last one, and gathers it from the sharding `at`.

        If BLOCK does not divide a shard, gathers it before quantizing; raises Unsupported if the gathered dim is not
        divisible either.
        """
        x = jnp.einsum(f"{dims}->{order}", x)
        elsewhere = [at[dim][len(self.parts[dim]) :] for dim in order]

        def gathered(x: Array) -> Array:
            for index, axes in enumerate(elsewhere):
                x = jax.lax.all_gather(x, axes, axis=index, tiled=True) if axes and x.ndim else x
            return x

        if x.shape[-1] % BLOCK == 0:
            return QTensor(*map(gathered, encode(x, self.on_cpu)))
        if (whole := gathered(x)).shape[-1] % BLOCK:  # the blocks fit neither the shard nor the gathered dim
            if order[-1] in self.weight:
                what, help_ = "of a weight's dim", "that size, or name the weight in quantization_exclude"
            else:
                what, help_ = "tokens of a sequence", "max_target_length or ici_context_parallelism"
            raise Unsupported(
                f"quantization=mxfp8 rounds {BLOCK} values together: {whole.shape[-1]} {what} on a device are not "
                f"a multiple of that. Change {help_}."
            )
        return encode(whole, self.on_cpu)


def _matrix(x: Array, rows: str) -> Array:
    """Flattens x, whose first dims are `rows`, to [1, rows, the rest]."""
    return x.reshape(1, math.prod(x.shape[: len(rows)]), -1)
