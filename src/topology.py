"""What is known of accelerators without asking one: the peak rates of their matrix products."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def _nvidia(bfloat16: float, tensorfloat32: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "tensorfloat32": tensorfloat32, "float32": float32}


# A100: "NVIDIA A100 Tensor Core GPU" data sheet.
_A100 = _nvidia(312e12, 156e12, 19.5e12)
# H100 SXM: "NVIDIA H100 Tensor Core GPU Architecture" white paper; the H200's data sheet states the same rates.
_H100_SXM = _nvidia(989.4e12, 494.7e12, 66.9e12)
# H100 NVL, H200 NVL: their data sheets, which state sparse rates, twice these.
_HOPPER_NVL = _nvidia(835.5e12, 417.5e12, 60e12)

# Operations a second of one JAX device, by the name JAX gives it (`jax.Device.device_kind`), for dense matrices: the
# rates that vendors state for 2:4 sparse ones are twice as high.
_PEAK_FLOPS = {
    # The pages of each generation at docs.cloud.google.com/tpu/docs (v3, v4, v5e, v5p, v6e, tpu7x) state bfloat16 a
    # chip. v3 and TPU7x show a chip as two devices, so theirs is half. A TPU multiplies float32 in several bfloat16
    # passes; no rate is published for that.
    "TPU v3": {"bfloat16": 61.5e12},
    "TPU v4": {"bfloat16": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12},
    "TPU v5": {"bfloat16": 459e12},
    "TPU v6 lite": {"bfloat16": 918e12},
    "TPU7x": {"bfloat16": 1153.5e12},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _nvidia(756e12, 378e12, 51.2e12),  # the same white paper
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    # "NVIDIA Blackwell" data sheet, a GPU's share; its tensor core rates are sparse.
    "NVIDIA B200": _nvidia(2250e12, 1100e12, 75e12),
    "NVIDIA GB200": _nvidia(2500e12, 1250e12, 80e12),
    # "NVIDIA Ada GPU Architecture" white paper, appendix A, with float32 accumulation.
    "NVIDIA GeForce RTX 4090": _nvidia(165.2e12, 82.6e12, 82.6e12),
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """The floating-point operations a second that one JAX device is stated to reach in matrix products.

    Args:
        device_kind: `jax.Device.device_kind`, exactly: a variant that is not listed may have another rate.
        dtype: what is multiplied: "bfloat16", "float32", or "tensorfloat32", which is what XLA makes of float32 on an
            NVIDIA GPU unless `matmul_precision` is highest.

    Returns:
        Operations a second, a multiplication and its addition being two. None where no source states it (a CPU, an
        unlisted device, float32 on a TPU): no MFU is better than a guessed one.
    """
    return _PEAK_FLOPS.get(device_kind, {}).get(dtype)


def run_peak(device: "jax.Device", dtype: str, matmul_precision: str) -> float | None:
    """`peak_flops` of a run that computes in `dtype` under the key `matmul_precision`."""
    if device.platform == "gpu" and dtype == "float32" and matmul_precision != "highest":
        dtype = "tensorfloat32"
    return peak_flops(device.device_kind, dtype)
