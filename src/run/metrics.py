"""Writes a run's metrics: metrics.jsonl, TensorBoard, and lines on the console."""

import importlib.util
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from src.system.disk import names
from src.system.errors import counted, printable, show
from src.system.json_text import parse_json

# The keys of a train line of metrics.jsonl, in order (docs/metrics.md explains each). mfu and mfu_palm need a device
# whose peak rate is known, the losses of experts and MTP a model that has them, `conversations_cut` needs `use_sft`,
# and `updates_skipped` needs `skip_step_on_spikes`. An eval line has `step`, EVAL_KEYS and the metrics of
# `eval_metrics` and `decode_metrics`, with /NAME appended for a named set; `ema_decay` adds `eval_ema_loss`. The k-th
# train line describes update k, counted from 1.
TRAIN_KEYS = (
    *("step", "loss", "perplexity", "load_balance_loss", "router_z_loss", "expert_load_max", "tokens_dropped"),
    *("mtp_loss", "conversations_cut", "grad_norm", "updates_skipped", "learning_rate", "step_time_seconds"),
    *("data_wait_seconds", "tokens_per_second", "tflops_per_device", "mfu", "mfu_palm"),
)
EVAL_KEYS = ("eval_loss", "eval_perplexity")
# Lists with a number for each layer of experts, and the function that reduces one to a point of a curve.
PER_LAYER: dict[str, Callable[[Sequence[float]], float]] = {"expert_load_max": max, "tokens_dropped": statistics.fmean}
# Prefixes of the keys that `log_internals` adds: lists with a number per layer, or with one number for a weight that is
# not stacked over layers.
INTERNALS = ("activation_rms", "weight_norm/", "gradient_norm/", "update_norm/")
Entry = Mapping[str, Any]  # a line of metrics.jsonl: numbers, None for one that is not finite, and lists of these


def perplexity(loss: float) -> float:
    """Computes exp(loss) of a loss in nats per token; infinity if that overflows a float."""
    return math.inf if loss > 709 else math.exp(loss)


