"""Helps when a run hangs, crashes or is slow: stack traces of its threads, profiles of its steps."""

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from src.config.command_keys import Diagnostics
from src.errors import UserError

_TRACES = Path("/tmp/debugging")


@contextlib.contextmanager
def stack_traces(keys: Diagnostics) -> Iterator[None]:
    """Writes all threads' stacks now and then, and on a crash, if `collect_stack_trace` is set."""
    if not keys.collect_stack_trace:
        yield
        return
    with contextlib.ExitStack() as exits:
        out = sys.stderr
        if keys.stack_trace_to_cloud:
            # Processes of one host may start in the same second and, in containers, have the same pid.
            name = f"{time.strftime('stack_trace_%Y_%m_%d_%H_%M_%S')}_{os.getpid()}_{time.time_ns() % 10**9:09}.txt"
            try:
                _TRACES.mkdir(parents=True, exist_ok=True)
                out = exits.enter_context((_TRACES / name).open("x"))
            except OSError as error:
                raise UserError(
                    f"cannot write stack traces to {_TRACES}: {error}. Set stack_trace_to_cloud=false to have them on "
                    "the console."
                ) from None
        faulthandler.enable(out)
        exits.callback(faulthandler.disable)
        faulthandler.dump_traceback_later(keys.stack_trace_interval_seconds, repeat=True, file=out)
        exits.callback(faulthandler.cancel_dump_traceback_later)
        yield


class Profile:
    """Profiles `profiler_steps` steps of process 0, after `skip_first_n_steps_for_profiler` steps."""

    def __init__(self, keys: Diagnostics, first_step: int, folder: str) -> None:
        self._folder = folder
        wanted = keys.profiler and jax.process_index() == 0
        self._begin = first_step + keys.skip_first_n_steps_for_profiler if wanted else -1
        self._end = self._begin + keys.profiler_steps
        self._running = False

    def before_step(self, step: int) -> None:
        """Starts the profile before its first step, and ends it after its last."""
        if step == self._begin:
            jax.profiler.start_trace(self._folder)
            self._running = True
        elif step == self._end:
            self.close()

    def close(self) -> None:
        """Ends a running profile."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
