"""Helps when a run hangs, crashes, is slow or too large: stack traces, profiles, advice where memory is full."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from src.config.command_keys import Diagnostics
from src.errors import UserError, say

_TRACES = Path("/tmp/debugging")


@contextlib.contextmanager
def stack_traces(keys: Diagnostics) -> Iterator[None]:
    """Writes all threads' stacks now and then, on SIGUSR1 and on a crash, if `collect_stack_trace` is set."""
    if not keys.collect_stack_trace:
        yield
        return
    if any(thread.name == "cloud-tpu-diagnostics" for thread in threading.enumerate()):
        raise UserError("collect_stack_trace=true, but traces of this process's last run still end: start another one")
    with contextlib.ExitStack() as exits:
        out = usr1 = sys.stderr
        if keys.stack_trace_to_cloud:
            # Processes of one host may start in the same second and, in containers, have the same pid. Each has two
            # files, as the timer and the package's signal come at the same time.
            name = f"{time.strftime('stack_trace_%Y_%m_%d_%H_%M_%S')}_{os.getpid()}_{time.time_ns() % 10**9:09}"
            try:
                _TRACES.mkdir(parents=True, exist_ok=True)
                out, usr1 = (exits.enter_context(open(_TRACES / (name + end), "x")) for end in (".txt", "_usr1.txt"))
                _begin_cloud_tpu_diagnostics(keys.stack_trace_interval_seconds, exits)
            except (OSError, ImportError) as error:
                raise UserError(
                    f"stack_trace_to_cloud=true writes to {_TRACES} by the package cloud-tpu-diagnostics, which bash "
                    f"setup.sh tpu installs: {error}. Set it to false to have the stacks on the console."
                ) from None
        faulthandler.enable(out)
        exits.callback(faulthandler.disable)
        faulthandler.register(signal.SIGUSR1, usr1, chain=keys.stack_trace_to_cloud)  # kill -USR1 PID: now
        exits.callback(faulthandler.unregister, signal.SIGUSR1)
        faulthandler.dump_traceback_later(keys.stack_trace_interval_seconds, repeat=True, file=out)
        exits.callback(faulthandler.cancel_dump_traceback_later)
        yield


def _begin_cloud_tpu_diagnostics(interval: int, exits: contextlib.ExitStack) -> None:
    """Has the package write the main thread's stack at SIGUSR1, and send that at the interval; `exits` end it."""
    from cloud_tpu_diagnostics import configuration, diagnostic

    traces = configuration.stack_trace_configuration.StackTraceConfig(True, True, interval)
    debug = configuration.debug_configuration.DebugConfig(traces)
    context = diagnostic.diagnose(configuration.diagnostic_configuration.DiagnosticConfig(debug))
    signal.signal(signal.SIGUSR1, lambda *_: None)  # before and after: what its thread sends must not end the process
    exits.callback(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
    context.__enter__()  # left in a thread, as it waits for the interval to end
    exits.callback(threading.Thread(None, context.__exit__, "cloud-tpu-diagnostics", (None,) * 3, daemon=True).start)
    # It registers with faulthandler beneath its own handler, where another registration would not be called.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))


@contextlib.contextmanager
def advice_on_memory(per_device_batch_size: float, remat_policy: str) -> Iterator[None]:
    """Raises UserError, with what helps, where a device or the host has no room for what the body asks for."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error).strip().partition("\n\n")[0]
        # The memory of a core, VMEM, may be too small for a kernel, whatever the size of the batch.
        if not message.startswith("RESOURCE_EXHAUSTED") or "vmem" in message.lower():
            raise
        asked = [int(number) for number in re.findall(r"(\d{6,}) bytes", message)]
        size = f": {max(asked) / 2**30:,.1f} GiB at once were asked for" if asked else ""
        where = f"cpu-{jax.device_count()}" if jax.default_backend() == "cpu" else "these devices, such as v5p-8"
        note = getattr(error, "kept_checkpoint", "")  # of checkpoint.run_folder.in_run_folder
        raise UserError(
            f"memory is full{size}, on {jax.device_count()} x {jax.devices()[0].device_kind}. JAX says: {message}\n"
            f"What helps: a smaller per_device_batch_size (here {per_device_batch_size:g}; "
            "gradient_accumulation_steps keeps the global batch), remat_policy=full (here "
            f"{remat_policy}), num_vocab_tiling for the logits, more devices, over which "
            "ici_fsdp_parallelism=-1 shards the weights, or a smaller model. python -m src.train_compile with these "
            f"keys and compile_topology={where} lists what a step needs, and what would make it fit."
            + (f"\n{note}" if note else "")
        ) from error


class Profile:
    """Profiles `profiler_steps` steps of process 0, after `skip_first_n_steps_for_profiler` steps of this start."""

    def __init__(self, keys: Diagnostics, first_step: int, steps: int, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._begin = first_step + keys.skip_first_n_steps_for_profiler
        self._end = self._begin + keys.profiler_steps
        self._wanted = bool(keys.profiler)
        self._running = False
        # A new run of so few steps is refused (src/config/checks.py), but one that goes on may be near its end.
        if self._wanted and self._end > steps:
            self._wanted = False
            say([f"no profile is written: it would be of steps {self._begin + 1} to {self._end}, and steps={steps}"])

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Marks the body as the dispatch of the step after `step`, which leads on from `state`.

        Before its first step starts, and after its last, the profile waits for `state`: steps are dispatched before
        the devices come to them.
        """
        if self._wanted and step in (self._begin, self._end):
            jax.block_until_ready(state)
            if step == self._end:
                self.close()
            elif jax.process_index() == 0:
                jax.profiler.start_trace(self._folder)
                self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
            yield

    def close(self) -> None:
        """Ends a running profile, at the end of a run whose steps have ended."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
