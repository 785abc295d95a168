"""Notices that a run hangs, and writes what its threads do, where in the data it is and how full its devices are."""

import faulthandler
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self, TextIO

import jax
import numpy as np

from src.checkpoint.run_folder import RunFolder, is_remote
from src.cli import end
from src.config.command_keys import Diagnostics
from src.errors import TRY_AGAIN, show

TIMED_STEPS = 10  # of a start, before a step is watched: the first compiles, and with pgle=auto a later one too
_GRACE_SECONDS = 10  # before hang_action=exit: to write the file, for a store to take it, and for other processes


class Watchdog:
    """Watches in a thread that steps go on, each within `hang_after_steps` median times or `hang_after_seconds`.

    Every process of a job watches its own loop and writes a file of its own. Not watched are evaluations and saves
    (`pause`) and the first steps of a start; nor is what blocks the thread too: C code that keeps Python's lock.
    """

    def __init__(self, keys: Diagnostics, folder: RunFolder, rows: Sequence[int], sources: Sequence[str]) -> None:
        """Takes the run's folder, which of a batch's rows are this host's, and the names of the S sources."""
        self._keys, self._folder, self._rows, self._sources = keys, folder, rows, sources
        self._times: deque[float] = deque(maxlen=100)
        self._last = self._begin = self._reported = 0.0  # when a step ended, was begun to be watched; 0: not now
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self._keys.hang_after_steps:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def step(self, dispatched: int, rows_taken: int, stream_positions: np.ndarray) -> None:
        """Takes note that the step before `dispatched` has ended; data go on at `stream_positions`, [rows, S, 2]."""
        now = time.monotonic()
        if self._last:
            self._times.append(now - self._last)
        if self._reported and self._reported == self._begin:
            print(f"step {dispatched - 1} ended after {now - self._begin:,.0f} s: it was slow, no hang", flush=True)
        self._at = (dispatched, rows_taken, stream_positions)
        self.resume()

    def pause(self) -> None:
        """Stops watching until `resume`: what comes is no step."""
        self._last = self._begin = 0.0

    def resume(self) -> None:
        """Watches the wait for the next step's end, which begins now."""
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
                if self._keys.hang_action == "exit":  # in a thread, because the report itself may hang or fail
                    timer = threading.Timer(_GRACE_SECONDS, self._exit, [begin])
                    timer.daemon = True
                    timer.start()
                self._report(f"no step has ended for {seconds:,.0f} s")

    def _exit(self, begin: float) -> None:
        if self._begin == begin and not self._closed.is_set():
            end(TRY_AGAIN, "error: a hang, and hang_action=exit: the same command goes on", at_once=True)

    def _report(self, problem: str) -> None:
        process = jax.process_index()
        name = time.strftime(f"hang-%Y-%m-%d-%H-%M-%S-process-{process}.txt")
        local, where = self._folder.local / name, self._folder.path / name
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with local.open("x", encoding="utf-8") as out:
                self._write(problem, out)
        except Exception as error:  # a report that fails is no reason to stop watching
            where = f"stderr, for {where} cannot be written: {error}"
            self._write(problem, sys.stderr)
        else:
            if is_remote(self._folder.path):  # in a thread, because the store may be what does not answer
                threading.Thread(target=lambda: where.write_text(local.read_text("utf-8")), daemon=True).start()
        show(f"process {process}: {problem}: stacks, data position and device memory are in {where}")

    def _write(self, problem: str, out: TextIO) -> None:
        dispatched, rows_taken, positions = self._at
        lines = [
            f"{socket.gethostname()}, process {jax.process_index()}: {problem}, at {time.strftime('%F %T %z')}.",
            f"Step {dispatched - 1} has ended, step {dispatched} was dispatched; a hang is {self._limit:.3g} s.",
            f"\nThe run has taken {rows_taken:,} rows; then, in each of this host's rows, come",
        ]
        for row, places in zip(self._rows, positions.tolist(), strict=True):
            pairs = zip(self._sources, places, strict=True)
            lines.append(f"  row {row}: {'; '.join(f'{s} document {n}, token {t}'.strip() for s, (n, t) in pairs)}")
        lines += ["\nThreads", *(f"  {thread.ident or 0:#018x} {thread.name}" for thread in threading.enumerate())]
        print(*lines, sep="\n", file=out, flush=True)
        faulthandler.dump_traceback(out, all_threads=True)
        print("\nDevice memory", file=out, flush=True)  # last, for it asks the devices
        for device in jax.local_devices():
            try:
                stats = device.memory_stats() or {}
                known = [f"{name} {size / 2**30:.2f} GiB" for name, size in stats.items() if "bytes" in name]
            except Exception as error:  # of a device that has failed, which may be why the step hangs
                known = [f"{type(error).__name__}: {error}"]
            print(f"  {device}: {', '.join(known) or 'it does not say'}", file=out, flush=True)
