"""Writes report.html: a run's curves, throughput, config and environment in one file that opens offline.

`python -m src.report RUN_DIR` writes it for any run's folder, of a running run too; a run itself writes it after
evaluations and checkpoints, and at its end. The page holds its numbers as JSON, which charts.js draws.
"""

import datetime
import functools
import html
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from etils import epath

from src.config.schema import KEYS
from src.config.yaml import dump, literal, parse_keys
from src.errors import UserError, counted
from src.json_text import parse_json
from src.report.history import Curve, History, Point
from src.report.metrics import TRAIN_KEYS, duration, eval_key, eval_sets, perplexity

_FOLDER = Path(__file__).parent
USAGE = """usage: python -m src.report RUN_DIR [OTHER_RUN_DIR ...]

Writes RUN_DIR/report.html from the metrics.jsonl and config.yml there: curves, throughput, configuration. RUN_DIR is a
run's folder, such as runs/NAME; one that is still running is shown as far as it has come. The curves of the other runs
are drawn beside its own."""


def main(argv: Sequence[str]) -> None:
    """Writes RUN_DIR/report.html, or prints the usage; raises UserError for what is no run's folder, or malformed."""
    if {"-h", "--help"}.intersection(argv):
        print(USAGE)
        return
    if not argv or any(argument.startswith("-") for argument in argv):
        raise UserError("one argument was expected, or several, runs' folders: python -m src.report runs/NAME")
    folders = [epath.Path(argument) for argument in argv]
    page_file = folders[0] / "report.html"
    try:
        histories = [_read_history(folder) for folder in folders]
        names = [folder.name for folder in folders]  # or as typed, where two have the same
        others = [name if names.count(name) == 1 else typed for name, typed in zip(names, argv, strict=True)][1:]
        page_file.write_text(page(folders[0], histories[0], dict(zip(others, histories[1:], strict=True))))
    except (OSError, ValueError, ArithmeticError) as error:  # such as a folder in a file's place, or absurd numbers
        raise UserError(f"cannot write {page_file}: {type(error).__name__}: {error}") from None
    print(f"wrote {page_file}")
    for history in histories:
        if history.invalid_lines:
            print(_invalid_lines(history))


def _read_history(folder: epath.Path) -> History:
    for name in ("metrics.jsonl", "config.yml"):
        if not (folder / name).exists():
            raise UserError(f"{folder} has no {name}: expected the folder of a run, such as runs/NAME")
    history = History()
    history.read(folder / "metrics.jsonl")
    return history


def page(folder: epath.Path, history: History, others: Mapping[str, History] | None = None) -> str:
    """Returns the page of the run in `folder`, from its metrics and its config.yml, environment.json and sample.txt.

    The metrics of `others`, by name, are drawn beside it. Raises UserError if config.yml or environment.json is
    malformed; OSError if one of them can't be read.
    """
    config_text = (folder / "config.yml").read_text()
    steps, changed = _config(config_text)
    done = history.last_train.get("step", 0)
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    status = [f"{'Finished,' if done >= steps else 'At'} step {done:,} of {steps:,}; written <time>{written}</time>."]
    if history.invalid_lines:
        status.append(_invalid_lines(history))
    after, _, sample = _read(folder / "sample.txt").partition("\n")
    histories = {folder.name: history, **(others or {})}
    data = {"runs": list(histories), "charts": charts(histories), "maps": history.heat_maps.maps()}
    return Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(folder.name),
        status=" ".join(status),
        percent=f"{100 * min(done / steps, 1):.1f}",
        figures="".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in key_figures(history)),
        nothing="" if history.last_train else '<p class="card">No step is recorded yet.</p>',
        sample=f"<h2>Sample, {html.escape(after)}</h2><pre>{html.escape(sample)}</pre>" if sample else "",
        facts=_table((name, str(value)) for name, value in _facts(folder / "environment.json").items()),
        changed=changed,
        config=html.escape(config_text),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),  # no "</script>"
        script=(_FOLDER / "charts.js").read_text(encoding="utf-8"),
    )


def _invalid_lines(history: History) -> str:
    return f"Left out: {counted(history.invalid_lines, 'line')} of metrics.jsonl without the metrics of a step."


def _read(file: epath.Path) -> str:
    return file.read_bytes().decode(errors="replace") if file.exists() else ""


def _facts(file: epath.Path) -> dict[str, str]:
    """Returns the content of environment.json."""
    try:
        facts = parse_json(_read(file) or "{}")
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}. Delete it: the page then goes without it") from None
    if not isinstance(facts, dict):
        raise UserError(f"{file} is no mapping of names to texts. Delete it: the page then goes without it")
    return facts


