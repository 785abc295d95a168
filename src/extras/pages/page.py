"""Renders report.html: a run's curves, throughput, config and environment in one file that opens offline.

A run writes it after evaluations and checkpoints, and at its end. A page contains its numbers as JSON, which charts.js
plots.
"""

import datetime
import functools
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from etils import epath

from src.checkpoint.run_folder import read_text
from src.config.schema import KEYS
from src.config.yaml import dump, literal, parse_keys
from src.extras.pages.history import Curve, History, Point, finite, key_figures
from src.run.environment import read_environment
from src.run.metrics import TRAIN_KEYS
from src.system.errors import UserError, counted

_FOLDER = Path(__file__).parent
_CHARTS = """<noscript><p class="card">The charts are drawn by JavaScript, which is off.</p></noscript>
<div class="grid-of-cards" id="charts"></div>
<p class="status">Drag over a chart to zoom in all of them, double-click to see the whole run.</p>"""


def page(folder: epath.Path, history: History) -> str:
    """Renders the page of the run in `folder`, from its metrics and its config.yml, environment.json and sample.txt.

    Raises UserError if config.yml or environment.json is malformed; OSError if one of them can't be read.
    """
    config_text = (folder / "config.yml").read_text()
    steps, unit, changed = _config(config_text)
    done = history.last_train.get("step", 0)
    status = f"{'Finished,' if done >= steps else 'At'} step {done:,} of {steps:,}"
    after, _, sample = (read_text(folder / "sample.txt") or "").partition("\n")
    figures = "".join(
        f"<div><span>{html.escape(name)}{unit and f', {unit}' if 'loss' in name else ''}</span><b>{value}</b></div>"
        for name, value in key_figures(history)
    )
    top = f"""<div class="bar"><div style="width: {100 * min(done / steps, 1):.1f}%"></div></div>
<div class="card figures">{figures}</div>"""
    if not history.last_train:
        top += '<p class="card">No step is recorded yet.</p>'
    sections = [
        card(f"Sample, {html.escape(after)}", f"<pre>{html.escape(sample)}</pre>") if sample else "",
        card("The run", table((name, str(value)) for name, value in read_environment(folder).items())),
        card(
            "Configuration",
            f"""<p class="status">Differences from base.yml</p>
{changed}
<details><summary>All of config.yml</summary><pre>{html.escape(config_text)}</pre></details>""",
        ),
    ]
    return whole_page({folder.name: history}, folder.name, status, top, sections, unit)


def whole_page(
    histories: Mapping[str, History], title: str, status: str, top: str, sections: Iterable[str], unit: str
) -> str:
    """Renders a page of HTML parts, with the charts of any number of runs, whose losses have this `unit`."""
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    invalid = [counted(run.invalid_lines, "line") for run in histories.values() if run.invalid_lines]
    left_out = [f" Left out: {lines} of metrics.jsonl without the metrics of a step." for lines in invalid]
    maps = [run.heat_maps() for run in histories.values()]
    data = {"runs": list(histories), "charts": charts(histories, unit), "maps": maps[0] if len(maps) == 1 else []}
    return Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        status=f"{status}; written <time>{written}</time>.{''.join(left_out)}",
        top=top,
        sections="\n".join(sections),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),  # no "</script>"
        charts=_CHARTS if histories else "",
        script=(_FOLDER / "charts.js").read_text(encoding="utf-8") if histories else "",
    )


def card(title: str, body: str) -> str:
    """Renders a part of a page with a heading; `title` and `body` are HTML."""
    return f'<section class="card"><h2>{title}</h2>\n{body}\n</section>'


@functools.lru_cache(maxsize=1)
def _config(text: str) -> tuple[int, str, str]:
    """Parses a config.yml: number of steps, unit of the loss, and a table of keys that differ from base.yml.

    Raises UserError if it is malformed.
    """
    config = literal(parse_keys(text, "config.yml"))
    steps = config.get("steps")
    if type(steps) is not int or steps < 1:
        raise UserError(f"config.yml: steps is {dump(steps)}; expected the number of the run's steps")
    return (
        steps,
        loss_unit(config),
        table(
            (key, dump(value), f"default {dump(KEYS[key].default)}" if key in KEYS else "not in base.yml")
            for key, value in config.items()
            if key not in KEYS or dump(value) != dump(KEYS[key].default)
        ),
    )


def loss_unit(keys: Mapping[str, Any]) -> str:
    """Returns the unit of a run's losses; empty if a user function computes them."""
    return "" if keys.get("loss") else "nats per token"


def table(rows: Iterable[Sequence[str]], head: str = "") -> str:
    """Renders a table of strings, whose first column has the rows' names; `head` is the HTML of a row above."""
    lines = (
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, *values in rows
    )
    return f"<table>{head}{''.join(lines)}</table>"


def charts(histories: Mapping[str, History], unit: str = "") -> list[dict[str, Any]]:
    """Builds the charts for charts.js: loss, perplexity, learning rate, gradient norm, experts, speed, others.

    `unit` is the losses' unit. A chart without values is left out. `scale` is "settled" (without the first steps and
    the highest spikes), "zero" (from zero), both, or "wide" (logarithmic if values vary widely). A series has its run's
    number and a kind: "train", "eval", or "noisy", which is plotted with a running median.
    """
    result, several = [], len(histories) > 1
    measured = [
        key
        for history in histories.values()
        for key in (*history.train, *(key.partition("/")[0].removeprefix("eval_") for key in history.evals))
    ]
    for title, key, scale, note in [
        ("Loss", "loss", "settled", f"{unit.capitalize()}." if unit else ""),
        ("Perplexity", "perplexity", "settled", ""),
        ("Learning rate", "learning_rate", "zero", ""),
        ("Gradient norm", "grad_norm", "wide", ""),
        ("Busiest expert", "expert_load_max", "wide", "Its load over the mean, in the worst layer."),
        ("Dropped choices", "tokens_dropped", "wide", "Fraction of all choices, mean over layers."),
        ("Load-balance loss", "load_balance_loss", "wide", "Sum over layers: 1 per layer when even."),
        ("Tokens per second", "tokens_per_second", "settled, zero", ""),
        *((key, key, "wide", "") for key in dict.fromkeys(measured) if key not in TRAIN_KEYS),
    ]:
        series = []
        for run, (name, history) in enumerate(histories.items()):
            kind = "train" if key == "learning_rate" else "noisy"
            series.append(_series(run, name if several else "train", kind, history.train[key]))
            for evaluated, curve in history.evals.items():
                metric, _, of = evaluated.partition("/")
                if metric == f"eval_{key}":
                    series.append(_series(run, f"{name if several else ''} eval {of}".strip(), "eval", curve))
        values = [value for each in series for value in finite(each["points"])]
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
