"""Line charts in plain HTML and SVG: no library, no network, text at its own size on a phone and on a desktop.

The curves are an SVG that stretches with the page (its strokes do not); ticks and labels are HTML placed in per cent,
so that they stay legible at any width.
"""

import bisect
import html
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[int, float | None]  # step and value; None where there is no finite value, which leaves a gap

_BLOCKS = 2000  # of a curve, at least, once it has been thinned
_BINS = 400  # of a downsampled curve: two points each are more than the pixels of a desktop chart
_EXTENT = 1000  # both sides of the SVG's own coordinates


@dataclass(frozen=True)
class Series:
    """One curve: `style` is a CSS class of the report, "raw", "line", or "marked" (a line with its points shown)."""

    name: str
    style: str
    points: Sequence[Point]


class Block(NamedTuple):
    """What is kept of neighbouring points: the lowest, highest and median; the sum and count of finite values."""

    low: Point
    high: Point
    median: Point
    total: float
    count: int


class Curve:
    """The points of one curve, added in order and thinned as they come: its size does not grow with the run's.

    Up to 2 * _BLOCKS points are kept as they are; of more, blocks of 2, 4, 8, ... neighbours, whose medians are the
    means of their halves' medians.

    Attributes:
        stride: points a block.
        last: the last finite value; None where there is none.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.last: float | None = None
        self._blocks: list[Block] = []
        self._open: list[Point] = []  # those of a block that is not full

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
        """The whole curve, in order."""
        return self._blocks + ([_block(self._open)] if self._open else [])

    def points(self) -> list[Point]:
        """The lowest and the highest point of each block, in order; with a stride of 1 all points."""
        return [point for block in self.blocks() for point in sorted({block.low, block.high}, key=lambda p: p[0])]

    def medians(self) -> list[Point]:
        """A point for each block."""
        return [block.median for block in self.blocks()]


def _block(points: Sequence[Point]) -> Block:
    values = [value for _, value in points if value is not None]
    if not values:
        return Block(points[0], points[0], points[0], 0.0, 0)
    if len(points) == 1:
        return Block(points[0], points[0], points[0], values[0], 1)
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


@dataclass(frozen=True)
class Scale:
    """The values between the chart's lower and upper edge, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def height(self, value: float) -> float:
        """Where `value` stands: 0 at the lower edge, 1 at the upper; outside of them when it is clipped."""
        if self.log:
            return math.log(max(value, self.low / 10) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def downsample(points: Sequence[Point], bins: int = _BINS) -> list[Point]:
    """Keeps each bin's lowest and highest point in their order, so that no spike is lost; a bin of gaps stays a gap."""
    if len(points) <= 2 * bins:
        return list(points)
    kept = []
    for index in range(bins):
        chunk = points[index * len(points) // bins : (index + 1) * len(points) // bins]
        finite = [point for point in chunk if point[1] is not None]
        if finite:
            kept += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
        else:
            kept.append(chunk[0])
    return kept


def running_median(points: Sequence[Point], width: int) -> list[Point]:
    """The median of the finite values among the `width` points around each: it neither lags nor follows a spike."""
    half, window, result = width // 2, [], []  # the window is sorted
    for index in range(len(points) + half):
        if index < len(points) and points[index][1] is not None:
            bisect.insort(window, points[index][1])
        if index >= width and points[index - width][1] is not None:
            del window[bisect.bisect_left(window, points[index - width][1])]
        if index >= half:
            result.append((points[index - half][0], window[len(window) // 2] if window else None))
    return result


def ticks(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], at most `count` + 1 of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * gap for index in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with 3, or 2 and 5, times them where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found
    return found


def line_chart(title: str, note: str, series: Sequence[Series], scale: Scale, show: Callable[[float], str]) -> str:
    """A chart of values against steps as one <figure>.

    Args:
        title: above it.
        note: a line under it, of plain text; may be empty.
        series: drawn in order, the last on top; those without points are left out.
        scale: of the values. What is outside is clipped at the edge.
        show: formats a value for the axis and for what the pointer is at.
    """
    steps = [step for each in series for step, _ in each.points]
    first, last = min(steps), max(steps)
    span = max(last - first, 1)  # a single step stands at the left edge
    series = [Series(each.name, each.style, downsample(each.points)) for each in series if each.points]

    def place(step: float, value: float) -> tuple[float, float]:
        return (step - first) / span * _EXTENT, (1 - scale.height(value)) * _EXTENT

    y_ticks = log_ticks(scale.low, scale.high) if scale.log else ticks(scale.low, scale.high, 6)
    x_ticks = [step for step in ticks(first, first + span, 5) if step == round(step) and step <= last]
    names = "".join(f'<span class="{each.style}">{html.escape(each.name)}</span>' for each in series)
    shown = [[each.name, [[step, show(value)] for step, value in each.points if value is not None]] for each in series]
    data = html.escape(json.dumps(shown, separators=(",", ":")))
    return "\n".join(
        [
            f'<figure data-first="{first}" data-span="{span}" data-series="{data}">',
            f"<figcaption><b>{html.escape(title)}</b>",
            f'<span class="legend">{names}</span>' if len(series) > 1 else "",
            '<output></output></figcaption><div class="chart"><div class="y">',
            *(f'<span style="top:{100 * (1 - scale.height(value)):.2f}%">{show(value)}</span>' for value in y_ticks),
            '</div><div class="plot">',
            f'<svg viewBox="0 0 {_EXTENT} {_EXTENT}" preserveAspectRatio="none" role="img">',
            f"<title>{html.escape(title)}</title>",
            *(f'<path class="grid" d="M0 {place(first, value)[1]:.1f}H{_EXTENT}"/>' for value in y_ticks),
            *(_curve(each, place) for each in series),
            '</svg><i></i></div><div class="x">',
            *(f'<span style="left:{100 * (step - first) / span:.2f}%">{show_number(step)}</span>' for step in x_ticks),
            f'</div></div><p class="note">{html.escape(note)}</p></figure>',
        ]
    )


def _curve(series: Series, place: Callable[[float, float], tuple[float, float]]) -> str:
    """The SVG of one series. A dot is a line of no length with round ends: it stays round however the SVG stretches."""
    line, dots, pen_down = [], [], False
    for index, (step, value) in enumerate(series.points):
        if value is None:
            pen_down = False
            continue
        x, y = place(step, value)
        line.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        followed = index + 1 < len(series.points) and series.points[index + 1][1] is not None
        if series.style == "marked" or not (pen_down or followed):
            dots.append(f"M{x:.1f} {y:.1f}h0")
        pen_down = True
    return f'<path class="{series.style}" d="{"".join(line)}"/><path class="{series.style} dots" d="{"".join(dots)}"/>'


def show_number(number: float) -> str:
    """1.234, 567.8, then 1.23k, 45.6M, 7.89B, 1.23T."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.4g}"
