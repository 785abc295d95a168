"""Converts Hugging Face model folders to checkpoints and back: `python -m src.convert from-hf HF_DIR OUT_DIR`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/hf/convert.py with the command line `argv`."""
    from src.extras.hf.convert import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
