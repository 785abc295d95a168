"""report.html: a run's curves, throughput, config and environment in one file that opens offline.

`python -m src.report RUN_DIR` writes it for any run's folder, a running one's too; a run writes it at its evaluations
and checkpoints, and at its end.
"""

import datetime
import functools
import html
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template

from etils import epath

from src.config.yaml import base, dump, literal, parse_keys
from src.errors import UserError, counted
from src.json_text import parse_json
from src.report.charts import Curve, Point, Scale, Series, line_chart, running_median, show_number
from src.report.metrics import Entry, duration, eval_key, eval_sets, perplexity, read_entry

_TEMPLATE = Path(__file__).with_name("report_template.html")
USAGE = """usage: python -m src.report RUN_DIR

Writes RUN_DIR/report.html from the metrics.jsonl and config.yml there: curves, throughput, configuration. RUN_DIR is a
run's folder, such as runs/NAME; one that is still running is shown as far as it has come."""


def main(argv: Sequence[str]) -> None:
    """Writes RUN_DIR/report.html for the one argument RUN_DIR; prints how it is used for --help.

    Raises:
        UserError: the argument is no run's folder, one of its files is malformed, or the page can't be written.
    """
    if {"-h", "--help"}.intersection(argv):
        print(USAGE)
        return
    if len(argv) != 1:
        raise UserError("one argument was expected, a run's folder: python -m src.report runs/NAME")
    folder = epath.Path(argv[0])
    try:
        for name in ("metrics.jsonl", "config.yml"):
            if not (folder / name).exists():
                raise UserError(f"{folder} has no {name}: expected the folder of a run, such as runs/NAME")
        history = History()
        history.read(folder / "metrics.jsonl")
        (folder / "report.html").write_text(page(folder, history))
    except (OSError, ValueError, ArithmeticError) as error:  # such as a folder in a file's place, or absurd numbers
        raise UserError(f"cannot write {folder / 'report.html'}: {type(error).__name__}: {error}") from None
    print(f"wrote {folder / 'report.html'}")
    if history.others:
        print(_other_lines(history))


