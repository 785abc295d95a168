"""Published figures of accelerators: peak rates, memory, bandwidths."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from src.system.errors import UserError


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
    capability: str = ""  # compute capability of an NVIDIA GPU


# Peak rates of one JAX device in 10^12 operations per second, by `jax.Device.device_kind`, for dense matrices; the
# rates that vendors state for 2:4 sparse ones are twice as high. Sources:
# - TPUs: the pages of each generation at docs.cloud.google.com/tpu/docs (v3, v4, v5e, v5p, v6e, tpu7x) state bfloat16
#   rates per chip. JAX shows a v3 or TPU7x chip as two devices, so each has half. A TPU multiplies float32 in several
#   bfloat16 passes; no rate is published for that.
# - A100: "NVIDIA A100 Tensor Core GPU" data sheet.
# - H100 SXM and PCIe: "NVIDIA H100 Tensor Core GPU Architecture" white paper; the H200's data sheet states the same
#   rates as for H100 SXM. H100 NVL, H200 NVL: their data sheets, which state sparse rates, twice these.
# - B200, GB200: "NVIDIA Blackwell" data sheet, one GPU's share; its tensor core rates are sparse.
# - RTX 4090: "NVIDIA Ada GPU Architecture" white paper, appendix A, with float32 accumulation.
_PEAK_TERAFLOPS = """
TPU v3:                  bfloat16=61.5
TPU v4:                  bfloat16=275
TPU v5 lite:             bfloat16=197 int8=394
TPU v5:                  bfloat16=459 int8=918
TPU v6 lite:             bfloat16=918 int8=1836
TPU7x:                   bfloat16=1153.5 fp8=2307
NVIDIA A100-SXM4-40GB:   bfloat16=312 tensorfloat32=156 float32=19.5
NVIDIA A100-SXM4-80GB:   bfloat16=312 tensorfloat32=156 float32=19.5
NVIDIA A100-PCIE-40GB:   bfloat16=312 tensorfloat32=156 float32=19.5
NVIDIA A100 80GB PCIe:   bfloat16=312 tensorfloat32=156 float32=19.5
NVIDIA H100 80GB HBM3:   bfloat16=989.4 tensorfloat32=494.7 float32=66.9 fp8=1978.9
NVIDIA H100 PCIe:        bfloat16=756 tensorfloat32=378 float32=51.2 fp8=1513
NVIDIA H100 NVL:         bfloat16=835.5 tensorfloat32=417.5 float32=60 fp8=1670.5
NVIDIA H200:             bfloat16=989.4 tensorfloat32=494.7 float32=66.9 fp8=1978.9
NVIDIA H200 NVL:         bfloat16=835.5 tensorfloat32=417.5 float32=60 fp8=1670.5
NVIDIA B200:             bfloat16=2250 tensorfloat32=1100 float32=75 fp8=4500 mxfp8=4500
NVIDIA GB200:            bfloat16=2500 tensorfloat32=1250 float32=80 fp8=5000 mxfp8=5000
NVIDIA GeForce RTX 4090: bfloat16=165.2 tensorfloat32=82.6 float32=82.6 fp8=330.3
"""
_PEAK_FLOPS = {
    kind: {dtype: float(f"{rate}e12") for dtype, rate in re.findall(r"(\w+)=(\S+)", rates)}
    for kind, rates in re.findall(r"(.+): +(.+)", _PEAK_TERAFLOPS)
}

# Properties of GPUs for XLA's compiler, by kind, in addition to those that src/extras/aot/devices.py lists. A chip file
# adds them (src/extras/aot/chip_file.py).
GPU_PROPERTIES: dict[str, str] = {}

_MIB = 2**20

# TPUs. Memory bandwidth and links are from the generation's page at docs.cloud.google.com/tpu/docs (tpu7x compares v5p,
# v6e and TPU7x), which adds up a link's two directions; here it is one. v4's links and its host's network card (200
# Gbit/s for four chips) are not on its page: "TPU v4: An Optically Reconfigurable Supercomputer" (Jouppi and others,
# 2023) states six links of 50 GB/s, "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus) the card. v5e's
# network is from its page, 6.4 Tbit/s for a pod of 256. Memory is the capacity that libtpu's compiler reports when a
# program needs more, the smallest of the versions pinned in requirements/: 0.25 to 1.25 GiB less than the chip has.
TPU_V4 = Chip("TPU v4", 31_485 * _MIB, 1200e9, 300e9, 6.25e9)
TPU_V5E = Chip("TPU v5 lite", 16_126 * _MIB, 819e9, 200e9, 3.125e9)
TPU_V5P = Chip("TPU v5", 98_025 * _MIB, 2765e9, 600e9, 6.25e9)
TPU_V6E = Chip("TPU v6 lite", 31_992 * _MIB, 1638e9, 400e9, 12.5e9)
TPU_7X = Chip("TPU7x", 97_012 * _MIB, 3690e9, 300e9, 6.25e9)  # half a chip

# GPUs, eight to a host. Memory is the driver's figure (xla/backends/gpu/target_config/specs of openxla/xla); memory
# bandwidth and NVLink, in one direction, are from NVIDIA's data sheets. The network cards are the GPU NICs of Google's
# machines (docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth): a3-highgpu-8g 4 x 200 Gbit/s, a3-ultragpu-8g
# and a4-highgpu-8g 8 x 400 Gbit/s; for the A100 NVIDIA's DGX A100, 8 x 200 Gbit/s.
GPU_HOSTS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039e9, 300e9, 25e9, "8.0"),
    "a3": Chip("NVIDIA H100 80GB HBM3", 84_942_979_072, 3350e9, 450e9, 12.5e9, "9.0"),
    "a3-ultra": Chip("NVIDIA H200", 151_397_597_184, 4800e9, 450e9, 50e9, "9.0"),
    "a4": Chip("NVIDIA B200", 191_514_411_008, 8000e9, 900e9, 50e9, "10.0"),
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak matmul rate of one JAX device, published or declared, in operations per second.

    A multiplication and its addition count as two. `dtype` is bfloat16, int8, fp8, mxfp8, float32, or tensorfloat32,
    which XLA uses for float32 on an NVIDIA GPU unless `matmul_precision` is highest. None if no source states the rate
    (a CPU, an unlisted device, float32 on a TPU): no MFU is better than a guessed one.
    """
    return _PEAK_FLOPS.get(device_kind, {}).get(dtype)


