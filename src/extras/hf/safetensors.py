"""Reads slices of tensors from safetensors files, 4-bit and 8-bit ones as bfloat16, and writes such files' headers.

A safetensors file has eight bytes with the length of a JSON header; the header, with each tensor's dtype, shape and
offsets; and the tensors' bytes, row-major and little-endian (github.com/huggingface/safetensors, "Format"). The package
of that name can't read bfloat16 or float8 into numpy.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from src.system.errors import UserError, first_few
from src.system.json_text import parse_json

Index = tuple[slice, ...]  # a slice with start and stop per dim

# safetensors' dtype names -> numpy dtypes.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
# Stands for other dtypes, which no weight has, such as an int64 table of positions.
UNREADABLE = np.dtype("V1")

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

BFLOAT16 = DTYPES["BF16"]
# Dtypes of scales: any float, or a power of two, as in DeepSeek's later folders.
SCALES = tuple(DTYPES[name] for name in ("F8_E8M0", "BF16", "F16", "F32"))

# The sixteen values of a float with two exponent bits and one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3).
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MX_BLOCK = 32  # elements that share a scale
MX_BIAS = 127  # added to the exponent of a scale, which is a power of two


class Tensor(NamedTuple):
    """A tensor on disk; shape and dtype describe the result of `read`, also for quantized tensors."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]  # copies the slice at an index into memory


