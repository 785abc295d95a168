"""Compiles the step for absent devices: `python -m src.train_compile CONFIG compile_topology=v5e-256`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Runs the command line `argv`, by src/extras/aot/train_compile.py."""
    from src.extras.aot.train_compile import main

    return main(argv)


def command(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code, 3 if the step does not fit."""
    from src.extras.aot.train_compile import command

    return command(argv)


if __name__ == "__main__":
    run_command(command)
