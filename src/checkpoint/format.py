"""Defines a checkpoint's parts: arrays by dotted name, a checksum of its meta, and the evaluations noted beside it."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from src.system.json_text import parse_json

EVALUATIONS = "evaluations.json"  # beside the folders of steps


class Restored(NamedTuple):
    """Holds what was read from a checkpoint."""

    state: dict[str, Any]  # arrays, in the structure that was asked for
    meta: dict[str, Any]  # as it was saved
    messages: list[str]  # for the user


@dataclass(frozen=True)
class HostArray:
    """Stands for an array that is restored in whatever shape it was saved, as NumPy's, whole in every process."""

    sharding: jax.sharding.Sharding  # a copy on every device
    shape: tuple[int, ...] = ()


class DataPosition(NamedTuple):
    """Where a run goes on in its data."""

    streams: np.ndarray | None = None  # int32 [B, S, 2], of each row's documents in each source; None: at their start
    rows_taken: int = 0  # see `data_position.rows_consumed`
    rows_before: Mapping[str, int] = {}
    saved: Mapping[str, Any] = {}  # of this process, where each `StreamSource` goes on, by its name


def read_evaluations(checkpoints: epath.Path) -> dict[str, Any]:
    """Returns what came of the evaluations after checkpoints, by checksum; {} without a readable file."""
    try:
        return dict(parse_json((checkpoints / EVALUATIONS).read_bytes()))
    except (OSError, ValueError, TypeError):  # they are made again
        return {}


def checksum_of(content: Mapping[str, Any]) -> int:
    """Returns a checksum of a JSON object, which reveals edits."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def flatten(state: Any) -> dict[str, Any]:
    """Returns the leaves by dotted name, so that the files do not depend on the types of optax's containers."""
    return {_dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
