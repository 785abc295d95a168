"""Searches for the fastest mesh, remat policy and batch size that fit given devices: `python -m src.plan CONFIG`.

`python -m src.plan calibrate RUN_DIR ...` fits the predicted step times to finished runs.
"""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/plan/command.py with `argv`; returns its result, with exit code 3 if nothing fits."""
    from src.extras.plan.command import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
