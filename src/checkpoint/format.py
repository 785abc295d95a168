"""Defines a checkpoint's contents: arrays by dotted name, a checksum of its meta, and a file of evaluations."""

import functools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from etils import epath

from src.system.json_text import parse_json

EVALUATIONS = "evaluations.json"  # in the same folder as the steps' folders


class Restored(NamedTuple):
    """The contents read from a checkpoint, or from a Hugging Face folder."""

    state: dict[str, Any]  # arrays, in the requested structure
    meta: dict[str, Any]  # as it was saved; if a run resumes, with the results of the checkpoint's evaluation
    messages: list[str]  # for the user


@dataclass(frozen=True)
class HostArray:
    """Asks `restore` for an array in its saved shape, as a NumPy array that is complete in every process."""

    sharding: jax.sharding.Sharding  # a copy on every device
    shape: tuple[int, ...] = ()


def read_evaluations(checkpoints: epath.Path) -> dict[str, Any]:
    """Reads the results of evaluations made at checkpoints, by checksum; {} without a readable file."""
    try:
        return dict(parse_json((checkpoints / EVALUATIONS).read_bytes()))
    except (OSError, ValueError, TypeError):  # without results, a run repeats its evaluations
        return {}


def checksum_of(content: Mapping[str, Any]) -> int:
    """Computes a checksum of a JSON object, to reveal edits."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def flatten(state: Any) -> dict[str, Any]:
    """Returns a state's leaves by dotted name, so that files do not depend on the types of optax's containers."""
    dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
