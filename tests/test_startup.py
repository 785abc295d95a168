"""What every command begins with."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from src.run.run_setup import configure_jax
from tests.runs import ROOT
from tests.tiny import load


@pytest.mark.parametrize(
    ("typed", "place"),
    [("gs://bucket/programs", "gs://bucket/programs"), ("~/programs", str(Path.home() / "programs"))],
)
def test_programs_are_kept_where_the_key_says(typed, place):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_default_matmul_precision
    try:
        configure_jax(load(jax_cache_dir=typed).step)
        assert jax.config.jax_compilation_cache_dir == place
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_default_matmul_precision", before[1])


def test_a_run_takes_nine_tenths_of_a_gpus_memory_unless_the_environment_says_otherwise(monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

    def fractions(**given):
        for name in names:
            monkeypatch.setenv(name, given.get(name, ""))
            if name not in given:
                monkeypatch.delenv(name)
        configure_jax(load().step)
        return [os.environ.get(name) for name in names]

    precision = jax.config.jax_default_matmul_precision
    try:
        assert fractions() == ["0.9", None]
        assert fractions(XLA_CLIENT_MEM_FRACTION="0.5") == ["0.5", None]
        assert fractions(XLA_PYTHON_CLIENT_MEM_FRACTION="0.6") == [None, "0.6"]  # JAX refuses both
    finally:
        jax.config.update("jax_default_matmul_precision", precision)


DECOMPOSES = """
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from src.config.schema import Step
from src.run.run_setup import configure_jax
configure_jax(Step())
matrices = np.random.default_rng(0).normal(size=(4, 128, 128)).astype(np.float32)
matrices += matrices.swapaxes(1, 2)
copies = jax.device_put(matrices, jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P()))
for _ in range(20):
    values = jax.block_until_ready(jax.jit(jax.numpy.linalg.eigh)(copies))[0]
np.testing.assert_allclose(values, np.linalg.eigvalsh(matrices), atol=1e-3)
"""


def test_devices_decompose_matrices_side_by_side():
    """Without configure_jax this ran for minutes: an optimizer such as SOAP made no step on a mesh."""
    subprocess.run([sys.executable, "-c", DECOMPOSES], cwd=ROOT, check=True, timeout=100)


def test_training_needs_no_private_module_of_a_compiler_of_kernels():
    """A release of JAX that moves one would stop all training, for a key that is off."""
    program = "import sys; import src.train; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    private = ("src.extras.aot", "jax.experimental.mosaic", "jax.experimental.pallas", "jaxlib.triton")
    slow = ("orbax",)  # the first save imports it
    assert [name for name in loaded.stdout.split() if name.startswith(private + slow)] == []
