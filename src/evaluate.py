"""Measures losses, scores texts, computes logits or runs tasks: `python -m src.evaluate RUN_DIR`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/evaluation/evaluate.py with the command line `argv`."""
    from src.extras.evaluation.evaluate import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
