"""Runs a command by its name: `mintext train CONFIG key=value` is `python -m mintext.train CONFIG key=value`."""

import runpy
import sys

COMMANDS = (
    *("train", "train_compile", "train_dpo", "evaluate", "decode", "convert", "report"),
    *("inspect_data", "tokenize_dataset", "train_tokenizer"),
)


def main() -> None:
    """Runs the command that the first argument names, with the others."""
    if not sys.argv[1:] or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: mintext COMMAND ...\n\nCOMMAND is one of {', '.join(COMMANDS)}; with --help each says more.")
    sys.path.insert(0, "")  # as of `python -m`: where modules of the user are, which keys may name
    runpy.run_module(f"{__package__}.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
