"""Keeps quiet what Orbax tells nobody who can act on it, while a run saves checkpoints."""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drops Orbax's warnings, and what a save that failed leaves to asyncio; Orbax's errors are logged as ever."""

    def is_for_users(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "orbax" not in record.pathname

    def is_critical(record: logging.LogRecord) -> bool:
        # After a failed write, the remaining writes report to an event loop that is closed by then.
        return record.levelno >= logging.CRITICAL

    def hook(unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        if unraisable.exc_type is not RuntimeError or not trace or "asyncio" not in trace.tb_frame.f_code.co_filename:
            before(unraisable)

    before = sys.unraisablehook
    sys.unraisablehook = hook
    filters = {"absl": is_for_users, "asyncio": is_critical}
    for logger, keeps in filters.items():
        logging.getLogger(logger).addFilter(keeps)
    try:
        yield
    finally:
        gc.collect()  # writes without a loop report as they are deleted
        for logger, keeps in filters.items():
            logging.getLogger(logger).removeFilter(keeps)
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
