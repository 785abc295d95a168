"""Saves the step that `src.train` would compile on the devices of this job: `python -m tests.aot.save_step ARGUMENTS`.

Unlike src.train_compile it may be several processes, as only a job of CPUs has to be.
"""

import contextlib
import sys

import jax
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from src.extras.aot import program
from src.run.run_setup import configured
from src.step.build import build


@contextlib.contextmanager
def no_cache():
    """What is compiled in the block is compiled, whatever JAX has kept."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or JAX would not look at the setting, after its first compilation
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def header(config, built):
    """What the file of this step says that it is for."""
    return program.header(built, config.model, config.step, config.batch, config.mesh)


def save(config, built):
    """Writes the file that `compiled_trainstep_file` names; returns the program."""
    with no_cache():
        compiled = built.traced.lower().compile()
        if jax.process_index() == 0:
            program.save(config.aot.compiled_trainstep_file, compiled, header(config, built))
    return compiled


if __name__ == "__main__":
    command = configured(sys.argv[1:])
    save(command, build(command, jax.devices()))
    multihost_utils.sync_global_devices("saved")