def read_entry(line: bytes) -> Entry | None:
    """Parses a line of metrics.jsonl; returns None if it is not JSON, or has no `step`, or values of wrong types."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or not 0 <= entry["step"] < 2**53:
        return None
    for key, value in entry.items():
        is_list = key in PER_LAYER or key.startswith(INTERNALS)
        if is_list != isinstance(value, list) or not all(map(_is_number, value if is_list else [value])):
            return None
    return entry


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard scalars, each step once even if the run is interrupted and resumed.

    A metric with a value per layer is a list in metrics.jsonl and three scalars in TensorBoard. A number that is not
    finite becomes null in metrics.jsonl, because JSON has no NaN, and is left out of TensorBoard.
    """

    def __init__(
        self, path: Path, tensorboard_dir: Path, resume_step: int | None, evaluates_again: bool = False
    ) -> None:
        """Opens `path`, metrics.jsonl, and a new file in `tensorboard_dir`, both on a local disk.

        Deletes the lines after `resume_step`, or all lines if it is None, for a new run. `evaluates_again` also deletes
        the evaluation of that step, which will be written again.
        """
        # Imported here because it takes 0.4 s, and in parts because the whole package imports PyTorch, if that is
        # installed, in 2 s. Its SummaryWriter would wait forever for its thread, which fails on a full disk.
        spec = importlib.util.find_spec("tensorboardX")
        assert spec
        empty = importlib.util.module_from_spec(spec)
        module = sys.modules.setdefault("tensorboardX", empty)
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import Summary, scalar
        finally:
            if module is empty:
                del sys.modules["tensorboardX"]

        if resume_step is not None and path.exists() and (invalid := _cut_back(path, resume_step, evaluates_again)):
            show(f"{path.name}: removed {counted(invalid, 'line')} without a step's metrics from its end")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("w+" if resume_step is None else "a+", encoding="utf-8")
        tensorboard_dir.mkdir(parents=True, exist_ok=True)
        # The file's name has a time in seconds: without a suffix, another start in the same second would overwrite it.
        self._tensorboard = EventsWriter(str(tensorboard_dir / "events"), f".{time.time_ns()}")
        self._event, self._summary, self._scalar = Event, Summary, scalar
        first_step = 0 if resume_step is None else resume_step + 1  # TensorBoard drops later points of earlier starts
        start = SessionLog(status=SessionLog.START)
        self._tensorboard.write_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, entry: Entry) -> None:
        """Adds the line of a step, an evaluation or internals to metrics.jsonl, and its scalars to TensorBoard.

        `entry` has `step` and metrics; those in TRAIN_KEYS and EVAL_KEYS are written first, in this order.
        """
        places = {key: place for place, key in enumerate(TRAIN_KEYS + EVAL_KEYS)}
        ordered = sorted(entry, key=lambda key: places.get(key, len(places)))
        finite = {key: _or_null(entry[key]) for key in ordered}
        if not names(self._path, self._file):
            self._open_again(entry["step"])
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        summary = self._summary(
            value=[value for each in scalars(finite).items() for value in self._scalar(*each).value]
        )
        self._tensorboard.write_event(self._event(wall_time=time.time(), step=entry["step"], summary=summary))

    def _open_again(self, step: int) -> None:
        """Continues in the new file if metrics.jsonl was replaced; writes all lines again if it was deleted."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._file as before:
            self._file = self._path.open("a+", encoding="utf-8")
            is_there = self._file.tell() > 0
            if not is_there:
                before.seek(0)
                shutil.copyfileobj(before, self._file)
        done = "replaced: further lines are added to the new file" if is_there else "deleted: it is written again"
        show(f"step {step}: {self._path} was {done}")

    def flush(self) -> None:
        """Forces all lines to disk. Call it before saving a checkpoint, so that no step up to it can be missing."""
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        self._tensorboard.close()


def scalars(entry: Entry) -> dict[str, float]:
    """Converts a line to scalars for TensorBoard and trackers: its numbers, and the min, mean and max of each list."""
    shown: dict[str, float] = {}
    for key, value in entry.items():
        name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
        if isinstance(value, list):
            finite = [each for each in value if each is not None]
            reductions = {"min": min, "mean": statistics.fmean, "max": max} if finite else {}
            shown |= {f"{name}/{reduction}": reduce(finite) for reduction, reduce in reductions.items()}
        elif value is not None and key != "step":
            shown[name] = value
    return shown


def _or_null(value: float | list[float]) -> Any:
    if isinstance(value, list):
        return [_or_null(each) for each in value]
    return value if math.isfinite(value) else None


def _cut_back(path: Path, step: int, evaluates_again: bool) -> int:
    """Truncates metrics.jsonl after its last line up to `step`; returns how many of the removed lines were invalid."""
    until = (step, not evaluates_again)  # an evaluation comes after the other lines of its step
    invalid = 0
    lines = path.read_bytes()
    end = lines.rfind(b"\n") + 1
    while end:
        begin = lines.rfind(b"\n", 0, end - 1) + 1
        entry = read_entry(lines[begin:end])
        if entry and (entry["step"], bool(eval_sets(entry))) <= until:
            break
        invalid += entry is None
        end = begin
    os.truncate(path, end)
    return invalid


class _Output(Console):
    """Leaves a closed output to `run_command`, because rich would exit with a different code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class StepPrinter:
    """Prints an aligned line per step, with the remaining time; on a terminal, above a progress bar.

    `steps` is the run's total, and `done` the number of steps before this start. A line is printed every `log_period`
    steps and for the first and last; with `quiet` only for the last, without a bar. The remaining time is proportional
    to the rows left: `rows_before(n)` returns the rows of the first n steps, in any unit.
    """

    def __init__(
        self,
        steps: int,
        done: int = 0,
        log_period: int = 1,
        quiet: bool = False,
        rows_before: Callable[[int], int] = int,
    ) -> None:
        self._steps, self._first_step, self._log_period, self._quiet = steps, done + 1, log_period, quiet
        self._rows_before, self._clock, self._first_time = rows_before, time.monotonic, math.nan
        # Ask the stream itself: rich would also draw a bar in a notebook, and in a log if FORCE_COLOR is set.
        terminal = sys.stdout.isatty()
        self._console = _Output(
            force_terminal=terminal, force_jupyter=False, highlight=False, markup=False, soft_wrap=True
        )
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), console=self._console, auto_refresh=False, disable=quiet or not terminal
        )
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def train(self, entry: Entry) -> None:
        """Advances the bar, and prints the step's line if due (see the class). Call it for each step, in order."""
        step = int(entry["step"])
        if step == self._first_step:
            self._first_time = self._clock()
        self._bar.update(self._task, completed=step, refresh=True)
        periodic = step % self._log_period == 0 or step == self._first_step
        if step == self._steps or (periodic and not self._quiet):
            seconds_left = None
            if step > self._first_step:  # by the pace since the first step's end: that one compiled
                first, now, end = map(self._rows_before, (self._first_step, step, self._steps))
                seconds_left = (self._clock() - self._first_time) / (now - first) * (end - now)
            self._console.print(train_line(entry, self._steps, seconds_left))

    def evaluation(self, entry: Mapping[str, int | float]) -> None:
        """Prints the lines of an evaluation; with `quiet`, only of the one after the last step.

        `entry` has `step`, and EVAL_KEYS and other metrics of each set, named by `eval_key`.
        """
        if entry["step"] == self._steps or not self._quiet:
            self._console.print(eval_line(entry, self._steps))

    def say(self, line: str) -> None:
        """Prints any other line, above the bar."""
        self._console.print(printable(line))


