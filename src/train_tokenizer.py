"""Trains a SentencePiece tokenizer: `python -m src.train_tokenizer CONFIG tokenizer_path=OUT.model vocab_size=8000`."""

from collections.abc import Sequence

from src.system.exit_codes import run_command


def main(argv: Sequence[str]) -> object:
    """Calls `main` of src/extras/datasets/train_tokenizer.py with the command line `argv`."""
    from src.extras.datasets.train_tokenizer import main

    return main(argv)


if __name__ == "__main__":
    run_command(main)
