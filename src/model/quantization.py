"""Selects the weights to quantize, for 8-bit matmuls or to save memory, and replaces them by quantized ones.

src/model/low_precision.py and src/model/block_scaled.py compute the matmuls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from src.config.command_keys import CALIBRATION_METHODS, fixed_bound
from src.config.command_keys import Quantization as Keys
from src.model import params
from src.model.block_scaled import BlockMatmuls
from src.model.low_precision import FORMATS, EightBitMatmuls, QTensor, aligned, encode, largest
from src.model.selection import Quantization, QuantizedMatmul, multiplied, require_matches
from src.parallel.chips import compute_capability, kinds_with, peak_flops
from src.parallel.mesh import MeshLayout
from src.system.errors import Unsupported, UserError, first_few

EXCLUDED = Keys().quantization_exclude  # default patterns, which need not match: not every model has all of these
LAYERS = ("layers", "other_layers")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight whose matmuls run in 8 bits."""

    weight: Array
    bound: Any  # its largest magnitudes, from `EightBitMatmuls.bound`; None: scales are by block
    products: Any = field(metadata={"static": True})  # EightBitMatmuls or BlockMatmuls
    axes: tuple[str | None, ...] = field(metadata={"static": True})  # logical axes of the weight's dims

    def __getitem__(self, index: Any) -> Self:
        """Supports `...`, and an ellipsis followed by slices or numbers, which index the last dims."""
        if index is Ellipsis:
            return self
        first, *parts = index
        assert first is Ellipsis
        kept, last = self.axes[: -len(parts)], self.axes[-len(parts) :]
        kept += tuple(axis for axis, part in zip(last, parts, strict=True) if isinstance(part, slice))
        bound = self.bound
        if bound is not None:  # of size 1 along dims that share a bound
            sizes = bound.shape[-len(parts) :]
            shared = (0 if isinstance(part, int) else slice(None) for part in parts)
            of_each = (part if size > 1 else one for part, size, one in zip(parts, sizes, shared, strict=True))
            bound = bound[(..., *of_each)]
        return dataclasses.replace(self, weight=self.weight[index], bound=bound, axes=kept)

    def multiply(self, x: Array, einsum: str, matmul: Callable[[Array, Any, str], Array]) -> Array:
        """Computes the einsum of `x` and this weight."""
        return self.products.multiply(x, self.weight, self.bound, self.axes, einsum)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A weight stored in 8 bits, and multiplied in the dtype of the activations."""

    coded: QTensor
    on_cpu: bool = field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Self:
        if index is Ellipsis:
            return self
        return dataclasses.replace(self, coded=QTensor(self.coded.qvalue[index], self.coded.scale[index]))

    def multiply(self, x: Array, einsum: str, matmul: Callable[[Array, Any, str], Array]) -> Array:
        """Computes the einsum of `x` and this weight; scales the output, or x if the output lacks the scales' dims."""
        (codes, scales), (x_dims, w_dims, out_dims) = self.coded, einsum.replace("->", ",").split(",")
        if self.on_cpu:  # XLA on CPUs would convert inside the matmul, one element at a time: thirty times slower
            codes = jax.lax.optimization_barrier(codes.astype(x.dtype))
        varying = [dim for dim, size in zip(w_dims, scales.shape, strict=True) if size > 1]
        if all(dim in out_dims for dim in varying):
            return matmul(x, codes, einsum) * aligned(scales, w_dims, out_dims).astype(x.dtype)
        return matmul(x * aligned(scales, w_dims, x_dims).astype(x.dtype), codes, einsum)


def store_in_8_bits(chosen: Quantization, weights: params.Tree, on_cpu: bool) -> params.Tree:
    """Replaces each weight of `chosen` by an `Int8Weight`, one at a time, and deletes the original."""
    flat = params.by_path(weights)
    for path, (bounded, _) in chosen.matmuls.items():
        weight = flat[path]
        flat[path] = Int8Weight(jax.block_until_ready(_encoded(weight, bounded)), on_cpu)
        weight.delete()
    return params.nested(flat)


def attach(chosen: Quantization, weights: params.Tree, layout: MeshLayout) -> params.Tree:
    """Replaces each weight of `chosen` by a `Quantized`; returns `weights` itself if nothing is quantized."""
    if not chosen.kind:
        return weights
    block_scaled = chosen.kind == "mxfp8"
    products: Any = (
        BlockMatmuls(layout) if block_scaled else EightBitMatmuls(FORMATS[chosen.kind], layout, chosen.bounds)
    )
    flat = params.by_path(weights)
    for path, (bounded, axes) in chosen.matmuls.items():
        # Computed for all layers at once: inside the layers, devices would wait for each other's magnitudes.
        bound = None if block_scaled else products.bound(flat[path], bounded)
        flat[path] = Quantized(flat[path], bound, products, axes)
    return params.nested(flat)


