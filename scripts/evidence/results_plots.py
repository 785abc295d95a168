"""Plots for docs/results, as SVG that is readable at the width of a phone."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

Labels = tuple[str, str]  # of x and of y
# Okabe and Ito's, distinguishable for color-blind readers.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666", "#e69f00")
plt.rcParams.update(
    {"font.size": 12, "svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "mintext", "axes.grid": True}
)
plt.rcParams.update({"axes.prop_cycle": plt.cycler(color=COLORS), "grid.color": "#dddddd"})


def curves(runs: Mapping[str, Sequence[Sequence[tuple[float, float]]]], path: Path, labels: Labels) -> None:
    """Plots each kind's runs [(x, y), ...], with equal x, as their mean and range, on logarithmic axes."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for color, (kind, of_kind) in zip(COLORS, runs.items(), strict=False):
        smoothed = [averaged(points) for points in of_kind]
        x = [at for at, _ in smoothed[0]]
        columns = list(zip(*([y for _, y in points] for points in smoothed), strict=True))
        axes.loglog(x, list(map(statistics.fmean, columns)), color=color, label=kind)
        axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.25, linewidth=0)
    axes.legend()
    _finish(figure, [axes], path, labels)


def averaged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Averages neighboring points over 10% of x each, so that noise looks even on a logarithmic axis."""
    parts: list[list[tuple[float, float]]] = []
    for point in points:
        if not parts or point[0] > 1.1 * parts[-1][0][0]:
            parts.append([])
        parts[-1].append(point)
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in parts]


def training(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path, labels: Labels) -> None:
    """Plots the curves of one run, the last one with markers."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for i, (name, points) in enumerate(lines.items(), 1):
        axes.plot(*zip(*points, strict=True), "o-" if i == len(lines) else "-", label=name, linewidth=1.2 * i)
    axes.legend()
    _finish(figure, [axes], path, labels)


def law(sizes: Sequence[float], losses: Sequence[float], fit: Mapping[str, float], path: Path, labels: Labels) -> None:
    """Plots losses by size, and the power law fitted to them."""
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(sizes, losses, "o", markersize=5)
    ends = [min(sizes), max(sizes)]
    label = f"N^(-{fit['exponent']:.4f} ± {fit['standard_error']:.4f})"
    axes.loglog(ends, [fit["factor"] * size ** -fit["exponent"] for size in ends], color=COLORS[1], label=label)
    axes.legend()
    _finish(figure, [axes], path, labels)


def panels(kinds: Mapping[str, Mapping[int, Mapping[float, float]]], path: Path, labels: Labels, *, log: bool) -> None:
    """Plots {kind: {width: {x: y}}}: a panel per kind, a line per width, its lowest point marked if `log`."""
    figure, of_kind = plt.subplots(len(kinds), 1, figsize=(6, 6.4), sharex=True, sharey=True)
    for axes, (kind, by_width) in zip(of_kind, kinds.items(), strict=True):
        for color, (width, points) in zip(COLORS, by_width.items(), strict=False):
            axes.plot(list(points), list(points.values()), ".-", color=color, label=f"width {width}")
            if log:
                best = min(points, key=lambda x: points[x])
                axes.plot([best], [points[best]], "o", color=color, markersize=9, fillstyle="none")
        axes.set_title(kind)
        if log:
            axes.set_xscale("log", base=2)
    of_kind[0].legend()
    _finish(figure, of_kind, path, labels)


def _finish(figure: plt.Figure, all_axes: Sequence[Axes], path: Path, labels: Labels) -> None:
    all_axes[-1].set_xlabel(labels[0])
    for axes in all_axes:
        axes.set_ylabel(labels[1])
        if axes.get_yscale() == "log":  # 1.5 instead of 1.5 x 10^0
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            low, high = axes.get_ylim()
            near = (1.3, 1.5, 1.7) if high < 1.6 * low else ()
            axes.yaxis.set_minor_locator(LogLocator(subs=(1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8, *near)))
        if axes.get_xscale() == "log" and axes.get_yscale() == "log":
            axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