def open_tensors(file: Path) -> dict[str, Tensor]:
    """Reads a file's header and returns its tensors by name; raises UserError if the file is truncated or damaged."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        start = 8 + header_size
        if start > size:
            raise UserError(f"{file} is truncated, or not a safetensors file: its {size} bytes end within the header")
        try:
            header = parse_json(opened.read(header_size)) if header_size <= MAX_HEADER_BYTES else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a safetensors file: its header is not JSON with tensor names")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if all(
                type(dim) is int and dim >= 0 for dim in shape
            ):
                tensors[name] = (first, last, DTYPES.get(dtype, UNREADABLE), tuple(shape))
            case _:
                raise UserError(f"{file} is damaged: its header describes the tensor {name} as {entry!r:.200}")
    for name, (first, last, dtype, shape) in sorted(tensors.items(), key=lambda item: item[1][:2]):
        expected = last - first if dtype == UNREADABLE else math.prod(shape) * dtype.itemsize
        if first != end or last - first != expected or last < first:
            raise UserError(
                f"{file} is damaged: its header places the tensor {name} at bytes {first} to {last}, but "
                f"expected {end} to {end + max(expected, 0)}"
            )
        end = last
    if start + end != size:
        state = "truncated" if start + end > size else "damaged"
        raise UserError(f"{file} is {state}: it has {size} bytes, its header describes {start + end}. Fetch it again.")
    return {name: _stored(file, start + first, dtype, shape) for name, (first, _, dtype, shape) in tensors.items()}


def _stored(file: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return np.array(np.memmap(file, dtype, mode="r", offset=offset, shape=shape)[index])

    return Tensor(shape, dtype, read)


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Writes the header; the tensors' bytes must follow in the order of `tensors` (name -> dtype, shape)."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns tensors
    file.write(len(text).to_bytes(8, "little") + text)


# ---- Tensors in 4 or 8 bits, with scales


def block_scaled(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Reads DeepSeek V3's float8: a matrix with one scale per block of rows and columns (its report, 3.3).

    `values` are [rows, columns], `scales` [rows / block[0], columns / block[1]], both rounded up.
    """

    def read(index: Index) -> np.ndarray:
        spans = [(at.start // n * n, at, n) for at, n in zip(index, block, strict=True)]
        factors = scales.read(tuple(slice(first // n, -(-at.stop // n)) for first, at, n in spans))
        factors = factors.astype(np.float32)
        for dim, (first, at, n) in enumerate(spans):  # `first` is where the first block begins
            factors = np.repeat(factors, n, axis=dim).take(range(at.start - first, at.stop - first), axis=dim)
        return (values.read(index).astype(np.float32) * factors).astype(BFLOAT16)

    return Tensor(values.shape, BFLOAT16, read)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Reads gpt-oss's experts [E, D, F]: 4-bit floats in blocks of 32 along the contracted dim D, which is stored last.

    `blocks` are uint8 [E, F, D / 32, 16], with the earlier element in a byte's low half; `scales` uint8 [E, F, D / 32].
    """
    E, F, count, _ = blocks.shape

    def read(index: Index) -> np.ndarray:
        at_E, at_D, at_F = index
        in_blocks = slice(at_D.start // MX_BLOCK, -(-at_D.stop // MX_BLOCK))
        bytes_EFGP = blocks.read((at_E, at_F, in_blocks, slice(0, MX_BLOCK // 2)))
        exponents_EFG = scales.read((at_E, at_F, in_blocks)).astype(np.int32) - MX_BIAS
        mantissas = FLOAT4[np.stack([bytes_EFGP & 15, bytes_EFGP >> 4], axis=-1)]
        values = np.ldexp(mantissas, exponents_EFG[..., None, None]).astype(BFLOAT16)
        values_EFD = values.reshape(*values.shape[:2], -1)
        first = in_blocks.start * MX_BLOCK
        return values_EFD[:, :, at_D.start - first : at_D.stop - first].swapaxes(1, 2)

    return Tensor((E, count * MX_BLOCK, F), BFLOAT16, read)


def dequantized(stored: Mapping[str, Tensor], quantization: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Replaces each pair of quantized values and scales in `stored` with one tensor.

    `quantization` is config.json's `quantization_config`, empty if nothing is quantized. Raises UserError if the format
    is neither DeepSeek V3's nor gpt-oss's, or if values or scales are missing or don't match.
    """
    tensors = dict(stored)
    if not isinstance(quantization, Mapping):
        raise UserError(f"config.json in {path} has quantization_config {quantization!r}: expected a mapping")
    match quantization:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            for weight, values, scales in _pairs(stored, "", "_scale_inv", path):
                _check(weight, values, (DTYPES["F8_E4M3"],), (None, None), path)
                blocks = tuple(-(-size // n) for size, n in zip(values.shape, (rows, columns), strict=True))
                _check(f"{weight}_scale_inv", scales, SCALES, blocks, path)
                tensors[weight] = block_scaled(values, tensors.pop(f"{weight}_scale_inv"), (rows, columns))
        case {"quant_method": "mxfp4"}:
            for weight, blocks, scales in _pairs(stored, "_blocks", "_scales", path):
                _check(f"{weight}_blocks", blocks, (DTYPES["U8"],), (None, None, None, MX_BLOCK // 2), path)
                _check(f"{weight}_scales", scales, (DTYPES["U8"],), blocks.shape[:-1], path)
                tensors[weight] = mxfp4(tensors.pop(f"{weight}_blocks"), tensors.pop(f"{weight}_scales"))
        case {} if quantization:
            method = quantization.get("quant_method") or f"quantization_config says ({', '.join(quantization)})"
            raise UserError(
                f"the weights in {path} are quantized as {method}, which is not supported: expected none, fp8 with "
                "weight_block_size (DeepSeek V3), or mxfp4 (gpt-oss). Give a dequantized folder."
            )
    return tensors


def _pairs(stored: Mapping[str, Tensor], values: str, scales: str, path: Path) -> list[tuple[str, Tensor, Tensor]]:
    stems = {end: [name.removesuffix(end) for name in stored if name.endswith(end)] for end in (scales, values) if end}
    weights = list(dict.fromkeys(weight for of_end in stems.values() for weight in of_end))
    if missing := [weight + end for weight in weights for end in (values, scales) if weight + end not in stored]:
        raise UserError(f"the quantized weights in {path} are incomplete: {first_few(missing)} missing")
    return [(weight, stored[weight + values], stored[weight + scales]) for weight in weights]


def _check(name: str, tensor: Tensor, dtypes: Sequence[np.dtype], shape: tuple[int | None, ...], path: Path) -> None:
    if tensor.dtype not in dtypes:
        raise UserError(f"{name} in {path} does not have the dtype {' or '.join(map(str, dtypes))}")
    if len(tensor.shape) != len(shape) or any(n not in (None, tensor.shape[dim]) for dim, n in enumerate(shape)):
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        raise UserError(f"{name} in {path} has shape {list(tensor.shape)}, expected [{wanted}]")