@functools.partial(jax.jit, static_argnames="bounded")
def _encoded(weight: Array, bounded: tuple[int, ...]) -> QTensor:
    return encode(weight, largest(weight, bounded), jnp.int8)


def select(keys: Keys, declarations: params.Tree, layout: MeshLayout) -> Quantization:
    """Selects the weights of a model that `quantization` quantizes, on the devices of this layout.

    Raises Unsupported if the devices lack these matmuls; UserError if `quantization_exclude` leaves no weight, has a
    pattern that matches no weight (unless it is one of the default patterns), or does not exclude experts, which only
    int8 quantizes.
    """
    if not keys.quantization:
        return Quantization()
    _check_devices(keys.quantization, layout.device)
    bounds = tuple(fixed_bound(getattr(keys, name)) for name in CALIBRATION_METHODS)
    words = f"quantization={keys.quantization}"
    has_experts = keys.quantization == "int8"  # in fp8, Triton on GPUs would compute the experts' matmuls in float16
    return _chosen(keys.quantization, keys.quantization_exclude, declarations, words, has_experts, bounds)


def select_at_rest(keys: Keys, declarations: params.Tree) -> Quantization:
    """Selects the weights that `quantize_weights=int8` stores in 8 bits.

    Raises UserError as `select` does, and also if experts are not excluded.
    """
    return _chosen("int8", keys.quantization_exclude, declarations, "quantize_weights=int8", has_experts=False)


def _chosen(
    kind: str,
    exclude: Sequence[Any],
    declarations: params.Tree,
    words: str,
    has_experts: bool,
    bounds: tuple[float, ...] = (0.0, 0.0, 0.0),
) -> Quantization:
    paths, patterns = multiplied(declarations), tuple(map(str, exclude))
    typed = [name for name in patterns if name not in EXCLUDED]
    require_matches("quantization_exclude", typed, paths, "used in matmuls:")
    axes, fan_ins = (params.by_path(params.field(declarations, name)) for name in ("out_sharding", "fan_in"))
    wide = [path for path in paths if params.matches(path, patterns)]
    matmuls = {}
    for path in [path for path in paths if path not in wide]:
        layers = sum(axis in LAYERS for axis in axes[path])
        bounded = fan_ins[path] if kind == "int8" else range(layers, len(axes[path]))
        matmuls[path] = QuantizedMatmul(tuple(bounded), axes[path][layers:])
        if "expert" in axes[path] and not has_experts:
            raise UserError(
                f"{words} has no matmuls for experts, which quantization=int8 has: exclude them with "
                f"quantization_exclude=[{','.join(patterns)},feed_forward.wi,feed_forward.wo]"
            )
    if not matmuls:
        raise UserError(f"quantization_exclude leaves no weight for {words}: shorten that list")
    if fan_ins.get(("embedding",)):  # a tied embedding is also multiplied, but never quantized
        wide.append(("embedding",))
    shapes = params.by_path(params.values(declarations))

    def count(paths: Iterable[tuple[Any, ...]]) -> int:
        stacked = (zip(axes[path], shapes[path].shape, strict=True) for path in paths)
        return sum(math.prod(size for axis, size in dims if axis in LAYERS) for dims in stacked)

    description = f"{kind} in {count(matmuls):,} weight matmuls, forward and backward"
    if wide:
        description += f"; {count(wide):,} not ({first_few(dict.fromkeys(path[-1] for path in wide))})"
    return Quantization(kind, bounds, matmuls, description)


def _check_devices(kind: str, device: jax.Device) -> None:
    """Raises Unsupported if a device lacks this kind of matmul. A CPU computes the same numbers in float32."""
    if device.platform == "cpu" or peak_flops(device.device_kind, kind):
        return
    capability = compute_capability(device)  # for GPUs without a known rate; float8 came with 8.9
    if (kind == "fp8" and capability >= 8.9) or (kind == "mxfp8" and 10 <= capability < 11):
        return
    raise Unsupported(
        f"quantization={kind}: MinText has no such matmuls for a {device.device_kind}. It has them for: "
        f"{', '.join(kinds_with(kind))}; a CPU computes the same numbers, slowly. Or leave quantization empty."
    )
