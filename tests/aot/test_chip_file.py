"""Hardware from YAML files: the shipped ones, and what is wrong in others."""

import pytest

from src.extras.aot import chip_file
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.parallel.chips import peak_flops
from src.system.errors import UserError
from tests.compilers import needs_cuda

MINE = {
    "kind": "Some GPU 1",
    "source": "a data sheet",
    "compute_capability": "8.9",
    "devices_per_host": "4",
    "memory_bytes": "48_000_000_000",
    "memory_bandwidth": "1e12",
    "ici_bandwidth": "32e9",
    "dcn_bandwidth": "12.5e9",
    "peaks": "{bfloat16: 1e14, fp8: 2e14}",
}


@pytest.fixture
def file(tmp_path):
    def write(**changed):
        path = tmp_path / "mine.yml"
        entries = {key: value for key, value in {**MINE, **changed}.items() if value is not None}
        path.write_text("".join(f"{key}: {value}\n" for key, value in entries.items()))
        return str(path)

    return write


def test_a_file_is_a_host_of_its_chips(file):
    topology = parse_topology(file(), 3)
    assert (topology.platform, topology.shape, topology.num_devices) == ("gpu", (4,), 12)
    assert topology.chip.memory == 48_000_000_000
    assert topology.chip.dcn_bandwidth == 12.5e9
    assert topology.chip.capability == "8.9"
    assert peak_flops("Some GPU 1", "fp8") == 2e14
    assert peak_flops("Some GPU 1", "float32") is None
    assert parse_topology(file() + ":2", 1).num_devices == 2


@pytest.mark.parametrize("name", chip_file.shipped_names())
def test_every_shipped_file_is_read(name):
    topology = parse_topology(name, 2)
    assert topology.num_devices == 2 * topology.shape[0]
    assert peak_flops(topology.chip.kind, "bfloat16") > 1e14
    assert topology.chip.ici_bandwidth > topology.chip.dcn_bandwidth


def test_hardware_that_is_asked_for_is_there():
    assert {"dgx-h100", "gb200", "l40s"} <= set(chip_file.shipped_names())
    kinds = [parse_topology(name, 1).chip.kind for name in ("a100", "a3-ultra", "a4", "tpu7x-8", "gb200", "L40S")]
    for kind, words in zip(kinds, ("A100", "H200", "B200", "TPU7x", "GB200", "L40S"), strict=True):
        assert words in kind


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_bandwidth": None}, "memory_bandwidth is missing: bytes per second, such as 3350e9"),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth=fast: expected a number above 0: bytes per second"),
        ({"dcn_bandwidth": "-1"}, "dcn_bandwidth=-1: expected a number above 0"),
        ({"memory_bytes": "48_000_000_000.5"}, "memory_bytes=48_000_000_000.5: expected a whole number of bytes"),
        ({"memory_bytes": "48"}, "memory_bytes=48 is 6e-10 times an H100's. Is the unit right? bytes, such as 84_942"),
        ({"memory_bandwidth": "3350"}, "memory_bandwidth=3350 is 1e-09 times an H100's. Is the unit right?"),
        ({"dcn_bandwidth": "400e12"}, "dcn_bandwidth=400e12 is 8e+03 times an H100's"),
        ({"peaks": "{bfloat16: 989.4}"}, "bfloat16=989.4 is 1e-12 times an H100's"),
        ({"devices_per_host": "true"}, "devices_per_host=true: expected a number"),
        ({"source": None}, "source is missing: where the figures are from"),
        ({"peaks": None}, "peaks is missing"),
        ({"peaks": "{fp8: 1e15}"}, "has no bfloat16"),
        ({"peaks": "{bfloat16: much}"}, "bfloat16=much: expected a number"),
        ({"peaks": "{bfloat16: 1e14, fp4: 1e15}"}, "peaks.fp4 is unknown"),
        ({"kind": "NVIDIA H200", "peaks": "{bfloat16: 5e14}"}, "a NVIDIA H200 has 9.894e"),
        ({"compute_capability": None}, "compute_capability=missing"),
        ({"memory_bandwith": "1e12"}, "memory_bandwith is unknown. Did you mean memory_bandwidth"),
        ({"compiler": "{core_count: many}"}, "core_count=many"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file, changed, message):
    with pytest.raises(UserError) as error:
        parse_topology(file(**changed), 1)
    assert message in str(error.value)
    assert "mine.yml" in str(error.value)


def test_a_file_that_is_not_text_or_has_no_keys_is_answered(tmp_path):
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00kind")
    (tmp_path / "list.yml").write_text("- kind\n")
    for name, message in (("binary.yml", "cannot read"), ("list.yml", "holds a list")):
        with pytest.raises(UserError, match=message):
            parse_topology(str(tmp_path / name), 1)


def test_a_missing_file_and_too_many_gpus_are_refused(file):
    with pytest.raises(UserError, match="there is no such file"):
        parse_topology("/nowhere/mine.yml", 1)
    with pytest.raises(UserError, match="expected 1 to 4 GPUs"):
        parse_topology(file() + ":5", 1)


@needs_cuda
def test_a_file_compiles_only_with_its_compilers_properties(file):
    with pytest.raises(UserError, match="XLA needs the properties of a Some GPU 2"):
        abstract_devices(parse_topology(file(kind="Some GPU 2"), 1))
    devices = abstract_devices(parse_topology("l40s", 2))
    assert len(devices) == 16
    assert {device.compute_capability for device in devices} == {"8.9"}
