"""Tokenizes documents and writes their ids: `python -m src.tokenize_dataset CONFIG tokenized_path=FOLDER`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/datasets/tokenize_dataset.py with the command line `argv`."""
    from src.extras.datasets.tokenize_dataset import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
