"""Reads checkpoints so that all processes of a job get the same result, or fail with the same error."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jax.experimental import multihost_utils

from src.data.processes import gather_json
from src.system.errors import TransientError, UserError
from src.system.storage_errors import DamagedError, Failure, failure_of, one_line, retried

T = TypeVar("T")


def on_all_processes(read: Callable[[], T]) -> T:
    """Calls `read` on every process; if it fails on any, raises the same error on all, so that they stay in step.

    Raises DamagedError if the contents are not a checkpoint; TransientError if reading failed several times for
    transient reasons; UserError if reading failed for another reason, which says nothing about the contents.
    """
    result: Any = None
    problem, failure, cause = "", Failure.NONE, None
    try:
        result = retried(read)
    except Exception as error:
        problem, failure, cause = one_line(error), failure_of(error), error
    failures = multihost_utils.process_allgather(np.array(failure)).reshape(-1)
    worst = failures.max()
    if worst == Failure.NONE:
        return result
    problem = problem or f"process {np.flatnonzero(failures)[0]} failed"
    if worst == Failure.DAMAGED:
        raise DamagedError(f"it cannot be read: {problem}") from cause
    kind = TransientError if worst == Failure.TRANSIENT else UserError
    raise kind(f"a checkpoint could not be read: {problem}. Nothing was changed; try again.") from cause


def of_process_0(read: Callable[[], Any]) -> Any:
    """Gives every process the result of `read()` on process 0, a JSON value; raises as `on_all_processes` does.

    Processes may see a folder in different states, and replicas must not start from different checkpoints.
    """
    return gather_json(on_all_processes(read))[0]
