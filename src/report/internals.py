"""Shows in the report the lines that `log_internals` adds: figures of each layer, over steps."""

import math
from collections import defaultdict
from typing import Any

from src.report.metrics import Entry

TITLES = {
    "activation_rms": "Outputs of layers, root mean square",
    "weight_norm": "Norm of a layer's weights",
    "gradient_norm": "Norm of a layer's gradients, after averaging and before clipping",
    "update_norm": "Norm of a layer's updates",
}
_COLUMNS = 400  # of a heat map, at most
Column = tuple[int, dict[str, dict[str, float | None]]]  # a step, and of each title the rows' figures


class HeatMaps:
    """Holds columns, every second one fewer each time that there are too many."""

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self._seen, self._stride = 0, 1

    def add(self, entry: Entry) -> None:
        """Adds a line."""
        if self._seen % self._stride == 0:
            self._columns.append((entry["step"], by_layer(entry)))
        self._seen += 1
        if len(self._columns) > _COLUMNS:
            self._columns, self._stride = self._columns[::2], 2 * self._stride

    def maps(self) -> list[dict[str, Any]]:
        """Returns what charts.js draws: a title, steps, the rows' names, and a list of their figures for each step."""
        latest = self._columns[-1][1] if self._columns else {}
        columns = [column for column in self._columns if column[1].keys() >= latest.keys()]
        steps = [step for step, _ in columns]
        return [
            {"title": title, "steps": steps, "rows": [*rows], "values": [[*of[title].values()] for _, of in columns]}
            for title, rows in latest.items()
        ]


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
