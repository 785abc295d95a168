"""Saves the state of a run, including after an error between two steps."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import checkpoint_entries
from src.checkpoint.format import EVALUATIONS, read_evaluations
from src.checkpoint.resume import ResumePoint
from src.checkpoint.run_folder import RunFolder, describe_latest, describe_step, latest_step
from src.data.fingerprint import check_unchanged
from src.data.loader import HostBatch
from src.data.processes import gather_json
from src.data.types import RowSource, Source
from src.run.recorder import NonFiniteError, Recorder
from src.step.state import TrainState
from src.step.trace import TracedTrainStep
from src.system import exit_codes
from src.system.errors import UserError, say

KEPT_EVALUATIONS = 10  # so that a run that falls back to an older checkpoint need not repeat its evaluation


class Saver:
    """Saves the state after the newest step; all processes must make the same calls."""

    def __init__(
        self,
        folder: RunFolder,
        traced: TracedTrainStep,
        rows: np.ndarray,
        checkpointer: Checkpointer,
        start: ResumePoint,
        recorder: Recorder,
        meta: Mapping[str, Any],
        sources: tuple[Sequence[Source | RowSource], Sequence[Source | RowSource]],
        enabled: bool,
    ) -> None:
        """`rows`: the indices of this host's rows in a global batch. `sources`: as `check_unchanged` takes them."""
        self._folder, self._traced, self._rows, self._sources = folder, traced, rows, sources
        self._checkpointer, self._recorder, self._enabled = checkpointer, recorder, enabled
        self._meta = {**meta, "eval_position": start.eval_position}
        self._done, self._state = int(start.state.step), start.state
        self._saved = self._done if start.resumed else -1
        self._evaluated: dict[str, Any] = {}  # the results of this state's evaluation

    def reached(self, done: int, state: TrainState, batch: HostBatch, **meta: Any) -> None:
        """Takes the state after a step, its batch, and further `meta` for its checkpoint."""
        if self._enabled:
            self._checkpointer.prepare()
        self._done, self._state, self._batch, self._evaluated = done, state, batch, {}
        self._meta |= meta

    def save(self) -> None:
        """Saves the state once; not while updates are skipped as not finite, or if checkpoints are disabled.

        Forces all metrics to disk first. Raises UserError instead if the data has changed, because the last steps may
        have learned from the changed data; also as `Checkpointer.save` does.
        """
        if self._saved == self._done or self._recorder.skipped or not self._enabled:
            return
        try:
            say(check_unchanged(*self._sources))
        except UserError as error:
            self._checkpointer.wait()
            vars(error)["latest_checkpoint"] = describe_latest(self._folder.path)
            raise
        self._sync()
        if self._batch.saved:
            self._meta["streams"] = gather_json(self._batch.saved)
        positions, plan, schedule = self._batch.stream_positions, self._traced.plan, self._traced.schedule
        entries = checkpoint_entries(plan, self._state, positions, self._rows, schedule)
        say(self._checkpointer.save(self._done, entries, self._meta | self._evaluated))
        self._saved = self._done

    def save_now(self) -> None:
        """Records the newest step, saves the state as `save` does, and waits until it is on disk."""
        self._recorder.flush()
        self.save()
        self.finish()

    def finish(self) -> None:
        """Waits until all checkpoints are on disk and old ones are deleted; raises as `Checkpointer.finish` does."""
        say(self._checkpointer.finish())

    def evaluated(self, loss: float | None, position: Mapping[str, Any] | None) -> None:
        """Takes the results of this state's evaluation, and stores them with the state's checkpoint.

        `loss` is the largest of all sets (None if one is not finite), `position` the next one of rolling sets (None if
        none rolls). A run that is killed before they are stored repeats the evaluation when it is resumed.
        """
        if position is not None:
            self._meta["eval_position"] = position
        self._evaluated = {"eval_loss": loss, "eval_position": self._meta["eval_position"]}
        if self._saved == self._done:
            self._sync()
            known = read_evaluations(self._folder.path / "checkpoints")
            known[str(self._checkpointer.checksum)] = self._evaluated
            newest = dict(list(known.items())[-KEPT_EVALUATIONS:])
            self._folder.write_text(f"checkpoints/{EVALUATIONS}", json.dumps(newest))

    def _sync(self) -> None:
        """Forces all metrics to disk, or to the store, before a checkpoint or an evaluation that follows them."""
        self._recorder.sync()
        self._folder.sync()

    def after(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Handles an error that ended the steps, with the arguments of `__exit__`: saves the state if it is good.

        For a NonFiniteError, renames the checkpoints whose weights have not produced a finite loss, and raises
        UserError with a note about the remaining ones.
        """
        if isinstance(error, NonFiniteError):
            names = self._checkpointer.quarantine_nonfinite(self._recorder.last_finite)
            aside = f" The newest one, which led to this, is kept as {', '.join(names)}." if names else ""
            step = latest_step(self._folder.path)
            note = describe_step(self._folder.path, step)
            goes_on = "." if step is None else ", and the run resumes from it."
            raise UserError(f"{error} {note[0].upper()}{note[1:]}{goes_on}{aside}") from None
        if isinstance(error, Exception) and trace:
            with contextlib.suppress(Exception):  # the first error is the one to report
                lines = [at.tb_lineno for at in (trace, trace.tb_next) if at]  # in the train file and in `Run`
                self._save_after(error, f"{self._done} {lines}")

    def _save_after(self, error: Exception, place: str) -> None:
        """Saves the state if it is good and all processes of the job have failed at `place`; adds a note to the error.

        A process that waits for the others in a step or in an evaluation can't save.
        """
        if self._saved != self._done:
            self._recorder.flush()
            gone = any(x.is_deleted() for x in jax.tree.leaves(self._state))
            alone = jax.process_count() == 1
            agreed = alone or (exit_codes.job is not None and exit_codes.job.all_failed(place))
            if gone or self._recorder.recorded != self._done or not agreed:
                return
            self.save()
        self.finish()
        if self._saved == self._done:
            at = f"step {self._done} is saved in {self._folder.path}"
            vars(error)["latest_checkpoint"] = (
                f"the state after {at}: run the same command with run_name={self._folder.name} to resume"
            )
