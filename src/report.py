"""report.html: a run's curves, throughput, config and environment in one file that opens offline.

`python -m src.report RUN_DIR` writes it for any run's folder, a running one's too; `train.py` writes it at the end.
"""

import html
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from etils import epath

from src.charts import Point, Scale, Series, line_chart, running_median, show_number
from src.config_yaml import base, dump, literal, parse_keys
from src.errors import UserError, run_command
from src.metrics import duration, eval_key, eval_sets, perplexity

_TEMPLATE = Path(__file__).with_name("report_template.html")

Entry = Mapping[str, Any]  # a line of metrics.jsonl: numbers or None, and lists of such


def main(argv: Sequence[str]) -> None:
    """Writes RUN_DIR/report.html for the one argument RUN_DIR."""
    if len(argv) != 1:
        raise UserError("one argument was expected, a run's folder: python -m src.report runs/NAME")
    out_path = epath.Path(argv[0]) / "report.html"
    write_report(argv[0], out_path)
    print(f"wrote {out_path}")


def write_report(run_folder: epath.PathLike, out_path: epath.PathLike) -> None:
    """Reads metrics.jsonl, config.yml and, if it is there, environment.json of a run's folder; writes the page.

    Raises:
        UserError: the folder has no metrics.jsonl or no config.yml, or config.yml is malformed.
    """
    folder = epath.Path(run_folder)
    for name in ("metrics.jsonl", "config.yml"):
        if not (folder / name).exists():
            raise UserError(f"{folder} has no {name}: expected the folder of a run, such as runs/NAME")
    # The last line of a running run can be half written: it has no end yet.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    environment_path = folder / "environment.json"
    environment = json.loads(environment_path.read_text()) if environment_path.exists() else {}
    text = page(folder.name, entries, (folder / "config.yml").read_text(), environment)
    epath.Path(out_path).write_text(text)


def page(run_name: str, entries: Sequence[Entry], config_text: str, environment: Mapping[str, str]) -> str:
    """The whole page, from the lines of metrics.jsonl, the text of config.yml and `metrics.environment()`."""
    train = [entry for entry in entries if not eval_sets(entry)]
    evals = [entry for entry in entries if eval_sets(entry)]
    config = literal(parse_keys(config_text, "config.yml"))
    done = train[-1]["step"] if train else 0
    steps = config["steps"]
    changed = [
        (key, [dump(value), f"default {dump(base().defaults[key])}" if key in base().defaults else "not in base.yml"])
        for key, value in config.items()
        if key not in base().defaults or dump(value) != dump(base().defaults[key])
    ]
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(run_name),
        status=f"{'Finished,' if done >= steps else 'At'} step {done:,} of {steps:,}",
        percent=f"{100 * min(done / steps, 1):.1f}",
        figures="".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in key_figures(train, evals)),
        charts="\n".join(charts(train, evals)),
        changed=_table(changed),
        config=html.escape(config_text),
        environment=_table((name, [value]) for name, value in environment.items()),
    )


