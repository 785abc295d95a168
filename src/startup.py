"""What every command begins with, and how it speaks to its terminal."""

import os
from collections.abc import Iterable, Sequence

import jax
from ml_collections import FrozenConfigDict

from src.config import load as configuration
from src.config.key_help import TRAIN, Usage, help_for
from src.processes import start_distributed
from src.report.metrics import version
from src.step.compiler_flags import check_environment


def configured(
    argv: Sequence[str], usage: Usage = TRAIN, *, joins: bool = True, uses_weights: bool = False
) -> FrozenConfigDict | None:
    """The configuration of a command line, after which JAX may be used; None if it only asked for help.

    With `joins` this process is one of a job's, and JAX's devices are those of this machine. Without, JAX has not been
    started, and the environment's flags are the caller's to check: which of them will be read only it knows.
    `uses_weights` is `load`'s.

    Raises:
        UserError: a mistake in the command line, or with `joins` in the flags of the environment; or another process of
            the job has another configuration, code or packages.
        TransientError: another process of the job did not come.
    """
    if (help_text := help_for(argv, usage)) is not None:
        print(help_text)
        return None
    print(f"MinText {version()}", flush=True)
    notes: list[str] = []
    config = configuration.load(argv, notes, uses_weights=uses_weights)
    configure_jax(config)
    if joins:
        platforms = jax.config.jax_platforms  # empty: whichever JAX finds
        check_environment(uses_tpu=not platforms or "tpu" in platforms)
        start_distributed(config)
        say(notes)
    else:  # `say` would have JAX look for devices
        print("".join(f"{note}\n" for note in notes), end="", flush=True)
    return config


def configure_jax(config: FrozenConfigDict) -> None:
    """Settings of JAX that have to be made before it looks for devices or compiles anything."""
    jax.config.update("jax_default_matmul_precision", config.matmul_precision)
    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
    if (virtual_devices := jax.config.jax_num_cpu_devices) > 1:
        # XLA has as many threads as virtual CPU devices, and a collective takes one up until all devices are in it. If
        # some devices begin one of two independent collectives and some the other, none has a thread left to join in.
        os.environ.setdefault("PJRT_NPROC", str(4 * virtual_devices))


def printable(text: str) -> str:
    """The text with a mark for each character that a terminal would obey: a model of bytes says any of them."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def say(lines: Iterable[str]) -> None:
    """Prints lines, once a job."""
    if jax.process_index() == 0:
        for line in lines:
            print(line, flush=True)
