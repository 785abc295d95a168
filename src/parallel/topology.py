"""Data on accelerators: chips and their peak rates, and the TPU slices and GPU hosts that contain them."""

import math
import re
from typing import Any, NamedTuple

from src.system.errors import UserError, did_you_mean


class Chip(NamedTuple):
    """Published figures of one JAX device: a TPU chip, half of one if JAX shows two devices per chip, or a GPU.

    `memory` is in bytes: on a TPU the amount that the compiler grants a program, on a GPU the total that the driver
    reports, of which JAX takes `GPU_MEMORY_FRACTION` unless XLA_CLIENT_MEM_FRACTION says otherwise. Bandwidths are in
    bytes per second.
    """

    kind: str  # `jax.Device.device_kind`
    memory: int
    memory_bandwidth: float
    ici_bandwidth: float  # sending, over all the device's links to the rest of its slice or host
    dcn_bandwidth: float  # sending to other slices or hosts: the device's share of its host's network cards


class Topology(NamedTuple):
    """The devices that a program is compiled for."""

    name: str  # as it was typed, in lower case
    platform: str  # tpu, gpu or cpu
    chip: Chip | None  # None for a CPU, which has no published figures
    shape: tuple[int, ...]  # chips of a slice along each of its dims; for GPUs and CPUs the devices of a host
    devices_per_chip: int
    slices: int  # TPU slices, or hosts of GPUs; 1 for CPUs

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices."""
        return math.prod(self.shape) * self.devices_per_chip * self.slices

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of a host along each dim: four TPU chips, or one or eight if that is the whole slice."""
        if self.platform != "tpu":
            return self.shape
        if self.shape in ((1, 1), (1, 1, 1)):
            return (1, 1, 1)
        return (2, 4, 1) if self.shape == (2, 4) else (2, 2, 1)


def _nvidia(bfloat16: float, tensorfloat32: float, float32: float, **of_8_bits: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "tensorfloat32": tensorfloat32, "float32": float32, **of_8_bits}


# A100: "NVIDIA A100 Tensor Core GPU" data sheet.
_A100 = _nvidia(312e12, 156e12, 19.5e12)
# H100 SXM: "NVIDIA H100 Tensor Core GPU Architecture" white paper; the H200's data sheet states the same rates.
_H100_SXM = _nvidia(989.4e12, 494.7e12, 66.9e12, fp8=1978.9e12)
# H100 NVL, H200 NVL: their data sheets, which state sparse rates, twice these.
_HOPPER_NVL = _nvidia(835.5e12, 417.5e12, 60e12, fp8=1670.5e12)

# Operations per second of one JAX device, by the name JAX gives it (`jax.Device.device_kind`), for dense matrices: the
# rates that vendors state for 2:4 sparse ones are twice as high.
_PEAK_FLOPS = {
    # The pages of each generation at docs.cloud.google.com/tpu/docs (v3, v4, v5e, v5p, v6e, tpu7x) state bfloat16 rates
    # per chip. JAX shows a v3 or TPU7x chip as two devices, so each has half. A TPU multiplies float32 in several
    # bfloat16 passes; no rate is published for that.
    "TPU v3": {"bfloat16": 61.5e12},
    "TPU v4": {"bfloat16": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12, "int8": 394e12},
    "TPU v5": {"bfloat16": 459e12, "int8": 918e12},
    "TPU v6 lite": {"bfloat16": 918e12, "int8": 1836e12},
    "TPU7x": {"bfloat16": 1153.5e12, "fp8": 2307e12},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _nvidia(756e12, 378e12, 51.2e12, fp8=1513e12),  # the same white paper
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    # "NVIDIA Blackwell" data sheet, one GPU's share; its tensor core rates are sparse.
    "NVIDIA B200": _nvidia(2250e12, 1100e12, 75e12, fp8=4500e12, mxfp8=4500e12),
    "NVIDIA GB200": _nvidia(2500e12, 1250e12, 80e12, fp8=5000e12, mxfp8=5000e12),
    # "NVIDIA Ada GPU Architecture" white paper, appendix A, with float32 accumulation.
    "NVIDIA GeForce RTX 4090": _nvidia(165.2e12, 82.6e12, 82.6e12, fp8=330.3e12),
}


_MIB = 2**20

# TPUs. Memory bandwidth and links are from the generation's page at docs.cloud.google.com/tpu/docs (tpu7x compares v5p,
# v6e and TPU7x), which adds up a link's two directions: here it is one. v4's links and its host's network card (200
# Gbit/s for four chips) are not on its page: "TPU v4: An Optically Reconfigurable Supercomputer" (Jouppi and others,
# 2023) states six links of 50 GB/s, "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) the card. v5e's
# network is from its page, 6.4 Tbit/s for a pod of 256. Memory is the capacity that libtpu's compiler reports when a
# program needs more, the smallest of the versions pinned in requirements/: 0.25 to 1.25 GiB less than the chip has.
_TPU_V4 = Chip("TPU v4", 31_485 * _MIB, 1200e9, 300e9, 6.25e9)
_TPU_V5E = Chip("TPU v5 lite", 16_126 * _MIB, 819e9, 200e9, 3.125e9)
_TPU_V5P = Chip("TPU v5", 98_025 * _MIB, 2765e9, 600e9, 6.25e9)
_TPU_V6E = Chip("TPU v6 lite", 31_992 * _MIB, 1638e9, 400e9, 12.5e9)
_TPU_7X = Chip("TPU7x", 97_012 * _MIB, 3690e9, 300e9, 6.25e9)  # half a chip

