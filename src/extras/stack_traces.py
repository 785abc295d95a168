"""Writes all threads' stacks at an interval, on SIGUSR1 and on a crash (`collect_stack_trace`)."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

from src import installing
from src.config.command_keys import Diagnostics
from src.system.errors import UserError

_TRACES = Path("/tmp/debugging")


@contextlib.contextmanager
def written(keys: Diagnostics) -> Generator[None]:
    """Writes the stacks to stderr, or with `stack_trace_to_cloud` to files, while the body runs.

    Raises UserError if the files cannot be written, or if an earlier run in this process is still closing its traces.
    """
    if any(thread.name == "cloud-tpu-diagnostics" for thread in threading.enumerate()):
        raise UserError("collect_stack_trace=true, but this process's last run is closing its traces: start another")
    with contextlib.ExitStack() as exits:
        out = usr1 = sys.stderr
        if keys.stack_trace_to_cloud:
            # Processes of one host may start in the same second and, in containers, have the same pid. Each writes two
            # files, because the timer and the package's signal fire at the same time.
            name = f"{time.strftime('stack_trace_%Y_%m_%d_%H_%M_%S')}_{os.getpid()}_{time.time_ns() % 10**9:09}"
            try:
                _TRACES.mkdir(parents=True, exist_ok=True)
                out, usr1 = (exits.enter_context(open(_TRACES / (name + end), "x")) for end in (".txt", "_usr1.txt"))
                _begin_cloud_tpu_diagnostics(keys.stack_trace_interval_seconds, exits)
            except (OSError, ImportError) as error:
                raise UserError(
                    f"stack_trace_to_cloud=true writes to {_TRACES} by the package cloud-tpu-diagnostics, which "
                    f"{installing('tpu')} installs: {error}. Set it to false to have the stacks on the console."
                ) from None
        faulthandler.enable(out)
        exits.callback(faulthandler.disable)
        faulthandler.register(signal.SIGUSR1, usr1, chain=keys.stack_trace_to_cloud)  # for kill -USR1 PID
        exits.callback(faulthandler.unregister, signal.SIGUSR1)
        faulthandler.dump_traceback_later(keys.stack_trace_interval_seconds, repeat=True, file=out)
        exits.callback(faulthandler.cancel_dump_traceback_later)
        yield


def _begin_cloud_tpu_diagnostics(interval: int, exits: contextlib.ExitStack) -> None:
    """Makes the package write the main thread's stack every `interval` seconds, by SIGUSR1; `exits` end it."""
    from cloud_tpu_diagnostics import configuration, diagnostic

    traces = configuration.stack_trace_configuration.StackTraceConfig(True, True, interval)
    debug = configuration.debug_configuration.DebugConfig(traces)
    context = diagnostic.diagnose(configuration.diagnostic_configuration.DiagnosticConfig(debug))
    # By default, SIGUSR1 ends the process: ignore the package's signals before and after its handler is installed.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    exits.callback(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
    context.__enter__()  # exited in a thread, because exiting waits for the interval to end
    exits.callback(threading.Thread(None, context.__exit__, "cloud-tpu-diagnostics", (None,) * 3, daemon=True).start)
    # The package has registered faulthandler, and then a handler of its own on top. Registering again would only change
    # the file of the hidden one: remove it, so that `written` registers on top.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
