"""Handles SIGTERM, which schedulers send before they take a machine, and Ctrl-C: saves a checkpoint, ends the run."""

import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils

from src.checkpoint.run_folder import describe_latest
from src.system.errors import INTERRUPTED, TRY_AGAIN
from src.system.exit_codes import end

HANG_SECONDS = 15.0  # the least time that a run waits for its data after a request to end
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"  # JAX sets this key of its store once a process of the job receives SIGTERM


class Preemption:
    """Tracks whether the job was asked to end; all of its processes get the same answer at the same step.

    In a job of several processes JAX itself listens for SIGTERM in each, and its coordination service picks a step
    that none of them has passed; Ctrl-C is passed on as SIGTERM. A single process sets a flag here. Ctrl-C after
    either ends the process at once, with a line about the checkpoint in `folder`. Nothing is installed outside the
    main thread, because Python allows no handlers there.

    A run that hangs while it waits for data never reaches the next step. If it was asked to end, it is ended anyway; a
    single process first calls `save`.
    """

    save: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, folder: epath.Path | None = None) -> None:
        self.signal = 0  # the first signal that this process received
        self._folder = folder
        self._distributed = jax.distributed.is_initialized()
        self._waits_since, self._longest_wait, self._waiting = math.inf, 0.0, threading.Lock()
        self._former: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        # With jax.distributed, a handler here would replace JAX's SIGTERM handler.
        for number in (signal.SIGINT,) if self._distributed else (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._on_signal)
        # Python's handlers run only when the main thread returns from C++, perhaps after minutes of compiling. The C
        # handler writes a byte to this pipe, which a thread reads at once.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()
        self._closed = threading.Event()
        threading.Thread(target=self._end_hanging_wait, name="hang", daemon=True).start()

    @contextlib.contextmanager
    def waits_for_data(self) -> Generator[None]:
        """Marks the body as the wait for the next step's data."""
        self._waits_since = begin = time.monotonic()
        try:
            yield
        finally:
            with self._waiting:  # `_end_hanging_wait` keeps this lock while it saves and ends the run
                self._waits_since = math.inf
            self._longest_wait = max(self._longest_wait, time.monotonic() - begin)

    def reached(self, step: int) -> bool:
        """Tells whether the run has to save and end after `step`. All processes must call it after every step."""
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
        """Ends the run if it was asked to end and still waits for data long after the request and the wait's start."""
        asked = math.inf
        while not self._closed.wait(0.5):
            bound = max(HANG_SECONDS, 3 * self._longest_wait)  # slow data is not a hang
            if time.monotonic() < self._waits_since + 1:
                continue
            asked = min(asked, time.monotonic() if self._is_asked() else math.inf)
            if time.monotonic() < max(asked, self._waits_since) + bound:
                continue
            self._waiting.acquire()
            if self._waits_since == math.inf:  # the data arrived after all
                self._waiting.release()
                continue
            with contextlib.suppress(Exception):  # the run ends even if saving fails
                if not self._distributed:  # the other processes are blocked in a step and cannot save
                    self.save()
            self._end(TRY_AGAIN, f"asked to end, but no data has arrived for {bound:.0f} s: the data reader hangs")

    def _end(self, code: int, message: str) -> None:
        end(code, message + (f"; {describe_latest(self._folder)}" if self._folder else ""), at_once=True)

    def _is_asked(self) -> bool:
        if not self._distributed:
            return bool(self.signal)
        with contextlib.suppress(Exception):  # the key is not set yet
            client = importlib.import_module("jax._src.distributed").global_state.client
            return bool(client.key_value_try_get(_NOTICE))
        return False

    def _answer(self) -> None:
        """Explains a first Ctrl-C and passes it on to JAX in a job of several; one after a signal ends the process."""
        asked = False
        while number := os.read(self._reader, 1)[0]:
            if number == signal.SIGINT and asked:
                self._end(INTERRUPTED, "interrupted")
            if number == signal.SIGINT:
                note = "Finishing this step, then saving. Press Ctrl-C again to stop immediately."
                print(note, file=sys.stderr, flush=True)
                if self._distributed:
                    os.kill(os.getpid(), signal.SIGTERM)
            asked = asked or number in (signal.SIGINT, signal.SIGTERM)