# GPUs, eight to a host. Memory is the driver's figure (xla/backends/gpu/target_config/specs of openxla/xla); memory
# bandwidth and NVLink, in one direction, are from NVIDIA's data sheets. The network cards are the GPU NICs of Google's
# machines (docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth): a3-highgpu-8g 4 x 200 Gbit/s, a3-ultragpu-8g
# and a4-highgpu-8g 8 x 400 Gbit/s; for the A100 NVIDIA's DGX A100, 8 x 200 Gbit/s.
_GPUS_PER_HOST = 8
_GPU_HOSTS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039e9, 300e9, 25e9),
    "a3": Chip("NVIDIA H100 80GB HBM3", 84_942_979_072, 3350e9, 450e9, 12.5e9),
    "a3-ultra": Chip("NVIDIA H200", 151_397_597_184, 4800e9, 450e9, 50e9),
    "a4": Chip("NVIDIA B200", 191_514_411_008, 8000e9, 900e9, 50e9),
}


class _Generation(NamedTuple):
    """A TPU generation, and how its slices are named."""

    chip: Chip  # one JAX device
    devices_per_chip: int
    counted: str  # the unit that the number in a slice's name counts
    counted_per_chip: int
    dims: int  # of a slice's shape
    smallest: int  # chips of its smallest slice
    largest: int  # chips of its largest slice


# Slices and their names are from the same pages, for TPU7x from MaxText, which counts devices. The largest is a pod for
# v4, v5e, v6e and TPU7x; for v5p the largest job, 96 of a pod's 140 cubes of 4x4x4.
_V5E = _Generation(_TPU_V5E, 1, "chips", 1, dims=2, smallest=1, largest=256)
_GENERATIONS = {
    "v4": _Generation(_TPU_V4, 1, "TensorCores (two per chip)", 2, dims=3, smallest=4, largest=4096),
    "v5e": _V5E,
    "v5litepod": _V5E,
    "v5p": _Generation(_TPU_V5P, 1, "TensorCores (two per chip)", 2, dims=3, smallest=4, largest=6144),
    "v6e": _Generation(_TPU_V6E, 1, "chips", 1, dims=2, smallest=1, largest=256),
    "tpu7x": _Generation(_TPU_7X, 2, "devices (two per chip)", 2, dims=3, smallest=1, largest=9216),
}

# Larger three-dimensional slices are made of these cubes, joined by optical switches, at most 64 in a line.
_CUBE = 4
_LONGEST = 64 * _CUBE


def parse_topology(name: str, slices: int) -> Topology:
    """Parses the keys `compile_topology` and `compile_topology_num_slices`.

    A name is a TPU slice as Google names it (v5p-128) or by its chips (v5p:4x4x4), a GPU host (a3) or some of its GPUs
    (a3:1), or cpu-N. Raises UserError if there is no such slice or host, or not that many of them.
    """
    if slices < 1:
        raise UserError(f"compile_topology_num_slices={slices}: expected a number of slices or hosts, at least 1")
    name = name.lower()
    host, _, gpus = name.partition(":")
    if host in _GPU_HOSTS and (name == host or gpus in map(str, range(1, _GPUS_PER_HOST + 1))):
        return Topology(name, "gpu", _GPU_HOSTS[host], (int(gpus or _GPUS_PER_HOST),), 1, slices)
    written = re.fullmatch(r"(\w+)(?:-(\d+)|:(\d+(?:x\d+)*))", name, re.ASCII)
    family, count, shape = written.groups("") if written else ("", "", "")
    if family == "cpu" and count:
        if slices > 1 or int(count) < 1:
            raise UserError(
                f"compile_topology={name} compile_topology_num_slices={slices}: expected at least one CPU device, "
                "and one slice"
            )
        return Topology(name, "cpu", None, (int(count),), 1, 1)
    if family not in _GENERATIONS:
        size = re.search(r"(?<![\dx])\d+$", name, re.ASCII)  # also matches v5p128
        families = [f"{each}-{size[0] if size else 8}" for each in (*_GENERATIONS, "cpu")]
        gpu_of = {each: re.findall(r"[a-z]\d00", chip.kind.lower())[0] for each, chip in _GPU_HOSTS.items()}  # a3: h100
        of_gpu = [f" Did you mean {each}?" for each, gpu in gpu_of.items() if gpu in name]
        gpus = ", ".join(f"{each}: {chip.kind}" for each, chip in _GPU_HOSTS.items())
        hint = of_gpu[0] if of_gpu else did_you_mean(name, [*_GPU_HOSTS, *families])
        raise UserError(
            f"compile_topology={name} is unknown.{hint} Expected a TPU slice "
            f"({', '.join(f'{each}-N' for each in _GENERATIONS)}, or its chips, such as v5p:4x4x8), a host of "
            f"{_GPUS_PER_HOST} GPUs ({gpus}) or cpu-N."
        )
    generation = _GENERATIONS[family]
    if shape:
        chips = _check_shape(name, generation, tuple(map(int, shape.split("x"))))
    else:
        chips = _counted_shape(name, generation, int(count))
    return Topology(name, "tpu", generation.chip, chips, generation.devices_per_chip, slices)


