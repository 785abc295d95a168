"""Devices that are not here: as many, of the kind, and as grouped as where they are."""

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from src.extras.aot import devices
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.parallel.mesh import make_layout
from src.system.errors import UserError
from tests.compilers import needs_cuda, needs_libtpu
from tests.tiny import load

TPUS = [("v4-8", 1), ("v4-128", 2), ("v5e-1", 1), ("v5e-8", 3), ("v5p-16", 1), ("v6e-16", 2), ("tpu7x-2", 1)]
GPUS = [("a3", 1), ("a3-ultra:1", 1), ("a3", 4), ("a3-ultra", 2), ("a4", 2), ("a100", 2)]
# Names and sizes that a process of its own asks for, which has not started JAX.
FRESH = """
import src.extras.aot.compilers
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
devices = abstract_devices(parse_topology("{name}", 1))
import jax
print(len(devices), devices[0].platform, jax.default_backend())
"""


def fresh(name):
    """What a new process prints of a topology's devices, on both outputs."""
    done = subprocess.run([sys.executable, "-c", FRESH.format(name=name)], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "slices"),
    [pytest.param(*each, marks=needs_libtpu) for each in TPUS]
    + [pytest.param(*each, marks=needs_cuda) for each in GPUS],
)
def test_devices_are_those_of_the_topology(name, slices):
    topology = parse_topology(name, slices)
    devices = abstract_devices(topology)
    assert len(devices) == topology.num_devices
    assert {device.platform for device in devices} == {topology.platform}
    assert {device.device_kind for device in devices} == {topology.chip.kind}
    layout = make_layout(load(dcn_data_parallelism=slices).mesh, devices)
    sizes = {name: size for name, size in layout.mesh.shape.items() if name in ("data", "fsdp")}
    assert sizes == {"data": slices, "fsdp": topology.num_devices // slices}
    assert layout.mesh.size == topology.num_devices


@needs_libtpu
@pytest.mark.parametrize(("name", "hosts"), [("v5e-1", 1), ("v5e-8", 1), ("v5e-16", 4), ("v5p-128", 16)])
def test_a_slice_has_its_hosts(name, hosts):
    """As many as Google's pages have for the slice (docs.cloud.google.com/tpu/docs/v5e, v5p)."""
    assert len({device.process_index for device in abstract_devices(parse_topology(name, 1))}) == hosts


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_the_compiler_grants_the_memory_that_is_stated(name):
    topology = parse_topology(name, 1)
    sharding = SingleDeviceSharding(abstract_devices(topology)[0])

    def compile_with(mebibytes):
        x = jax.ShapeDtypeStruct((mebibytes, 2**18), jnp.float32, sharding=sharding)
        jax.jit(lambda x: x + 1, out_shardings=sharding, donate_argnums=0).lower(x).compile()

    stated = topology.chip.memory // 2**20
    compile_with(stated - 8)  # the program itself takes some
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(stated + 24)  # libtpu's versions differ by some


@pytest.mark.parametrize(
    ("name", "platform"),
    [pytest.param("v5e-8", "tpu", marks=needs_libtpu), pytest.param("a3", "gpu", marks=needs_cuda), ("cpu-8", "cpu")],
)
def test_nothing_is_printed_and_this_machine_stays_a_cpu(name, platform):
    assert fresh(name) == (f"8 {platform} cpu\n", "")


def test_training_does_not_meet_the_compilers():
    """JAX would try them on a machine that has no such accelerator."""
    code = "import sys, src.train; sys.exit('src.extras.aot.compilers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_cuda
def test_of_two_cuda_plugins_jax_takes_this_environment_s_own(tmp_path):
    """One of CUDA 13, as of `pip install jax[cuda13]`, beside the compilers of `setup.sh aot`, which are of CUDA 12."""
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").write_text("def initialize(): print('CUDA 13 begins')")
    (tmp_path / "jax_cuda13_plugin").mkdir()
    code = (
        "import src.extras.aot.compilers, sys, jax\nfrom src.extras.aot import devices\n"
        "jax.config.update('jax_platforms', 'cpu'); jax.devices()\n"
        "print(devices.CUDA, hasattr(sys.modules['jax_plugins.xla_cuda12'], '__file__'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == "CUDA 13 begins\n13 False\n"
    assert done.stderr == ""


def test_virtual_cpus_are_this_process_own():
    assert abstract_devices(parse_topology("cpu-8", 1)) == jax.devices()
    with pytest.raises(UserError, match=r"cpu-4 .* already has 8 CPU devices"):
        abstract_devices(parse_topology("cpu-4", 1))


@pytest.mark.parametrize(
    ("name", "package", "cuda"),
    [("v5e-8", "libtpu", 12), ("a3", "jax-cuda12-plugin", 12), ("a3", "jax-cuda13-plugin", 13)],
)
def test_a_compiler_that_is_missing_is_named(name, package, cuda, monkeypatch):
    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(devices, "CUDA", cuda)
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=f"compile_topology={name} needs the package {package}.*bash setup.sh aot"):
        abstract_devices(parse_topology(name, 1))


LOADED = """
import time

import src.extras.aot.compilers
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology

abstract_devices(parse_topology("v5e-4", 1))
print("loaded", flush=True)
time.sleep(300)
"""


@needs_libtpu
def test_sigterm_ends_a_process_without_libtpus_stack_trace():
    words = [sys.executable, "-c", LOADED]
    with subprocess.Popen(
        words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "loaded\n"
        process.terminate()
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (-signal.SIGTERM, "")
