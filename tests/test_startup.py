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


def test_training_needs_no_private_module_of_a_compiler_of_kernels():
    """A release of JAX that moves one would stop all training, for a key that is off."""
    program = "import sys; import src.train; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    private = ("src.aot", "jax.experimental.mosaic", "jax.experimental.pallas", "jaxlib.triton")
    assert [name for name in loaded.stdout.split() if name.startswith(private)] == []
