"""Opens Orbax's checkpoint manager, whose import takes a sixth of a command's import time.

`Checkpointer` therefore imports this module only if a run saves, while devices compute its first step.
"""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Generator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from src.checkpoint.run_folder import is_remote


def open_manager(directory: epath.Path, *, async_save: bool, compress: bool) -> ocp.CheckpointManager:
    """Opens a manager of the checkpoints in `directory`; the arguments are as in `Checkpointer`."""
    # Stores cannot rename, so a file that is written last marks a complete checkpoint there.
    mode = ocp.options.AtomicityMode.COMMIT_FILE if is_remote(directory) else ocp.options.AtomicityMode.ATOMIC_RENAME
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=async_save,
        # Otherwise Orbax reads the metadata of every checkpoint at the start, and fails on a damaged one.
        lightweight_initialize=True,
        atomicity_options=ocp.options.AtomicityOptions(mode=mode),
    )
    # Nothing is copied without compression, so the size of concurrent writes need not be limited (default: 96 GB).
    uncompressed: dict[str, Any] = {} if compress else {"use_compression": False, "save_concurrent_gb": 10**6}
    handlers = {"meta": ocp.JsonCheckpointHandler(), "state": ocp.PyTreeCheckpointHandler(**uncompressed)}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def begin_save(manager: ocp.CheckpointManager, step: int, arrays: dict[str, jax.Array], meta: dict[str, Any]) -> None:
    """Begins to write a checkpoint, in the background with `async_save`."""
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta))
    manager.save(step, args=items, force=True)


@contextlib.contextmanager
def quiet_orbax() -> Generator[None]:
    """Silences Orbax's log, with its threads' tracebacks, and the errors that a failed save leaves in asyncio."""

    def is_for_users(record: logging.LogRecord) -> bool:
        # After a failed write, the remaining writes report errors to asyncio's event loop, which is closed by then.
        is_orbax = "orbax" in record.pathname or record.name == "asyncio"
        return record.levelno >= logging.CRITICAL or not is_orbax

    def hook(unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        if not trace or "asyncio" not in trace.tb_frame.f_code.co_filename:
            before(unraisable)

    before = sys.unraisablehook
    sys.unraisablehook = hook
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(is_for_users)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    try:
        yield
    finally:
        gc.collect()  # writes that no event loop runs report errors when they are deleted: delete them while silenced
        if not sys.exception():  # an exception keeps such writes alive until exit: stay silenced
            for logger in loggers:
                logger.removeFilter(is_for_users)
            if sys.unraisablehook is hook:
                sys.unraisablehook = before
