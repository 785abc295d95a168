"""Saves a run's checkpoints through Orbax while training continues.

Orbax writes `<directory>/<step>/` with two items: `state`, the arrays under dotted names, and `meta`, a JSON object
with the caller's values and each array's shape, dtype and digest, which src/checkpoint/restore.py verifies.
"""

import contextlib
import importlib
import json
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.experimental import multihost_utils

from src.checkpoint.agreement import of_process_0
from src.checkpoint.digest import digests
from src.checkpoint.format import Restored, checksum_of, flatten
from src.checkpoint.run_folder import absolute, is_unfinished, steps_in, write_error
from src.checkpoint.set_aside import remove, set_aside, unused_name
from src.system.errors import TransientError, UserError
from src.system.storage_errors import one_line, retried, tensorstore_errors

_TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of folders on a disk that Orbax has not finished


class Save(NamedTuple):
    """A checkpoint to write."""

    step: int
    arrays: dict[str, jax.Array]
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    Nothing is created, renamed or deleted before the first `save` or `finish`. All processes of a job make the same
    calls. `directory` is the run's checkpoints/ folder, local or any other path that etils reads; `max_to_keep` -1
    keeps all; with `async_save` files are written while the caller continues; `compress` makes files about a quarter
    smaller, but copies arrays in host memory. Raises UserError for a path of an unknown protocol.
    """

    def __init__(self, directory: epath.PathLike, *, max_to_keep: int, async_save: bool, compress: bool = True) -> None:
        self._directory = absolute(directory)
        self._max_to_keep = max_to_keep
        self._kind = {"async_save": async_save, "compress": compress}
        self.checksum = 0  # of the checkpoint last saved or restored
        self._manager: Any = None  # Orbax's manager, from the first save on
        self._damaged_steps: list[int] = []
        self._saved_steps: list[int] = []
        self._unwritten: Save | None = None  # the last save, until it is known to be complete
        self._last_was_missed = False
        self._deleter = ThreadPoolExecutor(max_workers=8)
        self._deletions: dict[int, Future[None]] = {}
        self._quiet = contextlib.ExitStack()  # silences Orbax from the first save to the end

    def prepare(self) -> None:
        """Imports what writes checkpoints, which takes a third of a second: call it while devices compute a step.

        The first save may come hours later, and the files to import may be edited by then, or a package be broken.
        """
        importlib.import_module("src.checkpoint.orbax_manager")

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> list[str]:
        """Saves a state, whose arrays may be donated once this returns, and its `meta`, any JSON object.

        Deletes all but `max_to_keep` of the earlier checkpoints in the background, now that the caller has seen that
        the weights are good. Returns messages: a failed deletion is tried again, and a job with one process tolerates a
        transient failure of the previous save once. Raises UserError if this checkpoint or the previous one could not
        be written, or its folder exists already; TransientError if this one could not be written after several
        attempts, or the previous one could not and that is not tolerated.
        """
        messages, missed = self._failed_deletions(), self._unwritten
        try:
            self.wait(retry=False)
        except TransientError as error:
            if missed is None or self._last_was_missed or jax.process_count() > 1:
                raise
            self._last_was_missed = True
            reason = one_line(error.__cause__ or error)
            messages.append(f"checkpoint {missed.step} could not be written ({reason}); {step} replaces it")
        arrays = flatten(state)
        self._unwritten = Save(step, arrays, _encode_meta(meta, arrays))
        self.checksum = self._unwritten.meta["checksum"]
        self._attempt(self._begin_save, retry=True)
        self._saved_steps.append(step)
        return messages

    def restore_latest(self, abstract_state: Mapping[str, Any]) -> Restored | None:
        """Restores the newest good checkpoint; returns None if the run has not saved any.

        Damaged checkpoints are skipped, each with a message, and renamed by the next `save`, because the run will reach
        their steps again. `abstract_state` has pytrees of `jax.ShapeDtypeStruct`s with shardings, to whose dtypes
        arrays are cast, and of `HostArray`s. Raises UserError if all checkpoints are damaged, one could not be read, or
        its arrays have other names or shapes; TransientError if one could not be read after several attempts.
        """
        steps = of_process_0(lambda: steps_in(self._directory))
        if not steps:
            return None
        from src.checkpoint.restore import first_good, restore

        _, (state, meta), problems = first_good(
            self._directory, steps, lambda at: restore(at, lambda *_: abstract_state)
        )
        self._damaged_steps, self.checksum = list(problems), meta.pop("checksum", 0)
        messages = []
        for damaged, problem in problems.items():
            name = unused_name(self._directory, damaged, "damaged")
            messages.append(
                f"checkpoint {damaged} is passed over: {problem}. The next checkpoint saved renames it to {name}."
            )
        return Restored(state, meta, messages)

    def wait(self, retry: bool = True) -> None:
        """Waits for the last save; `retry` repeats a failed one if its arrays still exist. Raises as `save` does."""
        if self._unwritten is None:
            return
        arrays = self._unwritten.arrays.values()
        gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays)
        self._attempt(self._finish_save, retry and not gone)
        self._unwritten, self._last_was_missed = None, False

    def prune(self, before: float = float("inf")) -> None:
        """Deletes all but the newest `max_to_keep` checkpoints of steps below `before`, in the background."""
        if self._max_to_keep == -1 or jax.process_index() != 0:
            return
        for step in [step for step in steps_in(self._directory) if step < before][self._max_to_keep :]:
            if step not in self._deletions:
                self._deletions[step] = self._deleter.submit((self._directory / str(step)).rmtree)

    def finish(self) -> list[str]:
        """Waits for the last save, then deletes all but the newest `max_to_keep` checkpoints and waits for that.

        Returns a message for each deletion that failed; raises as `save` does.
        """
        self.wait()
        self.prune()
        return self._failed_deletions(wait=True)

    def _failed_deletions(self, wait: bool = False) -> list[str]:
        """Makes a message for each deletion that failed since the last call; `prune` tries these again."""
        ended = [step for step, deletion in self._deletions.items() if wait or deletion.done()]
        errors = {step: self._deletions.pop(step).exception() for step in ended}
        return [
            f"checkpoint {step} could not be deleted and takes up space in {self._directory}: {one_line(error)}"
            for step, error in errors.items()
            if error
        ]

    def quarantine_nonfinite(self, first_step: int) -> list[str]:
        """Renames this run's checkpoints from `first_step` on, so that no run resumes from them; returns new names.

        First waits for the last save, ignoring its errors.
        """
        with contextlib.suppress(UserError, TransientError):  # a failed save leaves nothing to rename
            self.wait()
        names = [set_aside(self._directory, step, "nonfinite") for step in self._saved_steps if step >= first_step]
        self._saved_steps = []
        # The first process to exit ends the others, so all wait until process 0 has renamed the checkpoints.
        multihost_utils.sync_global_devices("checkpoints set aside")
        return [name for name in names if name]

    def close(self) -> None:
        """Waits for the last save, raising as `save` does, and ends the threads that save and delete."""
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()
            self._deleter.shutdown()
            self._quiet.close()

    def _begin_save(self) -> None:
        from src.checkpoint import orbax_manager

        assert self._unwritten
        step, arrays, meta = self._unwritten
        if self._manager is None:
            self._quiet.close()  # still open if a failed save has closed the manager
            self._quiet.enter_context(orbax_manager.quiet_orbax())
            for damaged in self._damaged_steps:
                set_aside(self._directory, damaged, "damaged")
            self._damaged_steps = []
            # Orbax's own cleanup thread outlives a failed manager, and would remove the next manager's files.
            self._remove_unfinished()
            # The other processes must list the folder only after these changes.
            multihost_utils.sync_global_devices("damaged checkpoints renamed, unfinished ones removed")
            self._manager = orbax_manager.open_manager(self._directory, **self._kind)
        self.prune(before=step)
        if (self._directory / str(step)).exists():
            raise UserError(
                f"{self._directory / str(step)} exists already, and this run did not write it. If another run "
                "writes to this folder, stop it or use another run_name; otherwise move it away."
            )
        with self._abandoning(step):
            orbax_manager.begin_save(self._manager, step, arrays, meta)

    def _finish_save(self) -> None:
        if not self._manager:  # a failed attempt closed it
            self._begin_save()
        if self._unwritten:
            with self._abandoning(self._unwritten.step):
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _abandoning(self, step: int) -> Generator[None]:
        """If the body fails, removes the save's files and the manager, which would raise its error again.

        In a job with one process, a checkpoint that was complete before the error is kept, without an error. In
        a larger job the error is raised, because a process that continued would wait for the others.
        """
        try:
            with tensorstore_errors():
                yield
        except Exception:
            manager, self._manager = self._manager, None
            with contextlib.suppress(Exception):
                manager.close()
            folder = self._directory / str(step)
            whole = folder.exists() and not is_unfinished(folder)
            self._remove_unfinished()
            if jax.process_count() > 1 or not whole:
                raise
            self._unwritten = None

    def _remove_unfinished(self) -> None:
        if jax.process_index() != 0 or not self._directory.exists():
            return
        for path in list(self._directory.iterdir()):
            if _TEMPORARY in path.name or (path.name.isdecimal() and is_unfinished(path)):
                remove(path)

    def _attempt(self, action: Callable[[], None], retry: bool) -> None:
        """Calls `action` to write the unwritten save; with `retry`, a job of one process repeats it as `retried` does.

        On an error other than UserError, drops the save and raises the error of `write_error`.
        """
        try:
            # One of several processes cannot retry by itself, because the others are at other points of the save.
            retried(action) if retry and jax.process_count() == 1 else action()
        except UserError:
            raise
        except Exception as error:
            save, self._unwritten = self._unwritten, None
            assert save
            raise write_error(self._directory, save.step, sum(x.nbytes for x in save.arrays.values()), error) from error


def _encode_meta(meta: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    digest_of = jax.device_get(digests(arrays))
    entries = {
        name: {"shape": x.shape, "dtype": x.dtype.name, "digest": int(digest_of[name])} for name, x in arrays.items()
    }
    content = json.loads(json.dumps({"meta": meta, "arrays": entries}))  # as it will be read back: tuples become lists
    return {**content, "checksum": checksum_of(content)}