def declare_peaks(device_kind: str, rates: Mapping[str, float], where: str) -> None:
    """Adds peak rates, operations per second by dtype, in this process; raises UserError if a published one differs."""
    published = _PEAK_FLOPS.setdefault(device_kind, dict(rates))
    for dtype, rate in rates.items():
        if published.setdefault(dtype, rate) != rate:
            raise UserError(f"{where}: peaks.{dtype}={rate:g}, but a {device_kind} has {published[dtype]:g}")


def memory_of(device_kind: str) -> int | None:
    """Bytes of memory of one JAX device, if it is among the TPUs above or in GPU_HOSTS; None for others."""
    chips = (TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, TPU_7X, *GPU_HOSTS.values())
    return next((chip.memory for chip in chips if chip.kind == device_kind), None)


def compute_capability(device: Any) -> float:
    """Compute capability of an NVIDIA GPU, present or compiled for, such as 9.0; 0 for other devices."""
    capability = str(getattr(device, "compute_capability", ""))
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0  # AMD uses names, such as gfx942


def kinds_with(dtype: str) -> list[str]:
    """Lists the kinds of devices whose matmul rate in this dtype is published or declared."""
    return [kind for kind, rates in _PEAK_FLOPS.items() if dtype in rates]


def run_peak(device_kind: str, dtype: str, matmul_precision: str) -> float | None:
    """Gives the `peak_flops`, maybe None, of a run that computes in `dtype` under the key `matmul_precision`."""
    is_rounded = dtype == "float32" and matmul_precision != "highest"  # only NVIDIA GPUs have a tensorfloat32 rate
    return (is_rounded and peak_flops(device_kind, "tensorfloat32")) or peak_flops(device_kind, dtype)
