"""Surrounds the steps of `src/train.py` and `src/train_dpo.py`: opens a run, evaluates, saves, and ends it."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from src import rendezvous
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import checkpoint_entries, compare_configs
from src.checkpoint.restore import EVALUATIONS, read_evaluations
from src.checkpoint.resume import ResumePoint, starting_state
from src.checkpoint.run_folder import RunFolder, in_run_folder, kept_checkpoint
from src.config import load as configuration
from src.config.schema import Config
from src.data.batch_schedule import BatchSchedule
from src.data.fingerprint import EVALUATION, check_unchanged
from src.data.host_arrays import gather_json
from src.data.loader import HostBatch
from src.data.types import RowSource, Source, Tokenizer
from src.errors import UserError, say
from src.report.comparison import read_facts
from src.report.metrics import MetricsLog, StepPrinter, eval_key, eval_sets
from src.report.recorder import NonFiniteError, Recorder
from src.report.summary import dates, ending
from src.startup import environment
from src.step.build import TracedStep
from src.step.plan import StepPlan
from src.step.state import TrainState

KEPT_EVALUATIONS = 10  # so that a run which falls back to an older checkpoint need not repeat its evaluation


def open_run(
    config: Config,
    folder: RunFolder,
    plan: StepPlan,
    abstract: TrainState,
    fingerprint: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    exits: contextlib.ExitStack,
) -> tuple[Checkpointer, ResumePoint]:
    """Locks a run's folder; returns its checkpointer, which `exits` closes, and where the run goes on or begins.

    Raises UserError where `starting_state` does, and if the folder can't be written or another process trains in it.
    """
    exits.enter_context(in_run_folder(folder.path))
    folder.check_writable()
    folder.lock()  # before anything of it is read that another process may change
    checkpoints, keep = folder.path / "checkpoints", config.max_num_checkpoints_to_keep
    checkpointer = Checkpointer(checkpoints, max_to_keep=keep, async_save=config.async_checkpointing)
    exits.callback(checkpointer.close)
    changes = compare_configs(config, folder)
    accepted = (*config.accept_changes, *[EVALUATION] * (not config.target_eval_loss))
    start = starting_state(
        config.checkpoint, config.data, accepted, plan, abstract, checkpointer, fingerprint, tokenizer
    )
    if start.resumed:
        with contextlib.suppress(UserError):  # environment.json is malformed, and is written again
            old, new = read_facts(folder.path), environment()
            other = [f"{name} {old[name]} -> {new[name]}" for name in new if old.get(name, new[name]) != new[name]]
            if other:
                note = f"changed since the run's last start: {', '.join(other)}"
                changes.append(f"{note}: losses may differ in the last bits")
        start.messages[:0] = changes
    return checkpointer, start


def open_log(
    config: Config, folder: RunFolder, header: Sequence[tuple[str, str]], start: ResumePoint, schedule: BatchSchedule
) -> tuple[MetricsLog | None, StepPrinter | None]:
    """Writes config.yml and environment.json; returns where steps are recorded and printed, in the process that does.

    Metrics of an earlier start, of which no checkpoint is left, are set aside.
    """
    first_step = int(start.state.step)
    resume_step = first_step if start.resumed else None
    if not start.resumed and (aside := folder.set_aside("metrics.jsonl")):
        say([f"no checkpoint of an earlier start is here to go on from; its metrics are in {aside}"])
    folder.write_text("config.yml", configuration.to_yaml(config))
    if jax.process_index() != 0:
        return None, None
    folder.write_text("environment.json", json.dumps(dates(folder, first_step) | dict(header[2:-1]) | environment()))
    log = MetricsLog(folder.fetch("metrics.jsonl"), folder.local / "tensorboard", resume_step, start.evaluation_due)
    return log, StepPrinter(config.steps, first_step, config.log_period, config.quiet, schedule.rows_before)


@dataclass
class Saver:
    """Saves the state of a run, and records its evaluations; all processes make the same calls.

    As a context it also saves if an error ends the body between two steps. After a NonFiniteError it renames the
    checkpoints whose weights have not given a finite loss.
    """

    config: Config
    folder: RunFolder
    built: TracedStep
    rows: np.ndarray  # of a global batch: those of this host
    checkpointer: Checkpointer
    start: ResumePoint
    recorder: Recorder
    meta: dict[str, Any]  # what every checkpoint says
    sources: Sequence[Source | RowSource]  # that the run trains on
    evaluations: Sequence[Any]  # an `Evaluator` for each set
    generated: Any = None  # the run's `DecodeMetrics`

    def __post_init__(self) -> None:
        self.meta["eval_position"] = self.start.eval_position
        evaluated = [each.source for each in self.evaluations]
        self._checked = [*self.sources, *evaluated * bool(self.config.target_eval_loss)], evaluated
        self._done, self._state = int(self.start.state.step), self.start.state
        self._saved = self._done if self.start.resumed else -1
        self._evaluated: dict[str, Any] = {}  # what came of the evaluation of this state
        self.eval_metrics: dict[str, float] = {}  # of the last evaluation

    def reached(self, done: int, state: TrainState, batch: HostBatch, rows_taken: int) -> bool:
        """Takes note of the state after a step; returns whether it is to be evaluated."""
        self._done, self._state, self._batch, self._evaluated = done, state, batch, {}
        is_time = done % self.config.eval_interval == 0 or done == self.config.steps
        self.meta |= {"rows_taken": rows_taken, "evaluation_due": bool(self.evaluations) and is_time}
        return self.meta["evaluation_due"]

    def save(self) -> None:
        """Saves the state, once; not while updates are skipped because they are not finite.

        Raises UserError instead if the data changed, from which the last steps may have learned.
        """
        if self._saved == self._done or self.recorder.skipped or not self.config.enable_checkpointing:
            return
        try:
            say(check_unchanged(*self._checked))
        except UserError as error:
            self.checkpointer.wait()
            error.kept_checkpoint = kept_checkpoint(self.folder.path)
            raise
        self._sync()
        if self._batch.saved:
            self.meta["streams"] = gather_json(self._batch.saved)
        positions, plan, schedule = self._batch.stream_positions, self.built.plan, self.built.schedule
        entries = checkpoint_entries(plan, self._state, positions, self.rows, schedule)
        say(self.checkpointer.save(self._done, entries, self.meta | self._evaluated))
        self._saved = self._done

    def save_now(self) -> None:
        """Saves the state after the last step, and waits until it is saved."""
        self.recorder.flush()
        self.save()
        say(self.checkpointer.finish())

    def evaluate(self) -> str:
        """Evaluates the state; returns why the run is finished if its losses are low enough, and then saves it.

        What came of it is written beside the checkpoint, if the state is saved. A run that is killed before that makes
        the evaluation again when it is resumed.
        """
        state, metrics = self._state, {}
        for each in self.evaluations:
            metrics |= each.run(state)
        if self.generated:
            scores = self.generated.run(self.built.plan, state.weights).items()
            metrics |= {eval_key(f"eval_{name}", self.evaluations[0].name): value for name, value in scores}
        self.recorder.add_evaluation(self._done, metrics)
        self.eval_metrics = metrics
        losses = [each["eval_loss"] for each in eval_sets(metrics).values()]
        loss = max(losses) if np.isfinite(losses).all() else None
        if self.config.eval_mode == "rolling":
            self.meta["eval_position"] = {each.name: each.batches.position() for each in self.evaluations}
        self._evaluated = {"eval_loss": loss, "eval_position": self.meta["eval_position"]}
        if self._saved == self._done:
            self._sync()
            known = read_evaluations(self.folder.path / "checkpoints")
            known[str(self.checkpointer.checksum)] = self._evaluated
            newest = dict(list(known.items())[-KEPT_EVALUATIONS:])
            self.folder.write_text(f"checkpoints/{EVALUATIONS}", json.dumps(newest))
        if finished := ending(self.config, self._done, loss):
            self.save()
        return finished

    def _sync(self) -> None:
        """Puts all metrics on disk, or on the store, before a checkpoint or an evaluation says that they are there."""
        self.recorder.sync()
        self.folder.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, NonFiniteError):
            names = self.checkpointer.set_aside(self.recorder.last_finite)
            aside = f" The newest one, which led to this, is kept as {', '.join(names)}." if names else ""
            note = kept_checkpoint(self.folder.path)
            goes_on = ", and the run goes on from it." if note.endswith("stands") else "."
            raise UserError(f"{error} {note[0].upper()}{note[1:]}{goes_on}{aside}") from None
        if isinstance(error, Exception) and trace:
            with contextlib.suppress(Exception):  # the error that came first is reported
                self._save_after(error, f"{self._done} {trace.tb_lineno}")

    def _save_after(self, error: Exception, place: str) -> None:
        """Saves the state, if it is good and all processes of the job have failed at this place; has the error say so.

        A process that waits for the others in a step or in an evaluation can't save.
        """
        if self._saved != self._done:
            self.recorder.flush()
            gone = any(x.is_deleted() for x in jax.tree.leaves(self._state))
            job, alone = rendezvous.current_job, jax.process_count() == 1
            agreed = alone or (job is not None and job.all_failed(place))
            if gone or self.recorder.recorded != self._done or not agreed:
                return
            self.save()
        say(self.checkpointer.finish())
        if self._saved == self._done:
            at = f"step {self._done} is saved in {self.folder.path}"
            error.kept_checkpoint = f"the state after {at}: the same command, run_name={self.folder.name}, goes on"
