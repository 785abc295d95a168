"""What every command begins with."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from src.startup import configure_jax
from tests.runs import ROOT
from tests.tiny import load


@pytest.mark.parametrize(
    ("typed", "place"),
    [("gs://bucket/programs", "gs://bucket/programs"), ("~/programs", str(Path.home() / "programs"))],
)
def test_programs_are_kept_where_the_key_says(typed, place):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_default_matmul_precision
    try:
        configure_jax(load(jax_cache_dir=typed))
        assert jax.config.jax_compilation_cache_dir == place
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_default_matmul_precision", before[1])


DECOMPOSES = """
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from src.config.schema import Step
from src.startup import configure_jax
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
    private = ("src.aot", "jax.experimental.mosaic", "jax.experimental.pallas", "jaxlib.triton")
    slow = ("orbax",)  # the first save imports it
    assert [name for name in loaded.stdout.split() if name.startswith(private + slow)] == []