def train_line(entry: Entry, steps: int, seconds_left: float | None) -> str:
    """Formats a step's metrics in columns of constant width; for experts, it shows the worst layer.

    `steps` is the run's total. `seconds_left`: the estimated time to its end; None: not shown.
    """
    grad_norm, seconds = entry["grad_norm"], entry["step_time_seconds"]
    columns = [
        _step_column(entry, steps),
        f"loss {_figure(entry['loss'], '7.4f')}",
        f"grad {_figure(grad_norm, '7.3f' if grad_norm < 1000 else '7.1e')}",
        f"lr {entry['learning_rate']:.2e}",
        f"{seconds:6.2f} s" if seconds >= 0.1 else f"{1000 * seconds:5.1f} ms",
        f"{entry['tokens_per_second']:>9,.0f} tok/s",
    ]
    if "expert_load_max" in entry:
        columns.append(f"load {max(entry['expert_load_max']):.1f}x")
        if any(entry["tokens_dropped"]):
            columns.append(f"dropped {100 * max(entry['tokens_dropped']):.1f}%")
    if "mfu" in entry:
        columns.append(f"MFU {100 * entry['mfu']:4.1f}%")
    if seconds_left is not None:
        columns.append(f"ETA {duration(seconds_left)}")
    return "  ".join(columns)


def _figure(value: float, form: str) -> str:
    return f"{'null':>7}" if math.isnan(value) else format(value, form)


def eval_sets(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups the metrics of an evaluation by the name of their set, which is "" for an unnamed set."""
    sets: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        if key.startswith("eval_"):
            metric, _, name = key.partition("/")
            sets.setdefault(name, {})[metric] = value
    return sets


def eval_key(metric: str, name: str) -> str:
    """Appends the name of an evaluation set to a metric: `eval_loss/books`."""
    return f"{metric}/{name}" if name else metric


def eval_line(entry: Mapping[str, int | float], steps: int) -> str:
    """Formats an evaluation's metrics, a line for each set, with losses in the column of training losses."""
    lines = []
    for name, metrics in eval_sets(entry).items():
        extra = "".join(f"  {key.removeprefix('eval_')} {metrics[key]:.4f}" for key in metrics if key not in EVAL_KEYS)
        loss = f"eval {metrics['eval_loss']:7.4f}  perplexity {metrics['eval_perplexity']:.3f}"
        lines.append(f"{_step_column(entry, steps)}  {loss}{extra}{f'  {name}' if name else ''}")
    return "\n".join(lines)


def _step_column(entry: Mapping[str, int | float], steps: int) -> str:
    return f"step {entry['step']:>{len(str(steps))}}/{steps}"


def duration(seconds: float) -> str:
    """Formats seconds as 2:05 (minutes and seconds), 3:02:05, or 4d 03:02 (days, hours and minutes)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