def _table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    cells = (
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f"<table>{''.join(cells)}</table>"


def key_figures(train: Sequence[Entry], evals: Sequence[Entry]) -> list[tuple[str, str]]:
    """The names and values that stand at the top of the page; what has no finite value is left out.

    The training loss is the mean of the last hundredth of the steps done, for one step's is noise. Tokens are the sum
    of tokens a second times seconds, so that a change of batch size in between is counted as it was.
    """
    figures = []
    if losses := _finite(train[-math.ceil(len(train) / 100) :], "loss"):
        figures.append(("Train loss", f"{statistics.fmean(losses):.4f}"))
    for name in eval_names(evals):
        if losses := _finite(evals, eval_key("eval_loss", name)):
            of = f", {html.escape(name)}" if name else ""
            figures.append((f"Eval loss{of}", f"{losses[-1]:.4f}"))
            if min(losses) < losses[-1]:
                figures.append((f"Lowest eval loss{of}", f"{min(losses):.4f}"))
            figures.append((f"Eval perplexity{of}", f"{perplexity(losses[-1]):.4g}"))
    if train:
        figures += [
            ("Tokens", show_number(sum(entry["tokens_per_second"] * entry["step_time_seconds"] for entry in train))),
            ("Time in steps", duration(sum(entry["step_time_seconds"] for entry in train))),
        ]
    for name, key, show in [
        ("Tokens a second", "tokens_per_second", show_number),
        ("TFLOP/s a device", "tflops_per_device", "{:.3g}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("MFU by PaLM's formula", "mfu_palm", "{:.1%}".format),
    ]:
        if values := _finite(train, key):
            figures.append((name, show(statistics.median(values))))
    return figures


def eval_names(evals: Sequence[Entry]) -> list[str]:
    """The names of the evaluation sets, in their order."""
    return list(dict.fromkeys(name for entry in evals for name in eval_sets(entry)))


def charts(train: Sequence[Entry], evals: Sequence[Entry]) -> list[str]:
    """The page's figures: loss, perplexity, learning rate, gradient norm, experts, speed; none of nulls alone."""
    if not train:
        return ['<p class="card">No step is recorded yet.</p>']
    figures = []
    for title, key in [("Loss", "loss"), ("Perplexity", "perplexity")]:
        series = _curve_and_median("train", train, key)
        for name in eval_names(evals):
            series.append(Series(f"eval {name}".strip(), "marked", _points(evals, eval_key(f"eval_{key}", name))))
        if _values(series):
            scale, note = settled_scale(series)
            figures.append(line_chart(title, note, series, scale, show_number))
    rate = [Series("", "line", _points(train, "learning_rate"))]
    figures.append(line_chart("Learning rate", "", rate, _linear(0, max(_values(rate))), "{:.3g}".format))
    norms = _curve_and_median("each step", train, "grad_norm")
    if values := _values(norms):
        figures.append(line_chart("Gradient norm", "", norms, _log_if_wide(values), show_number))
    figures += expert_charts(train)
    speed = _curve_and_median("each step", train, "tokens_per_second")
    figures.append(line_chart("Tokens a second", "", speed, _linear(0, max(_values(speed))), show_number))
    return figures


def expert_charts(train: Sequence[Entry]) -> list[str]:
    """The figures of a run with layers of experts: the greatest load, dropped choices if there are any, the loss."""
    loads, dropped = (
        _over_layers(train, "expert_load_max", max),
        _over_layers(train, "tokens_dropped", statistics.fmean),
    )
    figures = []
    for title, note, entries, key, show in [
        ("Busiest expert", "Its load over the mean, in the worst layer.", loads, "expert_load_max", show_number),
        ("Dropped choices", "Of all choices, the mean over layers.", dropped, "tokens_dropped", "{:.2%}".format),
        ("Load-balance loss", "Sum over layers: 1 a layer when even.", train, "load_balance_loss", show_number),
    ]:
        series = _curve_and_median("each step", entries, key)
        if any(values := _values(series)):
            figures.append(line_chart(title, note, series, _log_if_wide(values), show))
    return figures


def _over_layers(entries: Iterable[Entry], key: str, reduce: Callable[[Sequence[float]], float]) -> list[Entry]:
    """Of the entries that have a list of `key`, a number for each layer, one number; None where none is finite."""
    layers = [(entry["step"], [x for x in entry[key] if x is not None]) for entry in entries if key in entry]
    return [{"step": step, key: reduce(finite) if finite else None} for step, finite in layers]


def _curve_and_median(name: str, entries: Sequence[Entry], key: str) -> list[Series]:
    """A curve; of a long one, its steps in the background and their median, over a fiftieth of the run, before them."""
    points = _points(entries, key)
    width = 2 * (len(points) // 100) + 1
    if width < 5:
        return [Series(name, "line", points)]
    return [Series(name, "raw", points), Series(f"median of {width} steps", "line", running_median(points, width))]


def settled_scale(series: Sequence[Series]) -> tuple[Scale, str]:
    """The scale for a loss: linear, over what the run does after its first twentieth, without its highest spikes.

    The first steps' loss is that of guessing and would press the rest of the curve flat; the log of the steps would
    press the end of the run together instead. What is cut off is said in the note, which is returned too.
    """
    (first, _), (last, _) = series[0].points[0], series[0].points[-1]
    start = first + (last - first) / 20 if len(series[0].points) >= 20 else first
    values = _values(series)
    settled = sorted(value for each in series for step, value in each.points if value is not None and step >= start)
    settled = settled or sorted(values)
    low, high = min(values), settled[math.ceil(0.995 * len(settled)) - 1]
    if max(values) - low <= 1.5 * (high - low):
        return _linear(low, max(values)), ""
    above, count = sum(value > high for value in _values(series[:1])), len(series[0].points)
    return _linear(low, high), f"{above:,} of {count:,} steps lie above the chart, up to {show_number(max(values))}."


def _linear(low: float, high: float) -> Scale:
    """From low to high with a little room; a constant stands in the middle."""
    room = (high - low) / 20 or abs(high) / 2 or 1.0
    return Scale(low - room if low else 0.0, high + room)


def _log_if_wide(values: Sequence[float]) -> Scale:
    """Logarithmic where the values are positive and differ much, as the norms of a run with spikes do."""
    low, high = min(values), max(values)
    return Scale(low / 1.1, high * 1.1, log=True) if low > 0 and high > 5 * low else _linear(low, high)


def _points(entries: Iterable[Entry], key: str) -> list[Point]:
    return [(entry["step"], entry.get(key)) for entry in entries]


def _values(series: Iterable[Series]) -> list[float]:
    return [value for each in series for _, value in each.points if value is not None]


def _finite(entries: Iterable[Entry], key: str) -> list[float]:
    return [entry[key] for entry in entries if entry.get(key) is not None]


if __name__ == "__main__":
    run_command(main)
