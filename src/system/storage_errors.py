"""Classifies errors of disks and stores: transient, no space left, damaged contents, or none of these.

Types and numbers decide, never wording: errno, HTTP status. TensorStore always raises ValueError, so its calls are made
within `tensorstore_errors`, which reads the status code that a message begins with and the errno that it appends.
"""

import contextlib
import enum
import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from src.system.errors import TransientError, UserError, show

T = TypeVar("T")

logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its tracebacks, of errors that it raises all the same

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # before each further attempt
_quiet_until = [0.0]  # of this process's clock: till when no line says that an attempt failed


class Failure(enum.IntEnum):
    """Kinds of failures; where several happened, the largest counts."""

    NONE = 0
    DAMAGED = 1  # the contents are not what was written
    TRANSIENT = 2  # the same call may succeed later
    FULL = 3
    OTHER = 4


class StoreError(Exception):
    """Reports that TensorStore failed, and in which way."""

    def __init__(self, message: str, failure: Failure = Failure.DAMAGED) -> None:
        super().__init__(message)
        self.failure = failure


class DamagedError(StoreError):
    """Reports contents that are not what was written."""


_OF_ERRNO = {
    Failure.DAMAGED: "ENOENT",
    Failure.TRANSIENT: "EIO ESTALE EMFILE ENFILE EAGAIN EINTR EBUSY ENOBUFS EPIPE ETIMEDOUT ECONNRESET ECONNREFUSED "
    "ECONNABORTED ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH EREMOTEIO ENOLINK",
    Failure.FULL: "ENOSPC EDQUOT",
}
# The codes of absl::Status. TensorStore leaves out the name of INVALID_ARGUMENT, which means that it cannot decode
# something.
_OF_STATUS = {
    Failure.DAMAGED: "DATA_LOSS NOT_FOUND OUT_OF_RANGE FAILED_PRECONDITION",
    Failure.TRANSIENT: "UNKNOWN UNAVAILABLE ABORTED DEADLINE_EXCEEDED RESOURCE_EXHAUSTED INTERNAL CANCELLED",
    Failure.OTHER: "PERMISSION_DENIED UNAUTHENTICATED UNIMPLEMENTED ALREADY_EXISTS",
}
ERRNO = {getattr(errno, name): failure for failure, names in _OF_ERRNO.items() for name in names.split()}
STATUS = {name: failure for failure, names in _OF_STATUS.items() for name in names.split()}
HTTP_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


def failure_of(error: BaseException) -> Failure:
    """Returns the kind of failure that `error` is, or the error that it was raised from."""
    if isinstance(error, StoreError):
        return error.failure
    if not isinstance(error, Exception):  # SystemExit has a code too
        return Failure.OTHER
    if isinstance(error, TransientError | TimeoutError | ConnectionError | socket.gaierror):
        return Failure.TRANSIENT
    if isinstance(error, OSError) and (error.errno or -1) > 0:  # a failed look-up of a host's name has its own below 0
        return ERRNO.get(error.errno, Failure.OTHER)
    http = getattr(error, "status", None) or getattr(error, "code", None)  # aiohttp's; gcsfs's, which may be a text
    if str(http).isdecimal():
        return Failure.TRANSIENT if int(http) in HTTP_TRANSIENT else Failure.OTHER
    if isinstance(error, FileNotFoundError):  # fsspec's have no errno
        return Failure.DAMAGED
    # Such as a connection that was closed, or a place for tokens that is not reached.
    if type(error).__module__.partition(".")[0] == "aiohttp" or type(error).__name__ == "TransportError":
        return Failure.TRANSIENT
    return failure_of(error.__cause__) if error.__cause__ else Failure.OTHER


@contextlib.contextmanager
def tensorstore_errors() -> Iterator[None]:
    """Raises StoreError for what TensorStore, called in the block, raises as ValueError."""
    try:
        yield
    except ValueError as error:
        failure = STATUS.get(str(error).partition(":")[0], Failure.DAMAGED)  # no status: something cannot be decoded
        if number := re.search(r"\[os_error_code='(\d+)'", str(error)):
            failure = ERRNO.get(int(number[1]), Failure.OTHER)
        raise StoreError(one_line(error), failure) from error


def tensorstore_result(future: Any) -> Any:
    """Returns a TensorStore future's result; raises StoreError."""
    with tensorstore_errors():
        return future.result()


def retried(attempt: Callable[[], T]) -> T:
    """Returns `attempt()`, repeated with pauses while it fails transiently; raises the last attempt's error.

    It is not repeated after as long as all pauses: a store's client has tried again by then. A line says that it is
    repeated, at most once a minute: threads that read ahead fail together.
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
                show(f"a disk or store failed, and is asked again ({one_line(error)})")
            time.sleep(seconds)
    return attempt()


def attempted(what: str, use: Callable[[], T], otherwise: str = "can't be read") -> T:
    """Returns `use()`, which reads from a disk or a store; several attempts are made where failures may pass.

    Raises TransientError where such a failure stayed, and UserError for anything else, which stores and libraries each
    have errors of their own for. Messages begin with `what`; `otherwise` is what to say of it.
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
    """Returns the error's type and the beginning of its message, in one line."""
    message = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0]
    if isinstance(error, StoreError):
        return message
    return f"{type(error).__name__}: {message}"[:300]
