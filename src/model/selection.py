"""Selects weights by the patterns that users type, and says which are multiplied in 8 bits."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from src.model import params
from src.model.spec import LayerGroup
from src.system.errors import UserError, first_few

LOOKED_UP = ("vocab", "position")  # first dims of tables that are not multiplied by

Path = tuple[Any, ...]


def require_matches(key: str, patterns: Sequence[str], paths: Collection[Path], those: str) -> None:
    """Raises UserError for a pattern of `key` that fits none of the weights at these paths, which are `those`."""
    for pattern in patterns:
        if not any(params.matches(path, [pattern]) for path in paths):
            names = sorted({params.dotted(path[3:] if path[0] == "segments" else path) for path in paths})
            raise UserError(f"{key}: {pattern} fits no weight {those} {first_few(names, near=pattern)}")


def multiplied(declarations: params.Tree) -> list[Path]:
    """Returns the paths of the declared weights that activations are multiplied by."""
    axes, fan_ins = (params.by_path(params.field(declarations, name)) for name in ("out_sharding", "fan_in"))
    return [path for path in axes if fan_ins[path] and axes[path][0] not in LOOKED_UP]


def weight_roles(declarations: params.Tree, patterns: Sequence[str], adapted: bool) -> params.Tree:
    """Returns each weight's role: without patterns all are trained, or none where adapters are.

    What is not trained is frozen, a router's correction bias too: it moves where it is among the trained alone. Raises
    UserError if a pattern fits no weight that can be trained.
    """
    flat = params.by_path(params.roles(declarations))
    patterns = list(map(str, patterns)) or ([] if adapted else ["*"])
    require_matches("trainable_parameters", patterns, [path for path in flat if flat[path] != "frozen"], "of")
    return params.nested({path: role if params.matches(path, patterns) else "frozen" for path, role in flat.items()})


class Place(NamedTuple):
    """Says how a weight's magnitudes are bounded, and how it is sharded."""

    bounded: tuple[int, ...]  # the dims over which a bound holds
    axes: tuple[str | None, ...]  # logical, of the dims of one layer


@dataclass(frozen=True)
class Quantization:
    """Says which of a model's weights are multiplied in 8 bits, and how; none if `kind` is empty."""

    kind: str = ""
    bounds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # fixed ones, as in `low_precision.Products`
    places: Mapping[Path, Place] = field(default_factory=dict)
    description: str = ""

    def unrolled(self, groups: Sequence[LayerGroup]) -> Self:
        """Returns the same of a model whose segments have their layers in arrays of their own, [1, ...] each."""
        places = {}
        for path, place in self.places.items():
            if path[0] != "segments" or groups[path[1]].shared:
                places[path] = place
                continue
            _, segment, position, *rest = path
            for repeat in range(groups[segment].repeats):
                places["segments", segment, repeat * len(groups[segment].pattern) + position, *rest] = place
        return dataclasses.replace(self, places=places)
