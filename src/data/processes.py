"""Gathers and compares values of a job's processes, which must all make the same calls."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from src.system.errors import UserError, changed_keys


def max_over_hosts(value: np.ndarray) -> np.ndarray:
    """Takes the elementwise maximum over all processes."""
    if jax.process_count() == 1:
        return value
    return np.max(multihost_utils.process_allgather(value), axis=0)


def gather_json(value: Any) -> list[Any]:
    """Gathers a value from each process, in process order; values have to be JSON serializable."""
    content = json.dumps(value, sort_keys=True).encode()
    longest = int(max_over_hosts(np.array(len(content))))
    contents = np.atleast_2d(multihost_utils.process_allgather(np.frombuffer(content.ljust(longest), np.uint8)))
    return [json.loads(each.tobytes()) for each in contents]


def check_same(facts: Mapping[str, str | int], what: str, needed: str) -> None:
    """Raises UserError in every process, with the differences, if `facts` about `what` differ between processes.

    The message asks to give all hosts `needed`.
    """
    everyones = gather_json(facts)
    if differing := [process for process, each in enumerate(everyones) if each != everyones[0]]:
        first, other = everyones[0], everyones[differing[0]]
        listed = "\n".join(
            f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {differing[0]}"
            for name in changed_keys(first, other)
        )
        processes = ", ".join(map(str, differing))
        raise UserError(
            f"process {processes} reads different {what} from process 0: give all hosts {needed}.\n{listed}"
        )
