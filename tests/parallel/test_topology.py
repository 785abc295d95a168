import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.extras.aot.topology import parse_topology
from src.parallel.chips import peak_flops
from src.system.errors import UserError

# The devices of a slice or host, its chips, and what one has: HBM in GB and peak TFLOP/s as its maker advertises them.
PUBLISHED = {
    "v4-8": (32, 275),
    "v5e-8": (16, 197),
    "v5p-8": (95, 459),
    "v6e-8": (32, 918),
    "tpu7x-8": (96, 1153.5),  # half a chip
    "a100": (80, 312),
    "a3": (80, 989),
    "a3-ultra": (141, 989),
    "a4": (180, 2250),
}


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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # docs.cloud.google.com/tpu/docs: v4, v5e, v5p, v6e, tpu7x.
        ("v4-8", (2, 2, 1)),
        ("v4-16", (2, 2, 2)),
        ("v4-32", (2, 2, 4)),
        ("v4-64", (2, 4, 4)),
        ("v4-128", (4, 4, 4)),
        ("v4-4096", (8, 16, 16)),
        ("v5e-1", (1, 1)),
        ("v5e-8", (2, 4)),
        ("v5litepod-32", (4, 8)),
        ("v5e-256", (16, 16)),
        ("v6e-128", (8, 16)),
        ("v5p-8", (2, 2, 1)),
        ("v5p-128", (4, 4, 4)),
        ("v5p-256", (4, 4, 8)),
        ("v5p-512", (4, 8, 8)),
        ("v5p-1024", (8, 8, 8)),
        ("v5p-2048", (8, 8, 16)),
        ("v5p-4096", (8, 16, 16)),
        ("v5p-8192", (16, 16, 16)),
        ("v5p-12288", (16, 16, 24)),
        # MaxText's accelerator_to_spec_map.py, which has those that are no powers of two.
        ("v4-384", (4, 4, 12)),
        ("v5p-640", (4, 4, 20)),
        ("v5p-1152", (4, 12, 12)),
        ("v5p-3456", (12, 12, 12)),
        ("v5p-6272", (4, 28, 28)),
        ("v5p-7680", (12, 16, 20)),
        ("v5p-8448", (8, 12, 44)),
        ("v5p-10368", (12, 12, 36)),
        ("v5p-12032", (4, 8, 188)),
        ("tpu7x-2", (1, 1, 1)),
        ("tpu7x-128", (4, 4, 4)),
        ("tpu7x-18432", (16, 24, 24)),
    ],
)
def test_a_slices_shape_is_googles(name, shape):
    assert parse_topology(name, 1).shape == shape


@pytest.mark.parametrize(
    ("name", "slices", "devices"),
    [
        ("v4-128", 2, 128),  # 64 chips of two cores that work as one device
        ("v5e-256", 199, 50_944),
        ("v5p-12288", 1, 6144),
        ("v5p:8x8x16", 1, 1024),
        ("v4:4x4x16", 2, 512),  # not the shape of v4-512
        ("tpu7x-128", 1, 128),  # 64 chips of two devices
        ("tpu7x:2x2x1", 3, 24),
        ("a3", 4, 32),
        ("a3-ultra", 1, 8),
        ("a4", 2, 16),
        ("a100", 1, 8),
        ("cpu-8", 1, 8),
    ],
)
def test_devices_of_all_slices_are_counted(name, slices, devices):
    topology = parse_topology(name, slices)
    assert topology.num_devices == devices
    assert (topology.name, topology.slices) == (name, slices)


@pytest.mark.parametrize("name", ["V5E-256", "v5P:4x4x8", "A3-Ultra", "CPU-8"])
def test_capitals_are_as_good(name):
    assert parse_topology(name, 1) == parse_topology(name.lower(), 1)


