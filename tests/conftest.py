"""Runs every test on 8 virtual CPU devices, and starts the longest files first."""

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):  # if src/extras/ was deleted
    import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import hypothesis
import jax
import pytest

from tests import core_tests, quick_compilation

# A busy machine must not fail a test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
quick_compilation.in_this_process()
# Tracing creates many objects and few cycles.
gc.set_threshold(20_000, 20, 20)
# src/run/run_setup.py sets it too, and explains why.
os.environ["PJRT_NPROC"] = "32"

# Workers take whole files. These come first, so that no long file starts last and runs when the others are done.
LONGEST = (
    *("resume", "parity", "train_compile", "decode", "memory", "expert_axis", "multiprocess", "kernels", "experts"),
    *("context_axis", "memory_levers", "train_step", "axes", "program", "compiler_flags", "config_entries", "pgle"),
    *("layer_collectives", "checkpoint", "multislice", "moe", "remat", "quantized_products", "train", "readme"),
    *("run", "tokenize_dataset", "run_as_config", "convert", "pipeline", "odd_exports", "scale", "launch"),
    *("forking", "checks_bce", "checks_dg", "checks_fhij", "checks_klm", "edits", "command", "ramp", "old_runs"),
)

TESTS = Path(__file__).parent

# Modules that are imported while tests are collected are the project's: write their bytecode even if the environment
# forbids it (PYTHONDONTWRITEBYTECODE), so that workers, later runs and the processes of tests need not compile them.
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# One folder of compiled programs for all workers and the processes that they start, which inherit this variable.
if "MINTEXT_TEST_PROGRAMS" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="mintext-test-programs-")
    os.environ["MINTEXT_TEST_PROGRAMS"] = _programs.name


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would start with the files that have the most tests


def is_core(path):
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix() in core_tests.FILES


def pytest_ignore_collect(collection_path, config):
    """Leaves out the other files with `-m core`: importing them takes longer than some of the tests."""
    is_other = collection_path.suffix == ".py" and not is_core(collection_path)
    return True if config.option.markexpr == "core" and is_other else None


def pytest_collection_modifyitems(items):
    for item in items:
        if is_core(item.path) and not item.get_closest_marker("long"):
            item.add_marker("core")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def freeze_what_was_in_use(phase, info):
    """Freezes all objects after a full collection, because JAX's traced objects only grow and are slow to search."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def pytest_collection_finish():
    sys.dont_write_bytecode = WRITES_NO_BYTECODE  # tests write modules, and change them within a second
    gc.freeze()  # imported objects, which every collection would otherwise search
    gc.callbacks.append(freeze_what_was_in_use)


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a file into the test's temporary folder."""

    def to_file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return to_file


@pytest.fixture(scope="module")
def steps_built_once():
    from tests import runs  # imported here because it sets the folder of compiled programs

    with runs.built_once():
        yield
