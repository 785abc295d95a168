"""What one turns to when a run hangs, crashes or is slow: stack traces of its threads, profiles of its steps."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax


def stack_traces(config: Mapping[str, Any]) -> contextlib.AbstractContextManager:
    """While entered, writes the main thread's stack every `stack_trace_interval_seconds`, and on a crash.

    To the console, or with `stack_trace_to_cloud` to files in /tmp/debugging, which a TPU VM's agent uploads.
    """
    if not config["collect_stack_trace"]:
        return contextlib.nullcontext()
    from cloud_tpu_diagnostics import diagnostic
    from cloud_tpu_diagnostics.configuration import debug_configuration as debug
    from cloud_tpu_diagnostics.configuration import diagnostic_configuration, stack_trace_configuration

    traces = stack_trace_configuration.StackTraceConfig(
        collect_stack_trace=True,
        stack_trace_to_cloud=config["stack_trace_to_cloud"],
        stack_trace_interval_seconds=config["stack_trace_interval_seconds"],
    )
    debug_config = debug.DebugConfig(stack_trace_config=traces)
    return diagnostic.diagnose(diagnostic_configuration.DiagnosticConfig(debug_config=debug_config))


class Profile:
    """A profile of `profiler_steps` steps of process 0, from the one `skip_first_n_steps_for_profiler` in."""

    def __init__(self, config: Mapping[str, Any], first_step: int, folder: str) -> None:
        self._folder = folder
        wanted = config["profiler"] and jax.process_index() == 0
        self._begin = first_step + config["skip_first_n_steps_for_profiler"] if wanted else -1
        self._end = self._begin + config["profiler_steps"]
        self._running = False

    def before_step(self, step: int) -> None:
        """Starts the profile if `step` is its first, and ends it if it is past its last."""
        if step == self._begin:
            jax.profiler.start_trace(self._folder)
            self._running = True
        elif step == self._end:
            self.close()

    def close(self) -> None:
        """Ends the profile if one is running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