def _counted_shape(name: str, generation: _Generation, count: int) -> tuple[int, ...]:
    family, per_chip = name.rpartition("-")[0], generation.counted_per_chip
    if count % per_chip == 0 and (shape := _slice_shape(count // per_chip, generation)):
        return shape
    names = [n * per_chip for n in range(1, generation.largest + 1) if _slice_shape(n, generation)]
    nearest = [*[n for n in names if n < count][-1:], *[n for n in names if n > count][:1]]
    raise UserError(
        f"compile_topology={name}: no {family} slice has {count} {generation.counted}. The nearest: "
        + ", ".join(f"{family}-{n}" for n in nearest)
    )


def _check_shape(name: str, generation: _Generation, shape: tuple[int, ...]) -> tuple[int, ...]:
    chips = math.prod(shape)
    of_cubes = generation.dims == len(shape) == 3 and all(size in range(_CUBE, _LONGEST + 1, _CUBE) for size in shape)
    if shape == _slice_shape(chips, generation) or (of_cubes and chips <= generation.largest):
        return shape
    named = [_slice_shape(2**power, generation) for power in range(9 if generation.dims == 2 else 6)]
    expected = ", ".join("x".join(map(str, each)) for each in named if each)
    if generation.dims == 3:
        expected += f", or three multiples of {_CUBE}, each at most {_LONGEST}, of {generation.largest} chips at most"
    raise UserError(f"compile_topology={name}: no {name.partition(':')[0]} slice has this shape. Expected {expected}")


def _slice_shape(chips: int, generation: _Generation) -> tuple[int, ...] | None:
    """Shape, nearest to a square or cube, of the slice with this many chips; None if there is none."""
    if not generation.smallest <= chips <= generation.largest:
        return None
    if chips.bit_count() == 1 and chips != 2:  # hosts have one, four or eight chips
        return tuple(sorted(_factors(chips, generation.dims), key=lambda size: (size == 1, size)))  # 2x2x1
    if generation.dims == 3 and chips % _CUBE**3 == 0:
        shape = tuple(_CUBE * size for size in sorted(_factors(chips // _CUBE**3, 3)))
        return shape if shape[-1] <= _LONGEST else None
    return None


def _factors(product: int, count: int) -> tuple[int, ...]:
    if count == 1:
        return (product,)
    divisors = [n for n in range(1, product + 1) if product % n == 0]
    return min(((n, *_factors(product // n, count - 1)) for n in divisors), key=sum)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Published peak matmul rate of one JAX device, in floating-point operations per second.

    A multiplication and its addition count as two. `dtype` is bfloat16, float32, or tensorfloat32, which XLA uses for
    float32 on an NVIDIA GPU unless `matmul_precision` is highest. None if no source states the rate (a CPU, an unlisted
    device, float32 on a TPU): no MFU is better than a guessed one.
    """
    return _PEAK_FLOPS.get(device_kind, {}).get(dtype)


def memory_of(device_kind: str) -> int | None:
    """Bytes of memory of one JAX device that a `compile_topology` has; None for others."""
    chips = [generation.chip for generation in _GENERATIONS.values()] + list(_GPU_HOSTS.values())
    return next((chip.memory for chip in chips if chip.kind == device_kind), None)


def compute_capability(device: Any) -> float:
    """Compute capability of an NVIDIA GPU, present or compiled for, such as 9.0; 0 for other devices."""
    capability = str(getattr(device, "compute_capability", ""))
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0  # AMD uses names, such as gfx942


def kinds_with(dtype: str) -> list[str]:
    """Lists the devices whose matmul rate in this dtype is published."""
    return [kind for kind, rates in _PEAK_FLOPS.items() if dtype in rates]


def run_peak(device_kind: str, dtype: str, matmul_precision: str) -> float | None:
    """`peak_flops` for a run that computes in `dtype` under the key `matmul_precision`."""
    is_rounded = dtype == "float32" and matmul_precision != "highest"  # only on NVIDIA GPUs
    return (is_rounded and peak_flops(device_kind, "tensorfloat32")) or peak_flops(device_kind, dtype)