class History:
    """What a run's page shows of metrics.jsonl; however long the run, it takes the memory of a few thousand steps.

    Attributes:
        train: the curves of training lines by their keys; of what each layer has a number for, one number.
        evals: those of evaluations.
        last_train, last_eval: the last line of each kind; empty before there is one.
        tokens, seconds: of all steps.
        others: how many lines were no metrics of a step.
    """

    def __init__(self) -> None:
        self.train: dict[str, Curve] = defaultdict(Curve)
        self.evals: dict[str, Curve] = defaultdict(Curve)
        self.last_train: Entry = {}
        self.last_eval: Entry = {}
        self.tokens = self.seconds = 0.0
        self.others = 0
        self._bytes_read = 0

    def read(self, metrics: epath.PathLike) -> None:
        """Adds the lines of metrics.jsonl that have been written since the last call, but for a torn last one."""
        with epath.Path(metrics).open("rb") as file:
            file.seek(self._bytes_read)
            while lines := file.readlines(2**20):
                whole = [line for line in lines if line.endswith(b"\n")]  # the last one may be being written
                self._bytes_read += sum(map(len, whole))
                entries = [read_entry(line) for line in whole]
                self.others += entries.count(None)
                self.add([entry for entry in entries if entry is not None])
                if len(whole) < len(lines):  # its rest may be there by now, and would be read as a line
                    break

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds lines."""
        train = []
        for entry in entries:
            if "loss" in entry:
                train.append(entry)
            elif keys := [key for key in entry if key.startswith("eval_")]:
                self.last_eval = entry
                for key in keys:
                    self.evals[key].extend([(entry["step"], entry[key])])
        if not train:
            return
        self.last_train = train[-1]
        for key in _DRAWN:
            self.train[key].extend([(entry["step"], entry.get(key)) for entry in train])
        for key, reduce in _OVER_LAYERS.items():
            finite = [(entry["step"], [x for x in entry[key] if x is not None]) for entry in train if key in entry]
            self.train[key].extend([(step, reduce(values) if values else None) for step, values in finite])
        times = [(entry.get("step_time_seconds") or 0.0, entry.get("tokens_per_second") or 0.0) for entry in train]
        self.seconds += sum(seconds for seconds, _ in times)
        self.tokens += sum(seconds * rate for seconds, rate in times)  # of each step's own batch size


_DRAWN = (
    *("loss", "perplexity", "load_balance_loss", "grad_norm", "learning_rate"),
    *("tokens_per_second", "tflops_per_device", "mfu", "mfu_palm"),
)
_OVER_LAYERS: dict[str, Callable[[Sequence[float]], float]] = {
    "expert_load_max": max,
    "tokens_dropped": statistics.fmean,
}


def page(folder: epath.Path, history: History) -> str:
    """The whole page of the run in `folder`, from its metrics and its config.yml, environment.json and sample.txt.

    Raises:
        UserError: config.yml or environment.json is malformed.
        OSError: one of them can't be read.
    """
    config_text = (folder / "config.yml").read_text()
    steps, changed = _config(config_text)
    done = history.last_train.get("step", 0)
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    status = [f"{'Finished,' if done >= steps else 'At'} step {done:,} of {steps:,}; written <time>{written}</time>."]
    if history.others:
        status.append(_other_lines(history))
    after, _, sample = _read(folder / "sample.txt").partition("\n")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(folder.name),
        status=" ".join(status),
        percent=f"{100 * min(done / steps, 1):.1f}",
        figures="".join(f"<div><span>{name}</span><b>{value}</b></div>" for name, value in key_figures(history)),
        charts="\n".join(charts(history)),
        sample=f"<h2>Sample, {html.escape(after)}</h2><pre>{html.escape(sample)}</pre>" if sample else "",
        facts=_table((name, [str(value)]) for name, value in _facts(folder / "environment.json").items()),
        changed=changed,
        config=html.escape(config_text),
    )


def _other_lines(history: History) -> str:
    return f"Left out: {counted(history.others, 'line')} of metrics.jsonl without the metrics of a step."


def _read(file: epath.Path) -> str:
    """The text of a file; empty where there is none."""
    return file.read_bytes().decode(errors="replace") if file.exists() else ""


def _facts(file: epath.Path) -> dict[str, str]:
    """What environment.json says of a run, by name."""
    try:
        facts = parse_json(_read(file) or "{}")
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}. Delete it: the page then goes without it") from None
    if not isinstance(facts, dict):
        raise UserError(f"{file} is no mapping of names to texts. Delete it: the page then goes without it")
    return facts


@functools.lru_cache(maxsize=1)
def _config(text: str) -> tuple[int, str]:
    """The steps of a config.yml, and a table of what it has otherwise than base.yml."""
    config = literal(parse_keys(text, "config.yml"))
    steps = config.get("steps")
    if type(steps) is not int or steps < 1:
        raise UserError(f"config.yml: steps is {dump(steps)}; expected the number of the run's steps")
    return steps, _table(
        (key, [dump(value), f"default {dump(base().defaults[key])}" if key in base().defaults else "not in base.yml"])
        for key, value in config.items()
        if key not in base().defaults or dump(value) != dump(base().defaults[key])
    )


def _table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    cells = (
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f"<table>{''.join(cells)}</table>"


def key_figures(history: History) -> list[tuple[str, str]]:
    """The names and values that stand at the top of the page; what has no finite value is left out.

    The training loss is the mean of the last hundredth of the steps done, for one step's is noise.
    """
    figures = []
    train, evals = history.train, history.evals
    blocks = train["loss"].blocks()
    latest = blocks[-math.ceil(len(blocks) / 100) :]
    if count := sum(block.count for block in latest):
        figures.append(("Train loss", f"{sum(block.total for block in latest) / count:.4f}"))
    for name in eval_names(history):
        losses = evals[eval_key("eval_loss", name)]
        if losses.last is not None:
            of = f", {html.escape(name)}" if name else ""
            figures.append((f"Eval loss{of}", f"{losses.last:.4f}"))
            if (lowest := min(_values(losses.points()))) < losses.last:
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
        if values := _values(train[key].medians()):
            figures.append((name, show(statistics.median(values))))
    return figures


def eval_names(history: History) -> list[str]:
    """The names of the evaluation sets, in their order."""
    return list(eval_sets(history.evals))


def charts(history: History) -> list[str]:
    """The page's figures: loss, perplexity, learning rate, gradient norm, experts, speed; none of nulls alone."""
    train = history.train
    if not history.last_train:
        return ['<p class="card">No step is recorded yet.</p>']
    figures = []
    for title, key in [("Loss", "loss"), ("Perplexity", "perplexity")]:
        series = _curve_and_median("train", train[key])
        for name in eval_names(history):
            points = history.evals[eval_key(f"eval_{key}", name)].points()
            series.append(Series(f"eval {name}".strip(), "marked", points))
        if any(_values(each.points) for each in series):
            scale, note = settled_scale(series)
            figures.append(line_chart(title, note, series, scale, show_number))
    for title, note, name, key, scale_of, show in [
        ("Learning rate", "", "", "learning_rate", _from_zero, "{:.3g}".format),
        ("Gradient norm", "", "each step", "grad_norm", _log_if_wide, show_number),
        ("Busiest expert", "Its load over the mean, in the worst layer.", "each step", "expert_load_max", _log_if_wide,
         show_number),
        ("Dropped choices", "Of all choices, the mean over layers.", "each step", "tokens_dropped", _log_if_wide,
         "{:.2%}".format),
        ("Load-balance loss", "Sum over layers: 1 per layer when even.", "each step", "load_balance_loss", _log_if_wide,
         show_number),
        ("Tokens per second", "", "each step", "tokens_per_second", _from_zero, show_number),
    ]:  # fmt: skip
        curve = train[key]
        series = _curve_and_median(name, curve) if name else [Series(name, "line", curve.points())]
        values = _values(series[0].points)
        if any(values) or (values and key in _ALWAYS):
            figures.append(line_chart(title, note, series, scale_of(values), show))
    return figures


