"""Saves a run's checkpoints through Orbax while training goes on.

Orbax writes `<directory>/<step>/` with two items: `state`, the arrays under dotted names, and `meta`, a JSON object
with the caller's values and each array's shape, dtype and digest, which src/checkpoint/restore.py compares.
"""

import contextlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from src.checkpoint.digest import digests
from src.checkpoint.restore import Restored, checksum_of, flatten, on_all_processes, restore_newest
from src.checkpoint.run_folder import absolute, is_remote, is_unfinished, steps_in
from src.errors import TransientError, UserError
from src.storage_errors import Failure, failure_of, one_line, retried

AtomicityMode = ocp.options.AtomicityMode


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    Nothing is created, renamed or deleted before the first `save`. All processes of a job make the same calls.

    Args:
        directory: the run's checkpoints/ folder, local or any other path that etils reads.
        max_to_keep: how many checkpoints are kept; -1: all.
        async_save: files are written while the caller goes on.
        compress: makes files smaller by about a quarter; without it arrays in host memory are not copied.
    """

    def __init__(self, directory: epath.PathLike, *, max_to_keep: int, async_save: bool, compress: bool = True) -> None:
        self._directory = absolute(directory)
        self._max_to_keep = max_to_keep
        self._options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=async_save,
            cleanup_tmp_directories=True,
            # Otherwise Orbax reads the metadata of every checkpoint at its start, and stops at a damaged one.
            lightweight_initialize=True,
            # A store cannot rename, so there a file that is written last marks a complete checkpoint.
            atomicity_options=ocp.options.AtomicityOptions(
                mode=AtomicityMode.COMMIT_FILE if is_remote(self._directory) else AtomicityMode.ATOMIC_RENAME
            ),
        )
        self._handlers = {"meta": ocp.JsonCheckpointHandler(), "state": ocp.PyTreeCheckpointHandler()}
        if not compress:
            # As nothing is copied, arrays of any size can be written (the default limit is 96 GB at once).
            self._handlers["state"] = ocp.PyTreeCheckpointHandler(use_compression=False, save_concurrent_gb=10**6)
        self._manager: ocp.CheckpointManager | None = None
        self._damaged_steps: list[int] = []
        self._saved_steps: list[int] = []
        self._unwritten: tuple[int, dict[str, jax.Array], dict[str, Any]] | None = None  # until known to be complete
        self._last_was_missed = False
        self._deleter = ThreadPoolExecutor(max_workers=8)
        self._deletions: dict[int, Future[None]] = {}

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> list[str]:
        """Saves a state and its `meta`, any JSON object. The state's arrays may be donated once this returns.

        Deletes all but `max_to_keep` of the earlier checkpoints, in the background: the caller has seen that their
        weights are good. So a running run has one more, whose weights have not been used yet.

        Returns:
            messages for the user.

        Raises:
            UserError: this checkpoint or the last one could not be written, or something is in its place.
            TransientError: this one could not be written after several attempts, or two in turn could not.
        """
        messages = self._end_last_save(step)
        arrays = flatten(state)
        self._unwritten = (step, arrays, _encode_meta(meta, arrays))
        self._explain(step, self._begin_save)
        self._saved_steps.append(step)
        return messages

    def restore_latest(self, abstract_state: Mapping[str, Any]) -> Restored | None:
        """Restores the newest good checkpoint; returns None if there is no checkpoint at all.

        Damaged ones are skipped, each with a message, and renamed by the next `save`, as the run comes to their steps
        again.

        Args:
            abstract_state: the state's parts, as pytrees of `jax.ShapeDtypeStruct`s with shardings.

        Returns:
            the arrays as `abstract_state` describes them, cast if it has another dtype than the saved one; a
            `HostArray` becomes NumPy's.

        Raises:
            UserError: no checkpoint is good, one could not be read, or the arrays differ from `abstract_state` in name
                or shape.
            TransientError: one could not be read after several attempts.
        """
        steps = on_all_processes(lambda: steps_in(self._directory))
        if not steps:
            return None
        _, state, meta, problems = restore_newest(self._directory, steps, lambda meta, saved: abstract_state)
        self._damaged_steps = list(problems)
        messages = [
            f"checkpoint {damaged} is passed over: {problem}. "
            f"The next checkpoint saved renames it to {self._name_aside(damaged, 'damaged')}."
            for damaged, problem in problems.items()
        ]
        return Restored(state, meta, messages)

    def wait(self) -> None:
        """Waits until everything saved is complete on the disk or store; raises what `save` raises."""
        if self._unwritten is None:
            return
        step, arrays, _ = self._unwritten

        def finish() -> None:
            if self._manager is None:
                self._begin_save()
            try:
                self._manager.wait_until_finished()
            except Exception:
                if not self._abandon_save():
                    raise

        self._explain(step, finish, again=not any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays.values()))
        self._unwritten, self._last_was_missed = None, False

    def prune(self, before: float = float("inf")) -> None:
        """Deletes all but the newest `max_to_keep` checkpoints of steps below `before`, in the background."""
        if self._max_to_keep == -1 or jax.process_index() != 0:
            return
        for step in [step for step in steps_in(self._directory) if step < before][self._max_to_keep :]:
            if step not in self._deletions or self._deletions[step].done():
                self._deletions[step] = self._deleter.submit((self._directory / str(step)).rmtree)

    def set_aside(self, first_step: int) -> list[str]:
        """Renames the checkpoints that were saved at `first_step` or later, as no run can go on from them.

        Returns:
            the new names.
        """
        with contextlib.suppress(UserError, TransientError):  # a failed save leaves nothing to rename
            self.wait()
        steps = [step for step in self._saved_steps if step >= first_step]
        self._saved_steps = []
        names = [name for step in steps if (name := self._rename(step, "nonfinite"))]
        # The first process to end ends the others, so process 0 has to have renamed them before.
        multihost_utils.sync_global_devices("checkpoints set aside")
        return names

    def close(self) -> None:
        """Waits, then ends the threads that save and delete."""
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()
            self._deleter.shutdown()

    def _end_last_save(self, step: int) -> list[str]:
        """Waits for the save before that of `step`, and tolerates a single transient failure of it."""
        if self._unwritten is None or self._manager is None:
            return []
        missed = self._unwritten[0]
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            if self._abandon_save():
                return []
            passes = failure_of(error) is Failure.TRANSIENT and jax.process_count() == 1
            if self._last_was_missed or not passes:
                raise self._explanation(missed, error) from error
            self._last_was_missed = True
            return [f"checkpoint {missed} could not be written ({one_line(error)}); {step} is written in its place"]
        self._last_was_missed = False
        return []

    def _begin_save(self) -> None:
        step, arrays, meta = self._unwritten
        if self._manager is None:
            self._manager = self._open_manager()
        self.prune(before=step)
        if (self._directory / str(step)).exists():
            raise UserError(
                f"{self._directory / str(step)} is there already, and this run has not written it. If another run "
                "writes to this folder, end it or use another run_name; else move it away."
            )
        items = {"state": ocp.args.PyTreeSave(arrays), "meta": ocp.args.JsonSave(meta)}
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception:
            if not self._abandon_save():
                raise
            self._manager = self._open_manager()  # without one `wait` would begin this save again

    def _open_manager(self) -> ocp.CheckpointManager:
        for step in self._damaged_steps:
            self._rename(step, "damaged")
        self._damaged_steps = []
        # The other processes list the folder only after that.
        multihost_utils.sync_global_devices("damaged checkpoints renamed")
        return ocp.CheckpointManager(self._directory, options=self._options, item_handlers=self._handlers)

    def _abandon_save(self) -> bool:
        """Removes the files of a failed save, and the manager, which would raise its error again.

        Returns:
            whether the checkpoint is complete nonetheless, as the error came later, and the process may go on. One of
            several may not: it would wait for the others, which are elsewhere.
        """
        manager, self._manager = self._manager, None
        with contextlib.suppress(Exception):
            manager.close()
        folder = self._directory / str(self._unwritten[0])
        unfinished = [path for path in self._directory.iterdir() if path.name.startswith(f"{folder.name}.orbax")]
        if is_unfinished(folder):
            unfinished.append(folder)
        for path in unfinished if jax.process_index() == 0 else ():
            _remove_unfinished(path)
        return jax.process_count() == 1 and folder not in unfinished and folder.exists()

    def _name_aside(self, step: int, why: str) -> str:
        """Returns a name that is not a step's: `10.damaged`, or if that is taken `10.damaged-2` and so on."""
        names = [f"{step}.{why}", *(f"{step}.{why}-{count}" for count in range(2, 100))]
        return next(name for name in names if not (self._directory / name).exists())

    def _rename(self, step: int, why: str) -> str:
        """Renames a checkpoint, on process 0; returns its new name, "" if there is no such checkpoint."""
        folder = self._directory / str(step)
        if not folder.exists():
            return ""
        name = self._name_aside(step, why)
        if jax.process_index() == 0:
            folder.rmtree() if is_unfinished(folder) else folder.rename(self._directory / name)
        return name

    def _explain(self, step: int, attempt: Callable[[], None], again: bool = True) -> None:
        """Calls `attempt`, with `again` repeatedly, and raises errors that a user can act on."""
        try:
            # One of several processes cannot begin again by itself: the others are elsewhere in the save.
            retried(attempt) if again and jax.process_count() == 1 else attempt()
        except UserError:
            raise
        except Exception as error:
            raise self._explanation(step, error) from error

    def _explanation(self, step: int, error: Exception) -> Exception:
        """Gives up the last save; returns the error to raise if saving `step` failed with `error`."""
        (_, arrays, _), self._unwritten = self._unwritten, None
        kept = steps_in(self._directory)
        stands = f"Checkpoint {kept[0]} stands" if kept else "No checkpoint was saved before"
        failure = failure_of(error)
        if failure is Failure.FULL:
            needed = _gib(sum(x.nbytes for x in arrays.values()))
            free = ""
            if not is_remote(self._directory):
                free = f", and {_gib(shutil.disk_usage(self._directory).free)} are free without it"
            return UserError(
                f"no space is left in {self._directory}: checkpoint {step} has {needed} of arrays{free}. {stands}. "
                "Make room, or keep fewer checkpoints (max_num_checkpoints_to_keep); then the same command goes on."
            )
        message = f"checkpoint {step} could not be written to {self._directory}: {one_line(error)}. {stands}."
        if failure is Failure.TRANSIENT:
            return TransientError(f"{message} The same command goes on.")
        return UserError(message) if isinstance(error, OSError | ValueError) else error


def _remove_unfinished(folder: epath.Path) -> None:
    """Removes a folder, to which unfinished writes may still add files; the next start removes what remains."""
    for _ in range(20):
        with contextlib.suppress(Exception):
            folder.rmtree()
        if not folder.exists():
            return
        time.sleep(0.1)


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def _encode_meta(meta: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Returns the content of the item `meta`."""
    digest_of = jax.device_get(digests(arrays))
    entries = {
        name: {"shape": x.shape, "dtype": x.dtype.name, "digest": int(digest_of[name])} for name, x in arrays.items()
    }
    content = json.loads(json.dumps({"meta": meta, "arrays": entries}))  # as it will be read: tuples become lists
    return {**content, "checksum": checksum_of(content)}


# Orbax warns of things that no user of MinText can or need act on, and logs the errors that it raises.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# After a failed write, the remaining writes report to an event loop that is closed by then.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _ignore_orphans(unraisable: Any, hook: Callable[[Any], None] = sys.unraisablehook) -> None:
    trace = unraisable.exc_traceback
    if unraisable.exc_type is not RuntimeError or not trace or "asyncio" not in trace.tb_frame.f_code.co_filename:
        hook(unraisable)


sys.unraisablehook = _ignore_orphans
