"""Keeps what a report shows of metrics.jsonl, thinned so that its size does not grow with the length of a run."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from etils import epath

from src.run.metrics import PER_LAYER, TRAIN_KEYS, Entry, read_entry

Point = tuple[int, float | None]  # step and value; None where the value is not finite, which leaves a gap

_BLOCKS = 1000  # the fewest blocks of a curve that has been thinned

# Of the lines that `log_internals` adds, by their kind.
TITLES = {
    "activation_rms": "Outputs of layers, root mean square",
    "weight_norm": "Norm of a layer's weights",
    "gradient_norm": "Norm of a layer's gradients, after averaging and before clipping",
    "update_norm": "Norm of a layer's updates",
}
_COLUMNS = 400  # of a heat map, at most
Column = tuple[int, dict[str, dict[str, float | None]]]  # a step, and of each title the rows' figures


class Block(NamedTuple):
    """Summarises neighbouring points: the lowest, highest and median; the sum and count of finite values."""

    low: Point
    high: Point
    median: Point
    total: float
    count: int


class Curve:
    """Holds the points of one curve, added in order, in bounded memory.

    Up to 2 * _BLOCKS points are kept as they are. Longer curves are blocks of 2, 4, 8, ... neighbours; the median of a
    block is the mean of its halves' medians.
    """

    def __init__(self) -> None:
        self.stride = 1  # points in a block
        self.last: float | None = None  # the last finite value
        self._blocks: list[Block] = []
        self._open: list[Point] = []  # points of the block that is not full yet

    def extend(self, points: Sequence[Point]) -> None:
        """Adds the next points."""
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
        """Returns the whole curve, in order."""
        return self._blocks + ([_block(self._open)] if self._open else [])

    def points(self) -> list[Point]:
        """Returns the lowest and highest point of each block, in order; with a stride of 1 all points."""
        return [point for block in self.blocks() for point in sorted({block.low, block.high}, key=lambda p: p[0])]

    def medians(self) -> list[Point]:
        """Returns the median of each block."""
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


def by_layer(entry: Entry) -> dict[str, dict[str, float | None]]:
    """Returns each heat map's figures of a line by title and row: a layer's norm is that of all its variables together.

    A row is a layer. Where layers share weights, those have one norm: rows of norms are then named as the weights are.
    """
    squares: dict[str, dict[Any, float]] = defaultdict(lambda: defaultdict(float))
    for key, values in entry.items():
        kind, _, name = key.partition("/")
        parts = name.removeprefix("lora.").split(".")
        if kind in TITLES and parts[0] == "segments":
            for repeat, value in enumerate(values):
                place = int(parts[1]), repeat, int(parts[2])  # in the order of the layers: segment, repeat, position
                squares[kind][place] += math.nan if value is None else value**2
    activations = entry.get("activation_rms", [])
    layers = [f"layer {layer}" for layer in range(len(activations))]
    figures = {"activation_rms": dict(zip(layers, activations, strict=True))}
    for kind, of in squares.items():
        places = sorted(of)
        names = layers if len(of) == len(layers) else [f"segments.{s}.{p}, repeat {r}" for s, r, p in places]
        figures[kind] = {name: math.sqrt(of[place]) for name, place in zip(names, places, strict=True)}
    return {TITLES[kind]: {name: _shown(value) for name, value in of.items()} for kind, of in figures.items()}


def _shown(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


class History:
    """Holds the curves and totals of metrics.jsonl, in the memory of a few thousand steps however long the run."""

    def __init__(self) -> None:
        self.train: dict[str, Curve] = defaultdict(Curve)  # by key
        self.evals: dict[str, Curve] = defaultdict(Curve)
        self._columns, self._stride, self._internals = list[Column](), 1, 0  # every `stride`th of so many lines
        self.last_train: Entry = {}  # the last line; empty before there is one
        self.last_eval: Entry = {}
        self.tokens = self.seconds = 0.0  # totals over all steps
        self.invalid_lines = 0  # which were not the metrics of a step
        self._bytes_read = 0

    def read(self, metrics: epath.PathLike) -> None:
        """Adds the lines of metrics.jsonl written since the last call, except for an incomplete last one."""
        with epath.Path(metrics).open("rb") as file:
            file.seek(self._bytes_read)
            while lines := file.readlines(2**20):
                whole = [line for line in lines if line.endswith(b"\n")]
                self._bytes_read += sum(map(len, whole))
                entries = [read_entry(line) for line in whole]
                self.invalid_lines += entries.count(None)
                self.add([entry for entry in entries if entry is not None])
                if len(whole) < len(lines):  # reading on would take the rest of the incomplete line for a line
                    break

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds parsed lines."""
        train = []
        for entry in entries:
            if "loss" in entry:
                train.append(entry)
            elif "activation_rms" in entry:
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
        """Returns what charts.js draws: a title, steps, the rows' names, and a list of their figures for each step."""
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
