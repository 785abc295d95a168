"""Prints lines to the console, from one process of a job."""

from collections.abc import Iterable

from src.errors import show


def say(lines: Iterable[str]) -> None:
    """Prints lines, from one process of the job."""
    import jax

    # Which of its processes this is has JAX look for devices: no command does so for a line.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        for line in lines:
            show(line)
