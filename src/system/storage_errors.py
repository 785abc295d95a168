"""Classifies errors of disks and stores: transient, no space left, damaged contents, or other.

Uses types and numbers (errno, HTTP status), never wording. TensorStore always raises ValueError, so it is called within
`tensorstore_errors`, which reads the status code at the beginning of a message and the errno that is appended to it.
"""

import contextlib
import enum
import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from src.system.errors import TransientError, UserError, show

T = TypeVar("T")

logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it also raises

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # the pause before each further attempt
_quiet_until = [0.0]  # on the monotonic clock: before it, failed attempts are not reported


class Failure(enum.IntEnum):
    """Kinds of failures, in increasing order: if several happen, the largest counts."""

    NONE = 0
    DAMAGED = 1  # the contents are missing, or differ from those written
    TRANSIENT = 2  # the same call may succeed later
    FULL = 3
    OTHER = 4


class StoreError(Exception):
    """Reports a failure of TensorStore and its kind."""

    def __init__(self, message: str, failure: Failure = Failure.DAMAGED) -> None:
        super().__init__(message)
        self.failure = failure


class DamagedError(StoreError):
    """Reports contents that are missing, or differ from those written."""


_OF_ERRNO = {
    Failure.DAMAGED: "ENOENT",
    Failure.TRANSIENT: "EIO ESTALE EMFILE ENFILE EAGAIN EINTR EBUSY ENOBUFS EPIPE ETIMEDOUT ECONNRESET ECONNREFUSED "
    "ECONNABORTED ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH EREMOTEIO ENOLINK",
    Failure.FULL: "ENOSPC EDQUOT",
}
# The codes of absl::Status. TensorStore omits the name of INVALID_ARGUMENT, which means that decoding failed.
_OF_STATUS = {
    Failure.DAMAGED: "DATA_LOSS NOT_FOUND OUT_OF_RANGE FAILED_PRECONDITION",
    Failure.TRANSIENT: "UNKNOWN UNAVAILABLE ABORTED DEADLINE_EXCEEDED RESOURCE_EXHAUSTED INTERNAL CANCELLED",
    Failure.OTHER: "PERMISSION_DENIED UNAUTHENTICATED UNIMPLEMENTED ALREADY_EXISTS",
}
ERRNO = {getattr(errno, name): failure for failure, names in _OF_ERRNO.items() for name in names.split()}
STATUS = {name: failure for failure, names in _OF_STATUS.items() for name in names.split()}
HTTP_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


def failure_of(error: BaseException) -> Failure:
    """Classifies `error`, or the error that it was raised from."""
    if isinstance(error, StoreError):
        return error.failure
    if not isinstance(error, Exception):  # SystemExit has a `code` too, not an HTTP status
        return Failure.OTHER
    if isinstance(error, TransientError | TimeoutError | ConnectionError | socket.gaierror):
        return Failure.TRANSIENT
    if isinstance(error, OSError) and (error.errno or -1) > 0:  # failed host lookups have negative numbers
        return ERRNO.get(error.errno, Failure.OTHER)
    # The HTTP status: `status` in aiohttp's errors, `code` in gcsfs's, there sometimes a string.
    http: Any = getattr(error, "status", None) or getattr(error, "code", None)
    if str(http).isdecimal():
        return Failure.TRANSIENT if int(http) in HTTP_TRANSIENT else Failure.OTHER
    if isinstance(error, FileNotFoundError):  # fsspec raises it without errno
        return Failure.DAMAGED
    # A closed connection (aiohttp's errors without a status), or an unreachable token server (TransportError).
    if type(error).__module__.partition(".")[0] == "aiohttp" or type(error).__name__ == "TransportError":
        return Failure.TRANSIENT
    return failure_of(error.__cause__) if error.__cause__ else Failure.OTHER


@contextlib.contextmanager
def tensorstore_errors() -> Generator[None]:
    """Converts the ValueErrors that TensorStore raises in the block to StoreError."""
    try:
        yield
    except ValueError as error:
        failure = STATUS.get(str(error).partition(":")[0], Failure.DAMAGED)  # no status: decoding failed
        if number := re.search(r"\[os_error_code='(\d+)'", str(error)):
            failure = ERRNO.get(int(number[1]), Failure.OTHER)
        raise StoreError(one_line(error), failure) from error


def tensorstore_result(future: Any) -> Any:
    """Waits for a TensorStore future and returns its result; raises StoreError if it failed."""
    with tensorstore_errors():
        return future.result()


def retried(attempt: Callable[[], T]) -> T:
    """Calls `attempt` and returns its result; repeats it after pauses while it fails transiently.

    Raises the last attempt's error: after four repetitions, or once an attempt fails later than the sum of all pauses,
    because a slow store's client has retried by then. Prints a line for a repetition, but at most once a minute,
    because threads that read ahead fail together.
    """
    begin = time.monotonic()
    for seconds in RETRY_SECONDS:
        try:
            return attempt()
        except Exception as error:
            if failure_of(error) is not Failure.TRANSIENT or time.monotonic() - begin > sum(RETRY_SECONDS):
                raise
            if time.monotonic() > _quiet_until[0]:
                _quiet_until[0] = time.monotonic() + 60
                show(f"a disk or store failed; trying again ({one_line(error)})")
            time.sleep(seconds)
    return attempt()


def attempted(what: str, use: Callable[[], T], otherwise: str = "can't be read") -> T:
    """Calls `use`, which reads from a disk or a store, and returns its result; repeats it as `retried` does.

    Raises TransientError if a transient failure persists, and UserError for any other error, whose types vary between
    stores and libraries, except ImportError. Messages begin with `what`; the UserError's continues with `otherwise`.
    """
    try:
        return retried(use)
    except (UserError, TransientError, ImportError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if failure_of(error) is Failure.TRANSIENT:
            raise TransientError(f"{what} can't be read, after several attempts: {reason}") from error
        raise UserError(f"{what} {otherwise}: {reason}") from error


def one_line(error: BaseException) -> str:
    """Formats the error's type, except for a StoreError, and the beginning of its message in one line."""
    message = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0]
    if isinstance(error, StoreError):
        return message
    return f"{type(error).__name__}: {message}"[:300]
