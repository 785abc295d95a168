"""Shows the batches of a run as text and checks them: `python -m src.inspect_data CONFIG key=value`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/datasets/inspect_data.py with the command line `argv`."""
    from src.extras.datasets.inspect_data import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
