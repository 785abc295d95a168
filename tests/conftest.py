"""Every test runs on 8 virtual CPU devices."""

import src.aot.compilers  # noqa: F401  isort: skip  before JAX

import gc
import os

import hypothesis
import jax
import pytest

from tests import quick_compilation

# A busy machine is not a failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
quick_compilation.in_this_process()
# Tracing makes many objects and few cycles, and each search for cycles walks through all that is imported.
gc.set_threshold(20_000, 20, 20)
# As train.py does, which says why.
os.environ["PJRT_NPROC"] = "32"


@pytest.fixture
def write(tmp_path):
    """Writes a file into a folder of the test's own."""

    def to_file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return to_file
