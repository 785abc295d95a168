"""What a run says of itself while it goes: metrics.jsonl, TensorBoard, lines on the console, its environment."""

import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from src.errors import counted
from src.json_text import parse_json

# A train line of metrics.jsonl has these keys in this order (docs/metrics.md says what each is), mfu and mfu_palm only
# where the device's peak rate is known, the losses of experts and of extra prediction layers only where the model has
# them, of the layers that have experts a list each of loads and drops, and `conversations_cut` with `use_sft`; an eval
# line has `step`, EVAL_KEYS, and what `eval_metrics` adds, all with /NAME after them for a set that has a name. Line k
# of the train lines is the k-th update's: steps count from 1.
LOSSES_AND_LOADS = (
    *("load_balance_loss", "router_z_loss", "expert_load_max", "tokens_dropped", "mtp_loss"),
    "conversations_cut",
)
TRAIN_KEYS = (
    "step",
    "loss",
    "perplexity",
    *LOSSES_AND_LOADS,
    "grad_norm",
    "learning_rate",
    "step_time_seconds",
    "data_wait_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "mfu_palm",
)
EVAL_KEYS = ("eval_loss", "eval_perplexity")
PER_LAYER = ("expert_load_max", "tokens_dropped")  # lists
Entry = Mapping[str, Any]  # a line of metrics.jsonl: numbers, or None for what is not finite, and lists of such

_NUMBERS = {int, float, type(None)}


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinite where a float cannot hold it."""
    return math.inf if loss > 709 else math.exp(loss)


def read_entry(line: bytes) -> Entry | None:
    """Returns the metrics that a line of metrics.jsonl spells, or None if it spells anything else."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or not 0 <= entry["step"] < 2**53:
        return None
    lists = [entry[key] for key in PER_LAYER if key in entry]
    if not all(isinstance(values, list) for values in lists):
        return None
    lists.append([value for key, value in entry.items() if key not in PER_LAYER])
    return entry if all(map(_are_numbers, lists)) else None


def _are_numbers(values: list[Any]) -> bool:
    """Whether each is a number that a float can hold, or None."""
    try:
        return _NUMBERS.issuperset(map(type, values)) and all(map(math.isfinite, filter(None, values)))
    except OverflowError:  # an integer of hundreds of digits
        return False


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard scalars, each step once however often the run was interrupted.

    What each layer has a number of is a list in metrics.jsonl, and three scalars in TensorBoard.
    A number that is not finite becomes null in metrics.jsonl, for JSON has no NaN, and no point in TensorBoard.

    Attributes:
        messages: what to tell the user of the file that was there.
    """

    def __init__(self, path: Path, tensorboard_dir: Path, resume_step: int | None) -> None:
        """Opens both; in a fresh run what an earlier one left there is gone.

        Args:
            path: of metrics.jsonl, on a local disk.
            tensorboard_dir: a local folder.
            resume_step: the step of the restored checkpoint: what follows its lines is cut off, a torn line too.
                None: a fresh run.
        """
        # 0.4 s of import, which the first printed line need not wait for. The package's SummaryWriter would write in a
        # thread, and wait for it without an end once that has failed, as on a full disk.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import Summary, scalar

        self.messages: list[str] = []
        if resume_step is not None and path.exists() and (others := _cut_back(path, resume_step)):
            self.messages.append(
                f"{path.name}: cut off {counted(others, 'line')} at its end without the metrics of a step"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w" if resume_step is None else "a", encoding="utf-8")
        tensorboard_dir.mkdir(parents=True, exist_ok=True)
        # The file's name has the second it is opened in: without a suffix, a start in the same second overwrites it.
        self._tensorboard = EventsWriter(str(tensorboard_dir / "events"), f".{time.time_ns()}")
        self._event, self._summary, self._scalar = Event, Summary, scalar
        first_step = 0 if resume_step is None else resume_step + 1  # what an earlier start has from there on goes
        start = SessionLog(status=SessionLog.START)
        self._tensorboard.write_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, entry: Entry) -> None:
        """Adds one line: `step` with the keys of TRAIN_KEYS, or of EVAL_KEYS for an evaluation after that step."""
        ordered = [key for key in TRAIN_KEYS + EVAL_KEYS if key in entry]
        ordered += own_metrics(entry)
        assert len(ordered) == len(entry), f"metrics without a place in the line: {set(entry) - set(ordered)}"
        finite = {key: _or_null(entry[key]) for key in ordered}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()
        values = []
        for key, value in finite.items():
            name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
            for tag, number in _scalars(name, value).items():
                if key != "step" and number is not None:
                    values.extend(self._scalar(tag, number).value)
        summary = self._summary(value=values)
        self._tensorboard.write_event(self._event(wall_time=time.time(), step=entry["step"], summary=summary))

    def flush(self) -> None:
        """Puts every line on disk. Called before a checkpoint is saved, so that no step up to it can be missing."""
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        """Writes what is left and closes both."""
        self._file.close()
        self._tensorboard.close()


def _scalars(name: str, value: Any) -> dict[str, float | None]:
    """A number by its name; of a list, which has one for each layer, the least, the mean and the most."""
    if not isinstance(value, list):
        return {name: value}
    finite = [each for each in value if each is not None]
    if not finite:
        return {}
    return {f"{name}/min": min(finite), f"{name}/mean": sum(finite) / len(finite), f"{name}/max": max(finite)}


def _or_null(value: float | list[float]) -> Any:
    """A number, or those of a list; None for what is not finite."""
    if isinstance(value, list):
        return [_or_null(each) for each in value]
    return value if math.isfinite(value) else None


def _cut_back(path: Path, step: int) -> int:
    """Truncates metrics.jsonl after its last line of no later step; returns how many lines cut off were no metrics.

    Reads from the end, for the file of a long run has gigabytes.
    """
    others = 0
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
                end = lines.rfind(b"\n") + 1
                while end:
                    begin = lines.rfind(b"\n", 0, end - 1) + 1
                    entry = read_entry(lines[begin:end])
                    if entry and entry["step"] <= step:
                        break
                    others += entry is None
                    end = begin
        file.truncate(end)
    return others


class _Output(Console):
    """rich's, which leaves an output that nobody reads to `run_command`."""

    def on_broken_pipe(self) -> None:
        """Raises what rich would end the process for, with an exit code of its own."""
        raise BrokenPipeError


