"""Selects weights by the patterns that users type, and describes which are used in 8-bit matmuls."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from src.model import params
from src.system.errors import UserError, first_few

LOOKED_UP = ("vocab", "position")  # logical axes of the first dim of lookup tables, which are not used in matmuls

Path = tuple[Any, ...]


def require_matches(key: str, patterns: Sequence[str], paths: Collection[Path], those: str) -> None:
    """Raises UserError for a pattern of `key` that matches none of the weights `paths`, which `those` describes."""
    for pattern in patterns:
        if not any(params.matches(path, [pattern]) for path in paths):
            names = sorted({params.dotted(path[3:] if path[0] == "segments" else path) for path in paths})
            raise UserError(f"{key}: {pattern} matches no weight {those} {first_few(names, near=pattern)}")


def multiplied(declarations: params.Tree) -> list[Path]:
    """Paths of the declared weights used in matmuls."""
    axes, fan_ins = (params.by_path(params.field(declarations, name)) for name in ("out_sharding", "fan_in"))
    return [path for path in axes if fan_ins[path] and axes[path][0] not in LOOKED_UP]


def weight_roles(declarations: params.Tree, patterns: Sequence[str], adapted: bool) -> params.Tree:
    """Role of each weight: without patterns all are trained, or none if there are adapters.

    Weights that are not trained are frozen, including a router's correction bias: it moves only if it is among the
    trained weights. Raises UserError if a pattern matches no weight that can be trained.
    """
    flat = params.by_path(params.roles(declarations))
    patterns = list(map(str, patterns)) or ([] if adapted else ["*"])
    require_matches("trainable_parameters", patterns, [path for path in flat if flat[path] != "frozen"], "of")
    return params.nested({path: role if params.matches(path, patterns) else "frozen" for path, role in flat.items()})


class QuantizedMatmul(NamedTuple):
    """How a weight's magnitudes are bounded, and how it is sharded."""

    bounded: tuple[int, ...]  # dims over which the largest magnitude is taken
    axes: tuple[str | None, ...]  # logical axes of the dims of one layer


@dataclass(frozen=True)
class Quantization:
    """Which of a model's weights are multiplied in 8 bits, and how; none if `kind` is empty."""

    kind: str = ""
    bounds: tuple[float, ...] = (0.0, 0.0, 0.0)  # fixed bounds, as in `low_precision.EightBitMatmuls`
    matmuls: Mapping[Path, QuantizedMatmul] = field(default_factory=dict)
    description: str = ""
