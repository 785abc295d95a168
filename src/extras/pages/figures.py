"""Computes the figures that pages show of a run."""

import math
import statistics
from collections.abc import Iterable

from src.extras.pages.history import History, Point
from src.run.metrics import duration, eval_key, eval_sets, perplexity


def key_figures(history: History) -> list[tuple[str, str]]:
    """Returns the names and values of a run's results; those without a finite value are left out."""
    figures = []
    train, evals = history.train, history.evals
    blocks = train["loss"].blocks()
    latest = blocks[-math.ceil(len(blocks) / 100) :]  # a mean over them, because one step's loss is noise
    if count := sum(block.count for block in latest):
        figures.append(
            ("Train loss, mean of the last 1% of steps", f"{sum(block.total for block in latest) / count:.4f}")
        )
    for name in eval_sets(evals):
        losses = evals[eval_key("eval_loss", name)]
        if losses.last is not None:
            of = f", {name}" if name else ""
            figures.append((f"Eval loss{of}", f"{losses.last:.4f}"))
            if (lowest := min(finite(losses.points()))) < losses.last:
                figures.append((f"Lowest eval loss{of}", f"{lowest:.4f}"))
            figures.append((f"Eval perplexity{of}", f"{perplexity(losses.last):.4g}"))
    if history.seconds:
        figures += [("Tokens", show_number(history.tokens)), ("Time in steps", duration(history.seconds))]
    for name, key, show in [
        ("Tokens per second", "tokens_per_second", show_number),
        ("TFLOP/s per device", "tflops_per_device", "{:.3g}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("MFU by PaLM's formula", "mfu_palm", "{:.1%}".format),
    ]:
        if values := finite(train[key].medians()):
            figures.append((name, show(statistics.median(values))))
    return figures


def finite(points: Iterable[Point]) -> list[float]:
    """Returns the values that are finite."""
    return [value for _, value in points if value is not None]


def show_number(number: float) -> str:
    """Formats 1.234, 567.8, then 1.23k, 45.6M, 7.89B, 1.23T."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.4g}"
