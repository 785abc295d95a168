"""Defines errors that are reported by their message only, exit codes, and helpers to word and print messages."""

import difflib
import os
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from src import as_installed


class UserError(Exception):
    """Reports a user's mistake: what is wrong, what was expected, what to change."""


class Unsupported(UserError):
    """Reports that a model cannot run on this mesh, on these devices or with this kernel, though it may with others."""


class TransientError(Exception):
    """Reports a failure that may pass, such as a store that does not answer or a lost process."""


class MissingExtra(UserError, ModuleNotFoundError):
    """Reports that a file or folder of `src/extras/` is needed but has been deleted."""

    def __init__(self, module: str) -> None:
        names = module.split(".")[:3]
        folder = f"src/{'/'.join(names[1:])}"
        super().__init__(f"this needs {folder}, which is missing: restore it from git")
        self.name = module


# Exit codes.
FAULT = 1
MISTAKE = 2
TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h: schedulers can distinguish it from a mistake and a fault
INTERRUPTED = 130  # as shells report Ctrl-C
BROKEN_PIPE = 141  # as shells report SIGPIPE

# Unicode categories of characters that a terminal obeys: controls, direction marks, surrogates, line separators.
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
_HARMLESS = "\n\t\u200c\u200d\u00ad"  # includes the joiners of letters and emoji, and the soft hyphen
MAX_LISTED = 5  # the number of items that a message lists


def printable(text: str) -> str:
    """Replaces control characters by U+FFFD: any file or name may contain them, and a terminal would obey them."""
    return "".join("\ufffd" if unicodedata.category(x) in _OBEYED and x not in _HARMLESS else x for x in text)


def show(text: str, file: TextIO | None = None) -> None:
    """Prints text to `file` or stdout, without control characters, and with commands as `as_installed` spells them."""
    print(printable(as_installed(text)), file=file, flush=True)


def say(lines: Iterable[str]) -> None:
    """Prints lines, but only in process 0 of a job."""
    import jax

    # `process_index` makes JAX search for devices, which printing a line should not do.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        for line in lines:
            show(line)


def clipped(text: str, limit: int = 2000) -> str:
    """Replaces the middle of `text` by ` ... ` if it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit * 3 // 4]} ... {text[-limit // 4 :]}"


def first_few(items: Iterable[str], separator: str = ", ", near: str = "") -> str:
    """Joins the first five items, then "and 7 more" if there are more; `near`: put the most similar items first."""
    items = list(items)
    if near:
        items.sort(key=lambda item: difflib.SequenceMatcher(None, near, item).ratio(), reverse=True)
    listed, omitted = separator.join(items[:MAX_LISTED]), len(items) - MAX_LISTED
    return f"{listed}{' ' if separator == ', ' else separator}and {omitted} more" if omitted > 0 else listed


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Asks ` Did you mean ...?` with `name` if it is in `names`, else with up to four of them; "" if none is similar.

    These are the most similar ones, then names that contain `name`. `prefix`, such as a folder, is put before each
    name; it does not affect the similarity.
    """
    names = list(names)
    parts_of = [other for other in names if len(name) >= 3 and name in other]
    similar = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=3), *parts_of]))[:4]
    meant = [prefix + each for each in ([name] if name in names else similar)]
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def from_here(path: str | os.PathLike[str]) -> str:
    """Makes a path below the working directory relative to it, for suggested commands; returns others unchanged."""
    path = os.fspath(path)
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: "1 layer", "2,000 layers", "3 batches"."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}" + ending * (count != 1)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lists the keys whose values differ; a missing key counts as None."""
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]
