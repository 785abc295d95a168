"""Defines the errors whose message is all that a user needs, exit codes, and how messages are worded and printed."""

import difflib
import os
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from src import as_installed


class UserError(Exception):
    """Reports a user's mistake: what is wrong, what was expected, what to change."""


class TransientError(Exception):
    """Reports a failure that may pass, such as a store that does not answer or a lost process."""


class MissingExtra(UserError, ModuleNotFoundError):
    """Reports that a folder of `src/extras/` has been deleted, and is needed."""

    def __init__(self, module: str) -> None:
        names = module.split(".")[:3]
        folder = f"src/{'/'.join(names[1:])}"
        super().__init__(f"this needs {folder}, which is not here: restore it from git")


# Exit codes.
FAULT = 1
MISTAKE = 2
TRY_AGAIN = 75  # sysexits.h, EX_TEMPFAIL: schedulers tell it from a mistake and a fault
INTERRUPTED = 130  # as shells report Ctrl-C
BROKEN_PIPE = 141  # as shells report SIGPIPE

# Categories of characters that a terminal obeys: controls, marks of direction, surrogates, separators of lines.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
_HARMLESS = "\n\t\u200c\u200d\u00ad"  # joiners of letters and of emoji, and the soft hyphen, among them
MAX_LISTED = 5  # items of a list in a message


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey and which any file or name may contain, by U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(x) in _OBEYED and x not in _HARMLESS else x for x in text)


def show(text: str, file: TextIO | None = None) -> None:
    """Prints a line or several for the user, to `file` or the output, as a terminal may show it."""
    print(printable(as_installed(text)), file=file, flush=True)


def say(lines: Iterable[str]) -> None:
    """Prints lines, from one process of the job."""
    import jax

    # Which of its processes this is has JAX look for devices: no command does so for a line.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        for line in lines:
            show(line)


def clipped(text: str, limit: int = 2000) -> str:
    """Returns `text` without its middle where it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit * 3 // 4]} ... {text[-limit // 4 :]}"


def first_few(items: Iterable[str], separator: str = ", ", near: str = "") -> str:
    """Returns the first five of a list, "and 7 more" if it has more; with `near`, those most similar to it first."""
    items = list(items)
    if near:
        items.sort(key=lambda item: difflib.SequenceMatcher(None, near, item).ratio(), reverse=True)
    listed, omitted = separator.join(items[:MAX_LISTED]), len(items) - MAX_LISTED
    return f"{listed}{' ' if separator == ', ' else separator}and {omitted} more" if omitted > 0 else listed


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns ` Did you mean ...?` with the most similar of `names`, then those it is a part of; or "".

    Each has `prefix` before it, such as a folder, which makes no name more similar.
    """
    names = list(names)
    parts_of = [other for other in names if len(name) >= 3 and name in other]
    similar = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=3), *parts_of]))[:4]
    meant = [prefix + each for each in ([name] if name in names else similar)]
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def from_here(path: str | os.PathLike[str]) -> str:
    """Returns a path, such as of a command to type, relative to the working directory if it is below it."""
    path = os.fspath(path)
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def counted(count: int, noun: str) -> str:
    """Returns "1 layer", "2,000 layers": a number and what it counts."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values differ; one that is missing has the value None."""
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]
