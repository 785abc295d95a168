"""Orbax's manager of a run's checkpoints; the first save imports it, as Orbax takes a sixth of a command's imports."""

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from src.checkpoint.run_folder import is_remote

_Atomicity = ocp.options.AtomicityMode


def open_manager(directory: epath.Path, *, async_save: bool, compress: bool) -> ocp.CheckpointManager:
    """Opens the manager of the checkpoints in `directory`; the arguments are `Checkpointer`'s."""
    # A store cannot rename, so there a file that is written last marks a complete checkpoint.
    mode = _Atomicity.COMMIT_FILE if is_remote(directory) else _Atomicity.ATOMIC_RENAME
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=async_save,
        # Otherwise Orbax reads the metadata of every checkpoint at its start, and stops at a damaged one.
        lightweight_initialize=True,
        atomicity_options=ocp.options.AtomicityOptions(mode=mode),
    )
    # Where nothing is copied, arrays of any size can be written (the default limit is 96 GB at once).
    uncompressed = {} if compress else {"use_compression": False, "save_concurrent_gb": 10**6}
    handlers = {"meta": ocp.JsonCheckpointHandler(), "state": ocp.PyTreeCheckpointHandler(**uncompressed)}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def begin_save(manager: ocp.CheckpointManager, step: int, arrays: dict[str, jax.Array], meta: dict[str, Any]) -> None:
    """Begins to write a checkpoint, in the background with `async_save`."""
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta))
    manager.save(step, args=items, force=True)
