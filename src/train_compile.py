"""Compiles the train step for absent devices: `python -m src.train_compile CONFIG compile_topology=v5e-256`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/aot/train_compile.py with `argv`; returns its report, None for --help."""
    from src.extras.aot.train_compile import main

    return main(argv)


def command(argv: Sequence[str]) -> int:
    """Compiles like `main`, but returns the exit code: 3 if the step does not fit, else 0."""
    from src.extras.aot.train_compile import command

    return command(argv)


if __name__ == "__main__":
    run_command(command)
