"""Prints to the console: lines of one process, and generated text without what a terminal would obey."""

from collections.abc import Iterable

from src import as_installed


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey and a model of bytes may generate, by U+FFFD."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def say(lines: Iterable[str]) -> None:
    """Prints lines, from one process of the job."""
    import jax

    if jax.process_index() == 0:
        for line in lines:
            print(as_installed(line), flush=True)
