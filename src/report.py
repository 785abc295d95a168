"""Writes report.html of one run, or a page that compares several: `python -m src.report RUN_DIR [RUN_DIR ...]`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/pages/comparison.py with the command line `argv`."""
    from src.extras.pages.comparison import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
