"""SIGTERM, by which schedulers announce that a machine goes away: the run saves a checkpoint and ends."""

import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Whether the job was asked to end, answered alike by all of its processes at the same step.

    In a job of several processes JAX itself listens for SIGTERM on each, and its coordination service picks a step
    that none of them has passed. In a single process the signal sets a flag here; the handler that was there before
    comes back on `close`. Outside the main thread, where Python allows no handlers, nothing is installed.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._former_handler = None
        # With jax.distributed, a handler of ours would take the signal away from JAX's.
        self._distributed = jax.distributed.is_initialized()
        if not self._distributed and threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, self._on_signal)

    def reached(self, step: int) -> bool:
        """True where the run is to save and end after `step`. All processes call it, after every step."""
        if self._distributed:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._signalled

    def close(self) -> None:
        """Puts the former handler back."""
        if self._former_handler is not None:
            signal.signal(signal.SIGTERM, self._former_handler)
            self._former_handler = None

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self._signalled = True
