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
from src.step.trace import trace_train_step


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


def header(config, traced):
    """What the file of this step says that it is for."""
    return program.header(traced, config.model, config.step, config.batch, config.mesh)


def save(config, traced):
    """Writes the file that `compiled_trainstep_file` names; returns the program."""
    with no_cache():
        compiled = traced.jax_traced.lower().compile()
        if jax.process_index() == 0:
            program.save(config.aot.compiled_trainstep_file, compiled, header(config, traced))
    return compiled


if __name__ == "__main__":
    command = configured(sys.argv[1:])
    save(command, trace_train_step(command, jax.devices()))
    multihost_utils.sync_global_devices("saved")
