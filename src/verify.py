"""Checks a config and the code that it runs, at a small size before chips are rented: `python -m src.verify CONFIG`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/verify/command.py with `argv`; its report's exit code is 3 if a check failed."""
    from src.extras.verify.command import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
