import pytest

from src.topology import peak_flops


@pytest.mark.parametrize(
    ("device_kind", "published"),
    [
        ("TPU v5", 328e12 / 0.7147),  # MaxText's table of runs: 328 TFLOP/s a chip are 71.47% of v5p
        ("NVIDIA H100 80GB HBM3", 1979e12 / 2),  # the data sheet's, with sparsity
        ("NVIDIA A100-SXM4-80GB", 624e12 / 2),
    ],
)
def test_bfloat16_peak_agrees_with_published_figures(device_kind, published):
    assert peak_flops(device_kind, "bfloat16") == pytest.approx(published, rel=0.001)


def test_two_devices_of_a_chip_share_its_peak():
    assert peak_flops("TPU7x", "bfloat16") * 2 == 2307e12


def test_lower_precision_is_never_slower():
    h100 = [peak_flops("NVIDIA H100 80GB HBM3", dtype) for dtype in ("bfloat16", "tensorfloat32", "float32")]
    assert h100 == sorted(h100, reverse=True)


@pytest.mark.parametrize(
    ("device_kind", "dtype"),
    [("cpu", "float32"), ("TPU v4", "float32"), ("NVIDIA H100", "bfloat16"), ("NVIDIA H200", "float8")],
)
def test_what_no_source_states_is_none(device_kind, dtype):
    assert peak_flops(device_kind, dtype) is None
