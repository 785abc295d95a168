"""Surrounds the steps of a training run: its folder, its position in the data, metrics, evaluations and checkpoints."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.contents import compare_configs, saved_meta
from src.checkpoint.resume import starting_state
from src.checkpoint.run_folder import RunFolder, dated_name, in_run_folder
from src.config import load as configuration
from src.config.schema import Config, Mesh
from src.data.fingerprint import EVALUATION, data_fingerprint
from src.data.host_arrays import host_rows, to_global
from src.data.loader import HostBatch, train_batches
from src.data.processes import check_same
from src.data.types import EvalSet, InputSpec, RowArrays, TrainData
from src.parallel.slices import check_hardware, count_slices
from src.run.diagnostics import Profile, Watchdog
from src.run.environment import environment, read_environment
from src.run.evaluator import Evaluator
from src.run.metrics import MetricsLog, StepPrinter, eval_key, eval_sets
from src.run.preemption import Preemption
from src.run.recorder import Recorder, Result
from src.run.saver import Saver
from src.run.summary import dates, ending, print_header, run_header, step_flops, stopped
from src.step.eval_step import ALWAYS
from src.step.plan import Batch
from src.step.state import TrainState, batch_sharding
from src.step.trace import trace_train_step
from src.step.train_step import Metrics
from src.system.errors import UserError, printable, say
from src.system.imports import optional


class Run:
    """Does all that a run does around its steps. All processes make the same calls, in the order of src/train.py.

    If an error ends the `with` block between two steps, the state is saved (`Saver.after`).
    """

    def __init__(
        self, config: Config, exits: contextlib.ExitStack, fields: Mapping[str, jax.ShapeDtypeStruct] = {}
    ) -> None:
        """`exits` closes what the run opens. `fields`: further arrays of a batch, which `prepare` adds to its rows.

        Raises as `Tracking`, `check_hardware`, `compiler_options`, `trace_train_step` and `check_same_program` do.
        """
        self.config, self._exits = config, exits
        self.prepare: Callable[[RowArrays], RowArrays] = lambda rows: rows
        self.folder = RunFolder(
            config.run.base_output_directory, config.run.run_name or dated_name(config.run.base_output_directory)
        )
        exits.callback(self.folder.close)
        self._is_writer, self._tracking, self._report = jax.process_index() == 0, None, None
        if self._is_writer and config.diagnostics.report_to:
            from src.extras.trackers import Tracking

            self._tracking = exits.enter_context(Tracking(config.diagnostics.report_to))
        if self._is_writer and (pages := optional("pages.live")):
            self._report = exits.enter_context(contextlib.closing(pages.LiveReport(self.folder)))
        check_hardware(config.run.hardware)
        options, device = {}, jax.local_devices()[0]
        if config.aot.compile_xla_flags or device.platform in ALWAYS:
            from src.step.compiler_flags import compiler_options

            options = compiler_options(config.aot.compile_xla_flags, device, count_slices(jax.devices()))
        self.traced = trace_train_step(config, jax.devices(), options, fields)
        if jax.process_count() > 1:
            from src.step.same_program import check_same_program

            check_same_program(self.traced, config.run.steps)
        self.plan, self.schedule = self.traced.plan, self.traced.schedule
        self._place = batch_sharding(self.plan.layout, self.plan.fields)
        self.rows = host_rows(self._place["tokens"], (self.traced.rows, config.batch.max_target_length))
        self.evaluators: Sequence[Evaluator] = ()
        self.generated: Any = None  # `DecodeMetrics`, if `decode_metrics` is set
        self.eval_metrics: dict[str, float] = {}  # from the last evaluation
        self._has_begun = False
        self.stopped_by = 0  # the signal that ended the run early; 0: none

    # ---- Before the first step

    def open(self, inputs: InputSpec, data: TrainData, eval_sets: Sequence[EvalSet], **facts: Any) -> None:
        """Locks the run's folder; restores its state and its position in the data, or initializes them.

        `facts` are added to the data's fingerprint, which must match the checkpoint's. Raises UserError as
        `compare_configs` and `starting_state` do, if processes read different data or code, if the folder can't be
        written or another process trains in it, or if the restored step is beyond `steps`, or equal to it in a run that
        is not resumed (load_full_state_path); TransientError if a store does not answer.
        """
        config, folder = self.config, self.folder
        self.inputs, self.data, self.eval_sets = inputs, data, eval_sets
        self._fingerprint = (
            data_fingerprint(inputs, data, self.traced.rows, eval_sets) | self.schedule.fingerprint() | facts
        )
        check_same(self._fingerprint, "data or code", "the same files, functions, tokenizer and keys")
        self._exits.enter_context(in_run_folder(folder.path))
        folder.check_writable()
        folder.lock()  # before reading files in it that another process may change
        keep, saves_async = config.checkpoint.max_num_checkpoints_to_keep, config.checkpoint.async_checkpointing
        self._checkpointer = Checkpointer(folder.path / "checkpoints", max_to_keep=keep, async_save=saves_async)
        self._exits.callback(self._checkpointer.close)
        changes = compare_configs(config, folder)
        accepted = (*config.run.accept_changes, *[EVALUATION] * (not config.evaluation.target_eval_loss))
        start = starting_state(inputs, accepted, self.plan, self.traced.state, self._checkpointer, self._fingerprint)
        self.start, self.state, self.done = start, start.state, int(start.state.step)
        steps = config.run.steps
        if self.done > steps or (self.done == steps and not start.resumed):
            begun = "the run" if start.resumed else "the checkpoint of load_full_state_path"
            raise UserError(f"steps={steps} is already reached: {begun} is at step {self.done}. Raise steps.")
        if start.resumed:
            with contextlib.suppress(UserError):  # malformed: this start writes environment.json again
                old, new = read_environment(folder.path), environment()
                other = [f"{name} {old[name]} -> {new[name]}" for name in new if old.get(name, new[name]) != new[name]]
                if other:
                    note = f"changed since the run's last start: {', '.join(other)}"
                    changes.append(f"{note}: losses may differ in the last bits")
            start.messages[:0] = changes
        self.finished = ending(config, self.done, start.eval_loss)
        if not self.is_over():
            self._open_batches()

    def _open_batches(self) -> None:
        self._streams, position = self.schedule.streams()[self.rows], self.start.position
        self._rows_taken, schedule = position.rows_taken, self.schedule
        self._batches = train_batches(
            self.inputs, self.data, self._streams, schedule.rows, position, schedule, self.done
        )
        # Closing waits for rows that are being prepared, so `exits` does it, after `conclude` has written the report.
        self._exits.callback(self._batches.close)

    def is_over(self) -> bool:
        """Tells whether neither a step nor an evaluation is left, as in a restart loop or after a kill at the end."""
        return bool(self.finished) and not self.start.evaluation_due

    def announce(self, **replaced: str) -> None:
        """Prints the header, unless `quiet`, the messages of the start, and which settings have no effect on its mesh.

        `replaced` has other values for names in `run_header`.
        """
        self._header = []
        if self._is_writer:
            header = run_header(
                self.config,
                self.traced,
                self.inputs,
                self.data,
                self.eval_sets,
                self.folder,
                first_step=self.done,
                software=environment(),
            )
            self._header = [(name, replaced.get(name, value)) for name, value in header]
        if not self.config.run.quiet:
            print_header(self._header)
        say(self.start.messages)
        step = self.config.step
        # With the defaults of these keys, no setting is idle: don't import what looks for one.
        if self.config.mesh != Mesh() or step.shard_optimizer_over_data or step.trainable_parameters or step.lora_rank:
            idle = optional("idle_settings")
            say(idle.idle_settings(self.config.mesh, self.plan) if idle else [])

    def evaluate_by(self, eval_step: jax.stages.Wrapped) -> None:
        """Creates an evaluator, which calls `eval_step`, for each evaluation set; raises as `Evaluator` does.

        Call it after `open`, and before the `with` block.
        """
        positions = self.start.eval_position
        self.evaluators = [
            Evaluator(
                self.config.evaluation,
                self.inputs,
                self.plan,
                eval_step,
                data=each,
                position=positions.get(each.name),
                prepare=self.prepare,
            )
            for each in self.eval_sets
        ]

    def __enter__(self) -> Self:
        config, start, traced, self._has_begun = self.config, self.start, self.traced, True
        if self.eval_sets and not self.evaluators:
            raise ValueError("this run has evaluation sets: call evaluate_by before its steps")
        self.recorder = self._open_log()
        meta = saved_meta(self.plan, self.inputs, self.data, start.position, self._fingerprint)
        eval_sources = [each.source for each in self.eval_sets]
        sources = [*self.data.sources, *eval_sources * bool(config.evaluation.target_eval_loss)], eval_sources
        settings = start, self.recorder, meta, sources, config.checkpoint.enable_checkpointing
        self._saver = Saver(self.folder, traced, self.rows, self._checkpointer, *settings)
        self._narrow = None
        if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(self.state.weights.trainable)):
            from src.run.narrow_weights import NarrowWeights

            self._narrow = NarrowWeights(self.plan, self.state, self.done + config.run.log_period)
            say(self._narrow.messages)
        if self._tracking:
            self._tracking.start(self.folder, self.done if start.resumed else None)
        if config.data.use_sft:
            self._count_cut = jax.jit(lambda cuts: jnp.sum(cuts[:, 1]), out_shardings=self.plan.layout.sharding(()))
        with contextlib.ExitStack() as observers:
            observers.enter_context(self.recorder)
            profile = Profile(config.diagnostics, self.done, config.run.steps, self.folder.local)
            self._profile = observers.enter_context(contextlib.closing(profile))
            self._preemption = observers.enter_context(contextlib.closing(Preemption(self.folder.path)))
            self._preemption.save = self._saver.save_now
            observers.push(self._saver.after)
            self._in_step = observers.enter_context(contextlib.ExitStack())  # the mark of a step in a profile
            watchdog = Watchdog(config.diagnostics, self.folder, self._streams, self.data.names)
            self._watchdog = observers.enter_context(watchdog)
            self._observers = observers.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[1]:
            self._observers.__exit__(*error)
            return
        with self._observers:
            self._watchdog.pause()
            self._saver.finish()  # while signals are still caught

    def _open_log(self) -> Recorder:
        """Writes config.yml and environment.json; returns the recorder of steps, which logs and prints in process 0.

        Metrics of an earlier start that left no checkpoint are set aside.
        """
        config, folder, due = self.config, self.folder, self.start.evaluation_due
        run = config.run
        if not self.start.resumed and (aside := folder.set_aside("metrics.jsonl")):
            say([f"an earlier start left no checkpoint to resume from; its metrics are in {aside}"])
        folder.write_text("config.yml", configuration.to_yaml(config))
        log = printer = None
        if self._is_writer:
            facts = dates(folder, self.done) | dict(self._header[2:-1]) | environment()
            folder.write_text("environment.json", json.dumps(facts))
            step = self.done if self.start.resumed else None
            log = MetricsLog(folder.fetch("metrics.jsonl"), folder.local / "tensorboard", step, due)
            printer = StepPrinter(run.steps, self.done, run.log_period, run.quiet, self.schedule.rows_before)
        flops = step_flops(self.plan, config.batch.max_target_length)
        return Recorder(config.step, run.steps, log, printer, flops, self.plan.layout.mesh)

    # ---- Steps

    def steps(self) -> Iterator[int]:
        """Yields the number of updates made before each step; a step is recorded while the next one runs.

        First evaluates the state if the last start saved it, but ended before the evaluation that was due.
        """
        if self.start.evaluation_due and self.evaluators:
            self.evaluate()
        self.recorder.start_clock()
        while not (self.finished or self.stopped_by):
            self._is_paused = False
            yield self.done
            if self._is_paused:
                if self._report:
                    self._report.update()
                self.recorder.start_clock()
                self._watchdog.resume()

    def next_batch(self) -> HostBatch:
        """Waits for this host's rows of the next batch, raising as reading them does; marks the start of the step."""
        with self.recorder.waits_for_data(), self._preemption.waits_for_data():
            batch = next(self._batches)
        if self.schedule.changes_at(self.done):
            self.recorder.flush()  # so that the time to compile again is not counted in the last step
            self._watchdog.pause()
        self._in_step.enter_context(self._profile.step(self.done, self.state))
        return batch

    def to_devices(self, batch: HostBatch) -> Batch:
        """Assembles the global batch on the devices from each host's rows."""
        return to_global(self.prepare(batch.arrays), self._place, batch.rows, self.schedule.size(self.done))

    def record(self, state: TrainState, metrics: Metrics, batch: HostBatch) -> None:
        """Takes a step's results, which may still be computing, for the next save, evaluation and metrics.

        With `use_sft`, adds `conversations_cut` to `metrics`. Raises as `Recorder.add` does for the previous step.
        """
        size = self.schedule.size(self.done)
        if self.config.data.use_sft:
            cuts = to_global(batch.cuts, self.plan.layout.sharding(("batch", None)), batch.rows, size)
            metrics["conversations_cut"] = self._count_cut(cuts)
        self._in_step.close()
        self.state, self.done, self._rows_taken = state, self.done + 1, self._rows_taken + size
        done, config = self.done, self.config
        period, steps = config.evaluation.eval_interval, config.run.steps
        self._evaluation_due = bool(self.evaluators) and (done % period == 0 or done == steps)
        self._saver.reached(done, state, batch, rows_taken=self._rows_taken, evaluation_due=self._evaluation_due)
        self.recorder.add(done, metrics, self.traced.tokens * size // self.traced.rows)
        if self._narrow:
            say(self._narrow.after(done, state))
        self._watchdog.step(done, self._rows_taken, batch.stream_positions)
        if self._preemption.reached(done) and done < steps:  # after the last step, nothing is left to resume
            self.stopped_by = self._preemption.signal or signal.SIGTERM  # 0: another process received it
            if self._tracking:
                self._tracking.stopped_by = self.stopped_by
                self._tracking.lacks_evaluation = self._evaluation_due
        self.finished = ending(config, done, None)

    def saves(self) -> bool:
        """Tells whether to save the state. Save before evaluating, because an evaluation may fail."""
        period, steps = self.config.checkpoint.checkpoint_period, self.config.run.steps
        return bool(self.done % period == 0 or self.stopped_by or self.done == steps)

    def evaluates(self) -> bool:
        """Tells whether to evaluate the state; after a signal to end, the next start evaluates it instead."""
        return self._evaluation_due and not self.stopped_by

    def save(self) -> None:
        """Records the last step, and saves the state; raises as `Saver.save` does."""
        self._pause()
        self._saver.save()

    def evaluate(self) -> None:
        """Evaluates the state and records the results; if all losses reach `target_eval_loss`, saves it and finishes.

        Raises as `Evaluator.run`, `DecodeMetrics.run` and `Saver.save` do.
        """
        self._pause()
        metrics: dict[str, float] = {}
        for each in self.evaluators:
            metrics |= each.run(self.state)
        if self.generated:
            scores = self.generated.run(self.plan, self.state.weights).items()
            metrics |= {eval_key(f"eval_{name}", self.evaluators[0].name): value for name, value in scores}
        self.recorder.add_evaluation(self.done, metrics)
        self.eval_metrics = metrics
        losses = [each["eval_loss"] for each in eval_sets(metrics).values()]
        loss = max(losses) if np.isfinite(losses).all() else None
        rolls = self.config.evaluation.eval_mode == "rolling"
        self._saver.evaluated(loss, {each.name: each.batches.position() for each in self.evaluators} if rolls else None)
        self.finished = ending(self.config, self.done, loss)
        if self.finished:
            self._saver.save()

    def _pause(self) -> None:
        """Records the last step and pauses the watchdog; `steps` starts both clocks again."""
        self.recorder.flush()
        self._watchdog.pause()
        self._is_paused = True

    # ---- After the last step

    def conclude(self, config: Config | None = None) -> Result:
        """Prints how the run ended and writes report.html; if it finished, also a sample (sample.txt) and commands.

        Pass `config` to use another one for the sample and the commands. If this start made no step, the result's
        metrics are the last ones in the report, and only the process that writes the report has them.
        """
        config, folder, tokenizer = config or self.config, self.folder, self.inputs.tokenizer
        if not self._has_begun:
            folder.fetch("metrics.jsonl")
            say([*self.start.messages, f"finished: {self.finished}."])
        elif self.stopped_by:
            say([stopped(folder, self.stopped_by, self.done)])
        elif self.done < config.run.steps or not self.recorder.last:  # by target_eval_loss, or in an earlier start
            say([f"finished: {self.finished}."])
        if config.decoding.sample_length and tokenizer and not self.stopped_by:
            self._write_sample(config)
        folder.sync()
        if self._report:
            say([f"report: {self._report.finish()}"])
        wanted = config.data, config.decoding.prompt, config.evaluation.eval_interval, config.run.steps
        wants_commands = config.checkpoint.enable_checkpointing and not (self.stopped_by or config.run.quiet)
        if wants_commands and (commands := optional("next_commands")):
            say(commands.next_commands(folder.path, tokenizer, *wanted))
        metrics, eval_metrics = self.recorder.last if self._has_begun else {}, self.eval_metrics
        if self._report and not metrics:  # an earlier launch ran all steps
            metrics, last_eval = dict(self._report.history.last_train), self._report.history.last_eval
            eval_metrics = {key: last_eval[key] for key in last_eval if key != "step"}
        return Result(self.state, metrics, eval_metrics, self.stopped_by)

    def _write_sample(self, config: Config) -> None:
        completion = optional("generation.completion")
        if completion is None:
            say(["no sample is generated: src/extras/generation is missing"])
            return
        settings = config.decoding, config.batch.max_target_length, self.plan, self.state.weights, self.inputs.tokenizer
        text = printable(completion.sample(*settings))
        say(["sample:", *(f"  {line}" for line in text.splitlines())])
        self.folder.write_text("sample.txt", f"after step {self.done}\n{text}\n")
