"""Handles SIGTERM, by which schedulers announce a machine's end, and Ctrl-C: the run saves a checkpoint and ends."""

import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils

from src.checkpoint.run_folder import describe_latest
from src.system.errors import INTERRUPTED, TRY_AGAIN
from src.system.exit_codes import end

HANG_SECONDS = 15.0  # for which a run that was asked to end waits for its data
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"  # JAX's key of a job, set once a process got SIGTERM


class Preemption:
    """Knows whether the job was asked to end; all of its processes get the same answer at the same step.

    In a job of several processes JAX itself listens for SIGTERM in each, and its coordination service picks a step
    that none of them has passed; Ctrl-C is passed on as SIGTERM. A single process sets a flag here. Ctrl-C after
    either ends the process at once, with a line about the checkpoint in `folder`. Outside the main thread, where Python
    allows no handlers, nothing is installed.

    A run whose data do not come never gets to the next step. If it was asked to end, it ends all the same; a single
    process saves before that, by `save`.
    """

    save: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, folder: Path | None = None) -> None:
        self.signal = 0  # the one that this process received
        self._folder = folder
        self._distributed = jax.distributed.is_initialized()
        self._waits_since, self._longest_wait, self._waiting = math.inf, 0.0, threading.Lock()
        self._former: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        # With jax.distributed, a handler of ours would take SIGTERM away from JAX's.
        for number in (signal.SIGINT,) if self._distributed else (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._on_signal)
        # Python's handlers run once the main thread is back from C++, maybe after minutes of compiling. The byte that
        # the C handler writes to this pipe is read by a thread at once.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()
        self._closed = threading.Event()
        threading.Thread(target=self._end_hanging_wait, name="hang", daemon=True).start()

    @contextlib.contextmanager
    def waits_for_data(self) -> Iterator[None]:
        """Takes note that the body waits for the data of the next step."""
        self._waits_since = begin = time.monotonic()
        try:
            yield
        finally:
            with self._waiting:  # held for good by a thread that saves, and then ends the run
                self._waits_since = math.inf
            self._longest_wait = max(self._longest_wait, time.monotonic() - begin)

    def reached(self, step: int) -> bool:
        """Returns whether the run has to save and end after `step`. All processes call it, after every step."""
        if self._distributed:
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self.signal)

    def close(self) -> None:
        """Restores the former handlers."""
        if not self._former:
            return
        self._closed.set()
        signal.set_wakeup_fd(self._former_writer)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal_number

    def _end_hanging_wait(self) -> None:
        """Ends the run if it was asked to end, and has waited for its data since, or before that, for too long."""
        asked = math.inf
        while not self._closed.wait(0.5):
            bound = max(HANG_SECONDS, 3 * self._longest_wait)  # what is slow does not hang
            if time.monotonic() < self._waits_since + 1:
                continue
            asked = min(asked, time.monotonic() if self._is_asked() else math.inf)
            if time.monotonic() < max(asked, self._waits_since) + bound:
                continue
            self._waiting.acquire()
            if self._waits_since == math.inf:  # they came at last
                self._waiting.release()
                continue
            with contextlib.suppress(Exception):  # the run ends as it was asked to
                if not self._distributed:  # the others wait in a step
                    self.save()
            note = f"; {describe_latest(self._folder)}" if self._folder else ""
            hung = f"asked to end, and its data have not come for {bound:.0f} s"
            end(TRY_AGAIN, f"{hung}: what reads them hangs{note}", at_once=True)

    def _is_asked(self) -> bool:
        if not self._distributed:
            return bool(self.signal)
        with contextlib.suppress(Exception):  # there is no such key yet
            client = importlib.import_module("jax._src.distributed").global_state.client
            return bool(client.key_value_try_get(_NOTICE))
        return False

    def _answer(self) -> None:
        """Says what Ctrl-C does, passes it on to JAX in a job of several, and ends the process at the second one."""
        asked = False
        while number := os.read(self._reader, 1)[0]:
            if number == signal.SIGINT and asked:
                note = f"; {describe_latest(self._folder)}" if self._folder else ""
                end(INTERRUPTED, f"interrupted{note}", at_once=True)
            if number == signal.SIGINT:
                print("Ctrl-C: the run ends after this step; once more ends it at once", file=sys.stderr, flush=True)
                if self._distributed:
                    os.kill(os.getpid(), signal.SIGTERM)
            asked = asked or number in (signal.SIGINT, signal.SIGTERM)
