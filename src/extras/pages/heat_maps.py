"""Reads the values of heat maps from the lines that `log_internals` adds to metrics.jsonl."""

import math
from collections import defaultdict
from typing import Any

from src.run.metrics import Entry

# Titles of the lines that `log_internals` adds, by kind.
TITLES = {
    "activation_rms": "Outputs of layers, root mean square",
    "weight_norm": "Norm of a layer's weights",
    "gradient_norm": "Norm of a layer's gradients, after averaging and before clipping",
    "update_norm": "Norm of a layer's updates",
}


def by_layer(entry: Entry) -> dict[str, dict[str, float | None]]:
    """Extracts heat-map values from a line, by title and row; None for a value that is not finite.

    A row is a layer, and its norm is over all its variables. If layers share weights, the shared weights have one norm,
    and rows of norms are named like the weights.
    """
    squares: dict[str, dict[Any, float]] = defaultdict(lambda: defaultdict(float))
    for key, values in entry.items():
        kind, _, name = key.partition("/")
        parts = name.removeprefix("lora.").split(".")
        if kind in TITLES and parts[0] == "segments":
            for repeat, value in enumerate(values):
                position = int(parts[1]), repeat, int(parts[2])  # in layer order: segment, repeat, position
                squares[kind][position] += math.nan if value is None else value**2
    activations = entry.get("activation_rms", [])
    layers = [f"layer {layer}" for layer in range(len(activations))]
    figures = {"activation_rms": dict(zip(layers, activations, strict=True))}
    for kind, of in squares.items():
        positions = sorted(of)
        names = layers if len(of) == len(layers) else [f"segments.{s}.{p}, repeat {r}" for s, r, p in positions]
        figures[kind] = {name: math.sqrt(of[position]) for name, position in zip(names, positions, strict=True)}
    return {TITLES[kind]: {name: _shown(value) for name, value in of.items()} for kind, of in figures.items()}


def _shown(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