class StepPrinter:
    """Prints one aligned line per step, with the time that is left; on a terminal, above a progress bar."""

    def __init__(
        self,
        steps: int,
        done: int = 0,
        log_period: int = 1,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows the bar if standard output is a terminal.

        Args:
            steps: of the whole run.
            done: how many were done before this start of it.
            log_period: a line is printed every so many steps, and for the first and the last.
            quiet: nothing but the last step's lines is printed, and no bar.
            clock: seconds, for the time that is left.
        """
        self._steps = steps
        self._first_step = done + 1
        self._log_period = log_period
        self._quiet = quiet
        self._clock = clock
        self._first_time = math.nan
        # Asked of the stream itself: rich would also draw in a notebook, and in a log if FORCE_COLOR is set.
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
        """Takes each step's metrics, keys of TRAIN_KEYS, in order; prints those that log_period asks for."""
        step = int(entry["step"])
        if step == self._first_step:
            self._first_time = self._clock()
        self._bar.update(self._task, completed=step, refresh=True)
        periodic = step % self._log_period == 0 or step == self._first_step
        if step == self._steps or (periodic and not self._quiet):
            self._console.print(train_line(entry, self._steps, self._seconds_left(step)))

    def evaluation(self, entry: Mapping[str, int | float]) -> None:
        """Prints an evaluation's metrics, `step` and EVAL_KEYS."""
        if entry["step"] == self._steps or not self._quiet:
            self._console.print(eval_line(entry, self._steps))

    def say(self, line: str) -> None:
        """Prints a line of another kind."""
        self._console.print(line)

    def _seconds_left(self, step: int) -> float | None:
        """From the mean pace since the first step's end (that step compiles), evaluations and checkpoints included."""
        if step == self._first_step:
            return None
        pace = (self._clock() - self._first_time) / (step - self._first_step)
        return pace * (self._steps - step)


def train_line(entry: Entry, steps: int, seconds_left: float | None) -> str:
    """One step's metrics in columns that stay in place from step to step.

    Of layers of experts, the highest load over the mean and the largest part of dropped choices of any.
    """
    grad_norm, seconds = entry["grad_norm"], entry["step_time_seconds"]
    columns = [
        _step_column(entry, steps),
        f"loss {entry['loss']:7.4f}",
        f"grad {grad_norm:7.3f}" if grad_norm < 1000 else f"grad {grad_norm:7.1e}",
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


def own_metrics(entry: Mapping[str, int | float]) -> list[str]:
    """The keys of an evaluation's metrics that `eval_metrics` or named sets added."""
    return [key for key in entry if key.startswith("eval_") and key not in EVAL_KEYS]


def eval_sets(entry: Mapping[str, int | float]) -> dict[str, dict[str, float]]:
    """The metrics of an evaluation by the name of the set, which is empty where there is one without a name."""
    sets: dict[str, dict[str, float]] = {}
    for key, value in entry.items():
        if key.startswith("eval_"):
            metric, _, name = key.partition("/")
            sets.setdefault(name, {})[metric] = value
    return sets


def eval_key(metric: str, name: str) -> str:
    """What a metric of the evaluation set `name` is called: `eval_loss/books`."""
    return f"{metric}/{name}" if name else metric


def eval_line(entry: Mapping[str, int | float], steps: int) -> str:
    """An evaluation's metrics, the losses under the training losses: a line for each set."""
    lines = []
    for name, metrics in eval_sets(entry).items():
        own = "".join(f"  {key.removeprefix('eval_')} {metrics[key]:.4f}" for key in own_metrics(metrics))
        loss = f"eval {metrics['eval_loss']:7.4f}  perplexity {metrics['eval_perplexity']:.3f}"
        lines.append(f"{_step_column(entry, steps)}  {loss}{own}{f'  {name}' if name else ''}")
    return "\n".join(lines)


def _step_column(entry: Mapping[str, int | float], steps: int) -> str:
    return f"step {entry['step']:>{len(str(steps))}}/{steps}"


def duration(seconds: float) -> str:
    """2:05 (minutes and seconds), 3:02:05, or 4d 03:02 (days, hours and minutes)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def print_header(rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values in two columns; a value's further lines stand under its first."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value.replace(chr(10), chr(10) + ' ' * (width + 2))}", flush=True)