@functools.lru_cache(maxsize=1)
def _config(text: str) -> tuple[int, str]:
    """Returns the steps of a config.yml, and a table of the keys that differ from base.yml."""
    config = literal(parse_keys(text, "config.yml"))
    steps = config.get("steps")
    if type(steps) is not int or steps < 1:
        raise UserError(f"config.yml: steps is {dump(steps)}; expected the number of the run's steps")
    return steps, _table(
        (key, dump(value), f"default {dump(KEYS[key].default)}" if key in KEYS else "not in base.yml")
        for key, value in config.items()
        if key not in KEYS or dump(value) != dump(KEYS[key].default)
    )


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = (
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    return f"<table>{''.join(lines)}</table>"


def key_figures(history: History) -> list[tuple[str, str]]:
    """Returns the names and values at the top of the page; those without a finite value are left out."""
    figures = []
    train, evals = history.train, history.evals
    blocks = train["loss"].blocks()
    latest = blocks[-math.ceil(len(blocks) / 100) :]  # a mean over them, because one step's loss is noise
    if count := sum(block.count for block in latest):
        figures.append(("Train loss", f"{sum(block.total for block in latest) / count:.4f}"))
    for name in eval_sets(evals):
        losses = evals[eval_key("eval_loss", name)]
        if losses.last is not None:
            of = f", {html.escape(name)}" if name else ""
            figures.append((f"Eval loss{of}", f"{losses.last:.4f}"))
            if (lowest := min(_finite(losses.points()))) < losses.last:
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
        if values := _finite(train[key].medians()):
            figures.append((name, show(statistics.median(values))))
    return figures


def charts(histories: Mapping[str, History]) -> list[dict[str, Any]]:
    """Returns the charts that charts.js draws: loss, perplexity, learning rate, gradient norm, experts, speed.

    A chart without a value is left out. `scale` is "settled" (a loss, whose first steps are cut off), "zero" (from
    zero) or "wide" (logarithmic where values differ much). A series has the number of its run and a kind: "train",
    "eval", or "noisy" where a running median is to be drawn.
    """
    result = []
    own = dict.fromkeys(key for history in histories.values() for key in history.train if key not in TRAIN_KEYS)
    for title, key, scale, note in [
        ("Loss", "loss", "settled", ""),
        ("Perplexity", "perplexity", "settled", ""),
        ("Learning rate", "learning_rate", "zero", ""),
        ("Gradient norm", "grad_norm", "wide", ""),
        ("Busiest expert", "expert_load_max", "wide", "Its load over the mean, in the worst layer."),
        ("Dropped choices", "tokens_dropped", "wide", "Of all choices, the mean over layers."),
        ("Load-balance loss", "load_balance_loss", "wide", "Sum over layers: 1 per layer when even."),
        ("Tokens per second", "tokens_per_second", "zero", ""),
        *((key, key, "wide", "") for key in own),
    ]:
        series = []
        for run, (name, history) in enumerate(histories.items()):
            prefix = f"{name} " if len(histories) > 1 else ""
            kind = "train" if key == "learning_rate" else "noisy"
            series.append(_series(run, f"{prefix}train", kind, history.train[key]))
            if scale == "settled":
                series += [
                    _series(run, f"{prefix}eval {each}".strip(), "eval", history.evals[eval_key(f"eval_{key}", each)])
                    for each in eval_sets(history.evals)
                ]
        values = [value for each in series for value in _finite(each["points"])]
        if any(values) or (values and key in ("learning_rate", "grad_norm", "tokens_per_second")):
            percent = key == "tokens_dropped"
            series = [each for each in series if each["points"]]
            result.append({"title": title, "note": note, "scale": scale, "percent": percent, "series": series})
    return result


def _series(run: int, name: str, kind: str, curve: Curve) -> dict[str, Any]:
    series = {"run": run, "name": name, "kind": kind, "points": _rounded(curve.points())}
    if kind == "noisy" and curve.stride > 1:
        series["medians"] = _rounded(curve.medians())
    return series


def _rounded(points: Iterable[Point]) -> list[Point]:
    return [(step, value if value is None else float(f"{value:.6g}")) for step, value in points]


def _finite(points: Iterable[Point]) -> list[float]:
    return [value for _, value in points if value is not None]


def show_number(number: float) -> str:
    """Formats 1.234, 567.8, then 1.23k, 45.6M, 7.89B, 1.23T."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.4g}"
