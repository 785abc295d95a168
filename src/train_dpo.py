"""Trains a model on preference pairs: `python -m src.train_dpo CONFIG load_parameters_path=MODEL key=value`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/preferences/train_dpo.py with the command line `argv`."""
    from src.extras.preferences.train_dpo import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
