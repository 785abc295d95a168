"""Runs a command by name: `mintext train CONFIG key=value` is `python -m mintext.train CONFIG key=value`."""

import runpy
import sys

from src.system.errors import MISTAKE, did_you_mean
from src.system.exit_codes import end

COMMANDS = (
    *("train", "train_compile", "train_dpo", "evaluate", "decode", "convert", "report"),
    *("inspect_data", "tokenize_dataset", "train_tokenizer", "verify", "plan"),
)
USAGE = f"usage: mintext COMMAND ...\n\nCOMMAND is one of {', '.join(COMMANDS)}; each explains itself with --help."


def main() -> None:
    """Runs the command named by the first argument with the others; exits with 2 if it is unknown or missing."""
    command = "".join(sys.argv[1:2])
    if command in ("-h", "--help"):
        return print(USAGE)
    if command not in COMMANDS:
        wrong = f"error: unknown command {command}.{did_you_mean(command, COMMANDS)}\n\n" if command else ""
        end(MISTAKE, wrong + USAGE)
    sys.path.insert(0, "")  # as `python -m` does, for users' modules that keys may name
    runpy.run_module(f"{__package__}.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
