"""Reads the documents of a remote source before packing streams ask for them: each is a request, which mostly waits."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_THREADS = 128  # requests at a time
_DEPTH = 6  # documents ahead of each packing stream

Result = TypeVar("Result")


class ReadAhead:
    """Calls `read(ordinal)`, and in threads those of the next ordinals of the same stream, `stride` apart, below `end`.

    Streams may call from threads of their own. An error is raised where its ordinal is asked for.
    """

    def __init__(self, read: Callable[[int], Result], stride: int, end: float) -> None:
        self._read, self._stride, self._end = read, stride, end
        self._start()

    def __call__(self, ordinal: int) -> Result:
        """Returns `read(ordinal)`."""
        for coming in range(ordinal, ordinal + (_DEPTH + 1) * self._stride, self._stride):
            if coming not in self._begun and coming < self._end:
                self._begun[coming] = self._pool.submit(self._read, coming)
        return self._begun.pop(ordinal).result()

    def close(self) -> None:
        """Drops what is not read yet; a later call begins anew.

        Reads that are waiting would otherwise be made before the process ends, each of them again and again where the
        store fails.
        """
        pool = self._pool
        self._start()
        pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")  # whose threads start with calls
        self._begun: dict[int, Future[Result]] = {}
