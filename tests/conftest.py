"""Every test runs on 8 virtual CPU devices."""

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX

import gc
import os
import tempfile

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
# Tracing makes many objects and few cycles.
gc.set_threshold(20_000, 20, 20)
# As train.py does, which says why.
os.environ["PJRT_NPROC"] = "32"

# Workers take whole files: those of the most seconds first, so that none of them begins last and ends alone.
LONGEST = (
    *("resume", "parity", "train_compile", "decode", "memory", "expert_axis", "multiprocess", "kernels", "experts"),
    *("context_axis", "memory_levers", "train_step", "axes", "program", "compiler_flags", "config_entries", "pgle"),
    *("layer_collectives", "checkpoint", "multislice", "moe", "remat", "quantized_products", "train", "readme"),
    *("tokenize_dataset", "run_as_config", "convert", "pipeline", "odd_exports", "scale", "launch"),
    "forking",
)

# The compiled programs of runs, one folder for all workers and what they start: they are started with this environment.
if "MINTEXT_TEST_PROGRAMS" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="mintext-test-programs-")
    os.environ["MINTEXT_TEST_PROGRAMS"] = _programs.name


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of the most tests


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def freeze_what_was_in_use(phase, info):
    """After a search of everything for cycles, of which each run of a test ends in one: what JAX traced only grows."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def pytest_collection_finish():
    gc.freeze()  # all that is imported: every search for cycles would walk through it
    gc.callbacks.append(freeze_what_was_in_use)


@pytest.fixture
def write(tmp_path):
    """Writes a file into a folder of the test's own."""

    def to_file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return to_file


@pytest.fixture(scope="module")
def steps_built_once():
    from tests import runs  # which sets the folder of compiled programs: for tests of runs alone

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.src_run, "build", runs.build_once)
        yield