@given(st.sampled_from(["v4", "v5e", "v5p", "v6e", "tpu7x"]), st.integers(0, 20_000))
def test_a_slice_has_the_chips_of_its_number_or_does_not_exist(family, number):
    per_chip = {"v4": 2, "v5p": 2, "tpu7x": 2}.get(family, 1)
    try:
        shape = parse_topology(f"{family}-{number}", 1).shape
    except UserError as error:
        nearest = [int(name.rsplit("-")[-1]) for name in str(error).split("nearest: ")[1].split(", ")]
        assert number not in nearest
        assert len({size < number for size in nearest}) == len(nearest)  # one on each side, or where there is but one
        for size in nearest:
            assert parse_topology(f"{family}-{size}", 1)
    else:
        assert math.prod(shape) * per_chip == number
        assert parse_topology(f"{family}:{'x'.join(map(str, shape))}", 1).shape == shape


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("v5p-100", "no v5p slice has 100 TensorCores .two per chip.. The nearest: v5p-64, v5p-128$"),
        ("v5p-9", "The nearest: v5p-8, v5p-16$"),
        ("v5e-512", "no v5e slice has 512 chips. The nearest: v5e-256$"),
        ("v6e-2", "The nearest: v6e-1, v6e-4$"),
        ("v4-4", "The nearest: v4-8$"),
        ("v5p-12416", "The nearest: v5p-12288$"),  # a cube more than the largest job
        ("tpu7x-4", "no tpu7x slice has 4 devices .two per chip.. The nearest: tpu7x-2, tpu7x-8$"),
        ("v5p:4x4", "no v5p slice has this shape. Expected 2x2x1, 2x2x2, 2x2x4, 2x4x4, or three multiples of 4"),
        ("v5p:6x4x4", "no v5p slice has this shape"),
        ("v5p:16x16x28", "of 6144 chips at most"),
        ("v5p:0x4x4", "no v5p slice has this shape"),
        ("v5e:16x32", "no v5e slice has this shape. Expected 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16$"),
        ("v5-128", "Did you mean v5p-128 or v5e-128"),
        ("v5p128", "Did you mean v5p-128"),
        ("v5p", "Did you mean v5p-8"),
        ("a3ultra", "Did you mean a3-ultra"),
        ("a3:9", "is unknown"),
        ("a3:0", "is unknown"),
        ("h100", "Did you mean a3[?]"),
        ("h100-8", "Did you mean a3[?]"),
        ("nvidia-h200", "Did you mean a3-ultra[?]"),
        ("cpu:2x4", "is unknown. Expected .* or cpu-N"),
        ("v5e-\u0668", "is unknown. Did you mean v5e-8"),  # an Arabic eight
        ("gpu-8", "Did you mean cpu-8"),
        ("cpu-0", "at least one CPU device"),
        ("", "is unknown. Expected a TPU slice"),
    ],
)
def test_what_is_no_topology_is_answered(name, answer):
    with pytest.raises(UserError, match=answer) as caught:
        parse_topology(name, 1)
    assert f"compile_topology={name}" in str(caught.value)


@pytest.mark.parametrize(("name", "slices"), [("v5e-8", 0), ("a3", -1), ("cpu-8", 2)])
def test_slices_that_cannot_be_are_answered(name, slices):
    with pytest.raises(UserError, match=f"compile_topology_num_slices={slices}"):
        parse_topology(name, slices)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_chip_is_what_its_maker_advertises(name):
    chip = parse_topology(name, 1).chip
    gigabytes, teraflops = PUBLISHED[name]
    # Some is kept by the compiler or the driver, and some makers' gigabytes are of 2**30 bytes.
    assert 0.95 * gigabytes * 1e9 < chip.memory < 1.09 * gigabytes * 1e9
    assert peak_flops(chip.kind, "bfloat16") == pytest.approx(teraflops * 1e12, rel=0.001)
    assert chip.dcn_bandwidth < chip.ici_bandwidth < chip.memory_bandwidth


def test_topologies_are_known_without_jax():
    """A name is checked before JAX is imported, which takes a second."""
    code = "import sys, src.extras.aot.topology; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