_ALWAYS = ("learning_rate", "grad_norm", "tokens_per_second")  # drawn though they be zero all along


def _curve_and_median(name: str, curve: Curve) -> list[Series]:
    """A curve; of a long one, its steps in the background and their median, over a fiftieth of the run, before them."""
    medians = curve.medians()
    width = 2 * (len(medians) // 100) + 1
    if width < 5:
        return [Series(name, "line", curve.points())]
    title = f"median of {width * curve.stride:,} steps"
    return [Series(name, "raw", curve.points()), Series(title, "line", running_median(medians, width))]


def settled_scale(series: Sequence[Series]) -> tuple[Scale, str]:
    """The scale for a loss: linear, over what the run does after its first twentieth, without its highest spikes.

    The first steps' loss is that of guessing and would press the rest of the curve flat; the log of the steps would
    press the end of the run together instead. What is cut off is said in the note, which is returned too.
    """
    (first, _), (last, _) = series[0].points[0], series[0].points[-1]
    start = first + (last - first) / 20 if len(series[0].points) >= 20 else first
    points = [point for each in series for point in each.points if point[1] is not None]
    values = [value for _, value in points]
    settled = sorted(value for step, value in points if step >= start) or sorted(values)
    low, high = min(values), settled[math.ceil(0.995 * len(settled)) - 1]
    if max(values) - low <= 1.5 * (high - low):
        return _linear(low, max(values)), ""
    above, count = sum(value > high for value in _values(series[0].points)), len(series[0].points)
    return _linear(low, high), f"{above:,} of {count:,} points lie above the chart, up to {show_number(max(values))}."


def _linear(low: float, high: float) -> Scale:
    """From low to high with a little room; a constant stands in the middle."""
    room = (high - low) / 20 or abs(high) / 2 or 1.0
    return Scale(low - room if low else 0.0, high + room)


def _from_zero(values: Sequence[float]) -> Scale:
    return _linear(0, max(values))


def _log_if_wide(values: Sequence[float]) -> Scale:
    """Logarithmic where the values are positive and differ much, as the norms of a run with spikes do."""
    low, high = min(values), max(values)
    return Scale(low / 1.1, high * 1.1, log=True) if low > 0 and high > 5 * low else _linear(low, high)


def _values(points: Iterable[Point]) -> list[float]:
    return [value for _, value in points if value is not None]
