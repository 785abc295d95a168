"""Surrounds the steps of `src/train.py` and `src/train_dpo.py`: opens a run, evaluates, saves, and ends it."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from src import rendezvous
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import checkpoint_entries, compare_configs, saved_meta
from src.checkpoint.restore import EVALUATIONS, read_evaluations
from src.checkpoint.resume import ResumePoint, starting_state
from src.checkpoint.run_folder import RunFolder, dated_name, in_run_folder, kept_checkpoint
from src.config import load as configuration
from src.config.schema import Config, Evaluation
from src.data.eval_batches import EvalBatches
from src.data.fingerprint import EVALUATION, check_unchanged
from src.data.host_arrays import gather_json, host_rows, to_global
from src.data.loader import HostBatch
from src.data.types import EvalSet, InputSpec, RowArrays, Tokenizer, TrainData
from src.errors import UserError, say
from src.model.flops import flops_per_token
from src.model.params import Weights
from src.parallel.slices import check_hardware, count_slices
from src.report.comparison import read_facts
from src.report.metrics import MetricsLog, StepPrinter, eval_key, eval_sets, perplexity
from src.report.recorder import LiveReport, NonFiniteError, Recorder
from src.report.summary import dates, ending
from src.report.trackers import Tracking
from src.scoring import eval_batch_size
from src.startup import environment
from src.step.build import TracedStep, build
from src.step.compiler_flags import compiler_options
from src.step.plan import StepPlan
from src.step.same_program import check_same_program
from src.step.state import TrainState, batch_sharding

KEPT_EVALUATIONS = 10  # so that a run which falls back to an older checkpoint need not repeat its evaluation


def begin(
    config: Config, exits: contextlib.ExitStack, fields: Mapping[str, jax.ShapeDtypeStruct] = {}
) -> tuple[RunFolder, TracedStep, Tracking, LiveReport | None]:
    """Names a run's folder and traces its step, before anything is written; `fields` are as `build` takes them."""
    folder = RunFolder(config.base_output_directory, config.run_name or dated_name())
    exits.callback(folder.close)
    is_writer = jax.process_index() == 0
    tracking = exits.enter_context(Tracking(config.report_to if is_writer else ()))
    report = exits.enter_context(contextlib.closing(LiveReport(folder))) if is_writer else None
    check_hardware(config.run.hardware)
    options = compiler_options(config.compile_xla_flags, jax.local_devices()[0], count_slices(jax.devices()))
    built = build(config, jax.devices(), options, fields)
    check_same_program(built, config.steps)
    return folder, built, tracking, report


def open_run(
    config: Config,
    folder: RunFolder,
    built: TracedStep,
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
        config.checkpoint, config.data, accepted, built.plan, built.state, checkpointer, fingerprint, tokenizer
    )
    first_step = int(start.state.step)
    if first_step > config.steps or (first_step == config.steps and not start.resumed):
        begun = "the run" if start.resumed else "the checkpoint of load_full_state_path"
        raise UserError(f"steps={config.steps} is already reached: {begun} is at step {first_step}. Raise steps.")
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
    config: Config, folder: RunFolder, header: Sequence[tuple[str, str]], start: ResumePoint, built: TracedStep
) -> Recorder:
    """Writes config.yml and environment.json; returns what records steps, and in process 0 prints them.

    Metrics of an earlier start, of which no checkpoint is left, are set aside.
    """
    first_step = int(start.state.step)
    resume_step = first_step if start.resumed else None
    if not start.resumed and (aside := folder.set_aside("metrics.jsonl")):
        say([f"no checkpoint of an earlier start is here to go on from; its metrics are in {aside}"])
    folder.write_text("config.yml", configuration.to_yaml(config))
    log = printer = None
    if jax.process_index() == 0:
        facts = dates(folder, first_step) | dict(header[2:-1]) | environment()
        folder.write_text("environment.json", json.dumps(facts))
        log = MetricsLog(folder.fetch("metrics.jsonl"), folder.local / "tensorboard", resume_step, start.evaluation_due)
        printer = StepPrinter(config.steps, first_step, config.log_period, config.quiet, built.schedule.rows_before)
    flops = flops_per_token(built.plan.spec, config.max_target_length)
    return Recorder(config.step, config.steps, log, printer, flops, built.plan.layout.mesh)


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
    fingerprint: Mapping[str, Any]  # of the data
    tokenizer: Tokenizer | None
    data: TrainData
    evaluations: Sequence["Evaluator"]  # of each set
    generated: Any = None  # the run's `DecodeMetrics`

    def __post_init__(self) -> None:
        # What every checkpoint says.
        self.meta = saved_meta(self.built.plan, self.config.checkpoint, self.fingerprint, self.tokenizer)
        self.meta |= {"eval_position": self.start.eval_position, "rows_before": self.start.position.rows_before}
        self.meta["mixture"] = {"names": self.data.names, "weights": self.data.weights}
        evaluated = [each.source for each in self.evaluations]
        self._checked = [*self.data.sources, *evaluated * bool(self.config.target_eval_loss)], evaluated
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


