"""Collects a report's data from metrics.jsonl, downsampled so that its size does not grow with the run's length."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from etils import epath

from src.run.metrics import PER_LAYER, TRAIN_KEYS, Entry, duration, eval_key, eval_sets, perplexity, read_entry

Point = tuple[int, Any]  # step and value; None for a non-finite value, which leaves a gap

_BLOCKS = 1000  # minimum number of blocks of a downsampled curve

_COLUMNS = 400  # maximum number of columns of a heat map
Column = tuple[int, dict[str, dict[str, float | None]]]  # a step, and each title's values by row


class Block(NamedTuple):
    """Summarizes neighboring points: the lowest, highest and median point, the sum and count of finite values."""

    low: Point
    high: Point
    median: Point
    total: float
    count: int


class Curve:
    """The points of one curve, added in order, in bounded memory.

    Fewer than 2 * _BLOCKS points are stored unchanged. Longer curves are blocks of 2, 4, 8, ... neighbors. A block's
    median is exact if it was built from its points; if two blocks were joined, it is the mean of their medians.
    """

    def __init__(self) -> None:
        self.stride = 1  # points per block
        self.last: float | None = None  # the last finite value
        self._blocks: list[Block] = []
        self._open: list[Point] = []  # points of the incomplete block

    def extend(self, points: Sequence[Point]) -> None:
        """Adds points, which must follow all earlier ones; joins blocks in pairs when there are 2 * _BLOCKS of them."""
        self.last = next((value for _, value in reversed(points) if value is not None), self.last)
        self._open += points
        while len(self._open) >= self.stride:
            end = min(len(self._open) // self.stride, 2 * _BLOCKS - len(self._blocks)) * self.stride
            self._blocks += [_block(self._open[i : i + self.stride]) for i in range(0, end, self.stride)]
            del self._open[:end]
            if len(self._blocks) == 2 * _BLOCKS:
                self._blocks = list(map(_join, self._blocks[::2], self._blocks[1::2]))
                self.stride *= 2

    def blocks(self) -> list[Block]:
        """Returns all blocks, in order; the last one may have fewer points."""
        return self._blocks + ([_block(self._open)] if self._open else [])

    def points(self) -> list[Point]:
        """Returns each block's lowest and highest point, in order; with a stride of 1, all points."""
        return [point for block in self.blocks() for point in sorted({block.low, block.high}, key=lambda p: p[0])]

    def medians(self) -> list[Point]:
        """Returns each block's median."""
        return [block.median for block in self.blocks()]


def _block(points: Sequence[Point]) -> Block:
    values = [value for _, value in points if value is not None]
    if not values:
        return Block(points[0], points[0], points[0], 0.0, 0)
    ordered = sorted(values)
    low, median, high = ordered[0], statistics.median(ordered), ordered[-1]
    steps = {value: step for step, value in points}
    middle = points[len(points) // 2][0]
    return Block((steps[low], low), (steps[high], high), (middle, median), sum(values), len(values))


def _join(a: Block, b: Block) -> Block:
    if not (a.count and b.count):
        return a if a.count else b
    low, high = (a if a.low[1] <= b.low[1] else b).low, (a if a.high[1] >= b.high[1] else b).high
    median = (b.median[0], a.median[1] + (b.median[1] - a.median[1]) / 2)
    return Block(low, high, median, a.total + b.total, a.count + b.count)


class History:
    """Curves and totals of metrics.jsonl, in bounded memory, however long the run."""

    def __init__(self) -> None:
        self.train: dict[str, Curve] = defaultdict(Curve)  # by key
        self.evals: dict[str, Curve] = defaultdict(Curve)
        # `_columns` has every `_stride`-th of the `_internals` lines of `log_internals` so far.
        self._columns, self._stride, self._internals = list[Column](), 1, 0
        self.last_train: Entry = {}  # the last line; empty at first
        self.last_eval: Entry = {}
        self.tokens = self.seconds = 0.0  # totals over all steps
        self.invalid_lines = 0  # lines that are not a step's metrics
        self._bytes_read = 0

    def read(self, metrics: epath.PathLike) -> None:
        """Reads the lines of metrics.jsonl added since the last call, except for an incomplete last one."""
        with epath.Path(metrics).open("rb") as file:
            file.seek(self._bytes_read)
            while lines := file.readlines(2**20):
                whole = [line for line in lines if line.endswith(b"\n")]
                self._bytes_read += sum(map(len, whole))
                entries = [read_entry(line) for line in whole]
                self.invalid_lines += entries.count(None)
                self.add([entry for entry in entries if entry is not None])
                if len(whole) < len(lines):  # reading on would treat the rest of the incomplete line as a line
                    break

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds parsed lines to the curves and totals."""
        train = []
        for entry in entries:
            if "loss" in entry:
                train.append(entry)
            elif "activation_rms" in entry:
                from src.extras.pages.heat_maps import by_layer

                if self._internals % self._stride == 0:
                    self._columns.append((entry["step"], by_layer(entry)))
                self._internals += 1
                if len(self._columns) > _COLUMNS:
                    self._columns, self._stride = self._columns[::2], 2 * self._stride
            elif keys := [key for key in entry if key.startswith("eval_")]:
                self.last_eval = entry
                for key in keys:
                    self.evals[key].extend([(entry["step"], entry[key])])
        if not train:
            return
        self.last_train = train[-1]
        for key in dict.fromkeys((*TRAIN_KEYS, *self.last_train)):
            self.train[key].extend([(entry["step"], _number(key, entry.get(key))) for entry in train])
        times = [(entry.get("step_time_seconds") or 0.0, entry.get("tokens_per_second") or 0.0) for entry in train]
        self.seconds += sum(seconds for seconds, _ in times)
        self.tokens += sum(seconds * rate for seconds, rate in times)  # the batch size may have changed

    def heat_maps(self) -> list[dict[str, Any]]:
        """Returns the heat maps for charts.js, each with a title, steps, row names, and a list of values per step."""
        latest = self._columns[-1][1] if self._columns else {}
        columns = [column for column in self._columns if column[1].keys() >= latest.keys()]
        steps = [step for step, _ in columns]
        return [
            {"title": title, "steps": steps, "rows": [*rows], "values": [[*of[title].values()] for _, of in columns]}
            for title, rows in latest.items()
        ]


def _number(key: str, value: Any) -> float | None:
    if not isinstance(value, list):
        return value
    finite = [x for x in value if x is not None]
    return PER_LAYER[key](finite) if finite else None


# ---- Results


def key_figures(history: History) -> list[tuple[str, str]]:
    """Returns the names and values of a run's results, without the ones that have no finite value."""
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
    """Formats a number with three or four digits: 1.234, 567.8, then 1.23k, 45.6M, 7.89B, 1.23T."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.4g}"
