"""Generates text from a model: `python -m src.decode CONFIG.yml load_parameters_path=PATH prompt="..."`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/generation/decode.py with the command line `argv`."""
    from src.extras.generation.decode import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