class Evaluator:
    """Evaluates a model on one set by `eval_step`; a rolling one goes on at `position`, None: begins at its start.

    `prepare` makes of this host's rows those that `eval_step` takes.
    """

    def __init__(
        self,
        section: Evaluation,
        inputs: InputSpec,
        plan: StepPlan,
        eval_step: jax.stages.Wrapped,
        data: EvalSet,
        position: Mapping[str, Any] | None = None,
        prepare: Callable[[RowArrays], RowArrays] = lambda rows: rows,
    ) -> None:
        self.name, self.source, self._eval_step, self._prepare = data.name, data.source, eval_step, prepare
        self._global_batch = eval_batch_size(section, inputs.batch, plan)
        self._sharding = batch_sharding(plan.layout, plan.fields)
        self.rows = host_rows(self._sharding["tokens"], (self._global_batch, inputs.batch.max_target_length))
        rolls = section.eval_mode == "rolling"
        self.batches = EvalBatches(inputs, data, self.rows, self._global_batch, rolls, position)

    def sums(self, *models: Weights) -> list[list[dict[str, Any]]]:
        """Returns the sums of each batch, as `eval_step` computes them: a list for each of the models' weights."""
        place, batches = (self._sharding, self.rows, self._global_batch), map(self._prepare, self.batches)
        arrays = (to_global(batch, *place) for batch in batches)
        of_batches = [[self._eval_step(weights, batch) for weights in models] for batch in arrays]
        return [list(sums) for sums in zip(*jax.device_get(of_batches), strict=True)]

    def run(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics of `means`, under names of this set (`eval_key`).

        With `ema_decay` they have `eval_ema_loss` too: the averaged weights' loss on the same batches.
        """
        if state.ema:
            sums, sums_of_average = self.sums(state.weights, state.averaged())
            metrics = means(sums) | {"eval_ema_loss": mean_loss(sums_of_average)}
        else:
            metrics = means(*self.sums(state.weights))
        return {eval_key(metric, self.name): value for metric, value in metrics.items()}


def means(sums: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `eval_loss`, in nats per token, `eval_perplexity`, its exponential, and the metrics of `eval_metrics`.

    Where bytes are counted, of text alone, also `eval_bits_per_byte`: all its nats over all its bytes, in bits.
    Metrics that counted nothing have no value: they are left out, with a line for the user. `sums` are each batch's.
    Raises UserError: no token of the batches counts in the loss.
    """
    loss = mean_loss(sums)
    metrics = {"eval_loss": loss, "eval_perplexity": perplexity(loss)}
    of_text = ("text_nats", "text_bytes", "not_text")
    nats, text, other = (sum(float(batch.get(name, 0)) for batch in sums) for name in of_text)
    if other:
        say([f"eval_bits_per_byte is left out: {int(other)} tokens are ids of data that are no text"])
    elif text:
        metrics["eval_bits_per_byte"] = nats / math.log(2) / text
    user_metrics = [batch["user_metrics"] for batch in sums if "user_metrics" in batch]
    for name in user_metrics[0] if user_metrics else ():
        total, count = (sum(float(batch[name][index]) for batch in user_metrics) for index in (0, 1))
        if count:
            metrics[f"eval_{name}"] = total / count
        else:
            say([f"eval_{name} is left out: its count is 0 over the whole evaluation"])
    return metrics


def mean_loss(sums: Sequence[Mapping[str, Any]]) -> float:
    """Returns the loss of these batches, in nats per token; raises UserError if no token counts in it."""
    tokens = sum(float(batch["tokens"]) for batch in sums)  # a batch_transform may weigh them
    if not tokens:
        raise UserError(
            "no token of the evaluation counts in the loss: with use_sft=true its rows hold prompts alone. Raise "
            "eval_steps (-1: all of the data) or max_target_length"
        )
    return sum(float(batch["loss_sum"]) for batch in sums) / tokens
