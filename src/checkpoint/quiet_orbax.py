"""Keeps quiet what Orbax tells nobody who can act on it, while a run saves checkpoints: it raises its errors too."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drops Orbax's log, with the tracebacks of each of its threads, and what a save that failed leaves to asyncio."""

    def is_for_users(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL or "orbax" not in record.pathname

    def is_critical(record: logging.LogRecord) -> bool:
        # After a failed write, the remaining writes report to an event loop that is closed by then.
        return record.levelno >= logging.CRITICAL

    def hook(unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        if not trace or "asyncio" not in trace.tb_frame.f_code.co_filename:
            before(unraisable)

    before = sys.unraisablehook
    sys.unraisablehook = hook
    filters = {"absl": is_for_users, "asyncio": is_critical}
    for logger, keeps in filters.items():
        logging.getLogger(logger).addFilter(keeps)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    try:
        yield
    finally:
        gc.collect()  # writes without a loop report as they are deleted
        if not sys.exception():  # which keeps some that report when the process ends
            for logger, keeps in filters.items():
                logging.getLogger(logger).removeFilter(keeps)
            if sys.unraisablehook is hook:
                sys.unraisablehook = before
