"""Every test runs on 8 virtual CPU devices."""

import src.aot.compilers  # noqa: F401  isort: skip  before JAX

import os

import hypothesis
import jax
import pytest
from jaxlib import xla_client

# A busy machine is not a failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What a test runs is tiny: compiling it takes most of its time, and less without optimisations that don't pay there.
jax.config.update("jax_disable_most_optimizations", True)
# Nor does XLA's newer emitter of fused loops, which compiles for three times as long. XLA reads flags once: now.
os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
xla_client.CompileOptions()
del os.environ["XLA_FLAGS"]
# As train.py does, which says why.
os.environ["PJRT_NPROC"] = "32"


@pytest.fixture
def write(tmp_path):
    """Writes a file into a folder of the test's own."""

    def to_file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return to_file
