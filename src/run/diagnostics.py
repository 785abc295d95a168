"""Helps with runs that hang, crash, are slow or too large: stack traces, profiles, reports, advice on memory."""

import contextlib
import faulthandler
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import numpy as np

from src.checkpoint.run_folder import RunFolder, is_remote
from src.config.command_keys import Diagnostics
from src.data.types import Rows
from src.system.errors import TRY_AGAIN, UserError, say, show
from src.system.exit_codes import end

# Steps of a start before hangs are watched for: the first one compiles, and with pgle=auto a later one too.
TIMED_STEPS = 10
_GRACE_SECONDS = 10  # until hang_action=exit ends the process, so that all processes can write and upload reports


def stack_traces(keys: Diagnostics) -> contextlib.AbstractContextManager[None]:
    """Returns a context that writes all threads' stacks at an interval, on SIGUSR1 and on a crash, if `keys` say so.

    Entering it raises as `stack_traces.written` does.
    """
    if not keys.collect_stack_trace:
        return contextlib.nullcontext()
    from src.extras.stack_traces import written

    return written(keys)


@contextlib.contextmanager
def advice_on_memory(per_device_batch_size: float, remat_policy: str) -> Generator[None]:
    """Raises UserError with advice if a device or the host runs out of memory in the body."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error).strip().partition("\n\n")[0]
        # VMEM, the memory of a core, may be too small for a kernel whatever the size of the batch.
        if not message.startswith("RESOURCE_EXHAUSTED") or "vmem" in message.lower():
            raise
        where = f"cpu-{jax.device_count()}" if jax.default_backend() == "cpu" else "these devices, such as v5p-8"
        note = getattr(error, "latest_checkpoint", "")  # set by `Saver` or checkpoint.run_folder.in_run_folder
        raise UserError(
            f"memory is full, on {jax.device_count()} x {jax.devices()[0].device_kind}. JAX says: {message}\n"
            f"What helps: a smaller per_device_batch_size (here {per_device_batch_size:g}; "
            "gradient_accumulation_steps keeps the global batch), remat_policy=full (here "
            f"{remat_policy}), num_vocab_tiling for the logits, more devices, over which "
            "ici_fsdp_parallelism=-1 shards the weights, or a smaller model. python -m src.train_compile with these "
            f"keys and compile_topology={where} lists what a step needs, and what would make it fit."
            + (f"\n{note}" if note else "")
        ) from error


class Profile:
    """Profiles `profiler_steps` steps in process 0, after `skip_first_n_steps_for_profiler` steps of this start.

    Writes the profile into `folder`/tensorboard. Without `profiler` does nothing; if the run has fewer steps left,
    prints a line and writes no profile.
    """

    def __init__(self, keys: Diagnostics, first_step: int, steps: int, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._begin = first_step + keys.skip_first_n_steps_for_profiler
        self._end = self._begin + keys.profiler_steps
        self._wanted, self._running = bool(keys.profiler) and self._end <= steps, False
        # A new run with fewer steps is refused (optional_checks.profile), but a resumed run may be near its end.
        if keys.profiler and not self._wanted:
            say([f"no profile is written: it would cover steps {self._begin + 1} to {self._end}, but steps={steps}"])

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Generator[None]:
        """Marks the body as the dispatch of the step after `step`, which starts from `state`.

        The profile waits for `state` before its first step and after its last, because steps are dispatched before the
        devices execute them.
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
        """Ends a running profile; call it once the devices have finished the steps."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


class Watchdog:
    """Reports a hang, in a thread, if a step exceeds both `hang_after_steps` median times and `hang_after_seconds`.

    Every process of a job watches its own loop and writes its own file; with `hang_action=exit` it then ends.
    Evaluations and saves (`pause`) and the first steps of a start are not watched. C code that holds Python's lock
    blocks this thread too, so a hang there is not noticed.
    """

    def __init__(self, keys: Diagnostics, folder: RunFolder, rows: Rows, sources: Sequence[str]) -> None:
        """`rows`: this host's packing streams, or rows of a full batch. `sources`: the names of the S sources."""
        self._keys, self._folder, self._rows, self._sources = keys, folder, rows, sources
        self._times: deque[float] = deque(maxlen=100)
        # When the last step ended, the watched wait began, and the reported wait began; 0: not at present.
        self._last = self._begin = self._reported = 0.0
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self._keys.hang_after_steps:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def step(self, dispatched: int, rows_taken: int, stream_positions: np.ndarray) -> None:
        """Records that step `dispatched` - 1 has ended, while step `dispatched` runs; says so if it seemed to hang.

        For reports: after the batch of step `dispatched`, the run has taken `rows_taken` rows, and this host's packing
        streams continue at `stream_positions`: [streams, S, 2], a document and a token in each source.
        """
        now = time.monotonic()
        if self._last:
            self._times.append(now - self._last)
        if self._reported and self._reported == self._begin:
            print(f"step {dispatched - 1} ended after {now - self._begin:,.0f} s: it was slow, not a hang", flush=True)
        self._at = (dispatched, rows_taken, stream_positions)
        self.resume()

    def pause(self) -> None:
        """Stops watching until `resume`, for work that is not a step."""
        self._last = self._begin = 0.0

    def resume(self) -> None:
        """Starts watching for the end of the next step, from now on."""
        self._last = time.monotonic()
        if len(self._times) >= TIMED_STEPS:
            least = self._keys.hang_after_seconds
            self._limit = max(self._keys.hang_after_steps * statistics.median(self._times), least)
            self._begin = self._last

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._keys.hang_after_seconds / 10)):
            begin = self._begin
            if begin not in (0.0, self._reported) and (seconds := time.monotonic() - begin) > self._limit:
                self._reported = begin
                if self._keys.hang_action == "exit":  # by a timer, because the report itself may hang or fail
                    timer = threading.Timer(_GRACE_SECONDS, self._exit, [begin])
                    timer.daemon = True
                    timer.start()
                self._report(f"no step has ended for {seconds:,.0f} s")

    def _exit(self, begin: float) -> None:
        if self._begin == begin and not self._closed.is_set():
            end(TRY_AGAIN, "error: a hang, and hang_action=exit: run the same command to resume", at_once=True)

    def _report(self, problem: str) -> None:
        """Writes hang-*.txt to the run's folder, or to stderr if that fails, and prints its location."""
        process = jax.process_index()
        name = time.strftime(f"hang-%Y-%m-%d-%H-%M-%S-process-{process}.txt")
        local, where = self._folder.local / name, self._folder.path / name
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with local.open("x", encoding="utf-8") as out:
                self._describe(problem, out)
        except Exception as error:  # keep watching even if the report fails
            where = f"stderr, because {where} cannot be written: {error}"
            self._describe(problem, sys.stderr)
        else:
            if is_remote(self._folder.path):  # in a thread, because the store may be the one that does not answer
                threading.Thread(target=lambda: where.write_text(local.read_text("utf-8")), daemon=True).start()
        show(f"process {process}: {problem}: stacks, data position and device memory are in {where}")

    def _describe(self, problem: str, out: TextIO) -> None:
        """Prints the stacks of all threads, the position in the data, and the devices' memory."""
        dispatched, rows_taken, positions = self._at
        lines = [
            f"{socket.gethostname()}, process {jax.process_index()}: {problem}, at {time.strftime('%F %T %z')}.",
            f"Step {dispatched - 1} has ended, step {dispatched} was dispatched; the limit is {self._limit:.3g} s.",
            f"\nThe run has taken {rows_taken:,} rows. Each of this host's rows continues with",
        ]
        for row, places in zip(self._rows, positions.tolist(), strict=True):
            pairs = zip(self._sources, places, strict=True)
            lines.append(f"  row {row}: {'; '.join(f'{s} document {n}, token {t}'.strip() for s, (n, t) in pairs)}")
        lines += ["\nThreads", *(f"  {thread.ident or 0:#018x} {thread.name}" for thread in threading.enumerate())]
        print(*lines, sep="\n", file=out, flush=True)
        faulthandler.dump_traceback(out, all_threads=True)
        print("\nDevice memory", file=out, flush=True)  # last, because the devices may not answer
        for device in jax.local_devices():
            try:
                stats = device.memory_stats() or {}
                known = [f"{name} {size / 2**30:.2f} GiB" for name, size in stats.items() if "bytes" in name]
            except Exception as error:  # the device has failed, which may be why the step hangs
                known = [f"{type(error).__name__}: {error}"]
            print(f"  {device}: {', '.join(known) or 'not reported'}", file=out, flush=True)
