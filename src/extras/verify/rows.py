"""Rows of a report: what a check compared, and how that came out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from src.system.errors import Unsupported, UserError

PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"


class Row(NamedTuple):
    """The outcome of one comparison."""

    name: str  # what was compared
    status: str  # PASS, FAIL or NOT_APPLICABLE
    figure: float | None = None  # the error, or the number of wrong things
    bound: float | None = None  # the largest figure that passes
    note: str = ""  # why it does not apply, or where and how it differs
    check: str = ""  # letter; the command fills it in


class NotApplicable(UserError):
    """Reports that the model, or these small batches, lack what a whole check needs."""


def not_applicable(name: str, why: str | Exception) -> Row:
    """A row for a comparison that does not apply, and why: the model lacks something, or refuses a mesh."""
    return Row(name, NOT_APPLICABLE, note=first_line(why))


def unless_refused(name: str, find: Callable[[], Row], required: bool = False) -> Row:
    """Returns `find()`; if that raises Unsupported, a row that is not applicable, or fails if running is `required`."""
    try:
        return find()
    except Unsupported as error:
        return Row(name, FAIL if required else NOT_APPLICABLE, note=first_line(error))


def verdict(name: str, figure: float, bound: float, note: str = "", failure: str = "") -> Row:
    """A row that passes if the figure is at most its bound; NaN fails. A failed row has the note `failure`, if any."""
    figure = float(np.nan_to_num(figure, nan=np.inf))
    return Row(name, PASS, figure, bound, note) if figure <= bound else Row(name, FAIL, figure, bound, failure or note)


def none_of(name: str, wrong: Sequence[str], note: str = "") -> Row:
    """A row that passes if nothing is wrong, and names the first thing that is."""
    return verdict(name, len(wrong), 0, note, f"the first: {wrong[0]}" if wrong else "")


def worst(name: str, figures: Mapping[str, float], bound: float, note: str = "", otherwise: str = "") -> Row:
    """A row with the largest of the weights' `figures`, which passes up to `bound`; a failed row names wrong weights.

    If `figures` is empty, the row is not applicable, for the reason `otherwise`.
    """
    if not figures:
        return not_applicable(name, otherwise)
    path, wrong = largest(figures), [path for path, figure in figures.items() if not figure <= bound]
    failure = f"{path}; {len(wrong)} of {len(figures)} weights are wrong: {', '.join(wrong[:12])}"
    return verdict(name, figures[path], bound, note, failure)


def largest(figures: Mapping[Any, float]) -> Any:
    """The key of the largest figure; a NaN counts as the largest."""
    return max(figures, key=lambda key: np.nan_to_num(figures[key], nan=np.inf))


def attempted(find: Callable[[], str]) -> str:
    """Returns the text of `find`, which locates a failure; if it raises, describes that error instead of raising it."""
    try:
        return find()
    except Exception as error:
        return f"its place was not found: {type(error).__name__}: {first_line(error)}"


def first_line(text: str | BaseException) -> str:
    """The first line of a message that is not blank, with the next one if it ends with a colon."""
    lines = [line.strip(" *") for line in str(text).splitlines() if line.strip()] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def mesh_name(sizes: Mapping[str, int]) -> str:
    """Names a mesh, such as `mesh data 2 x tensor 2`."""
    return "mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items())
