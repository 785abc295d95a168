"""Trains a model: `python -m src.train configs/base.yml key=value`. Read from top to bottom."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from src.checkpoint.data_position import run_rules
from src.checkpoint.preemption import Preemption
from src.checkpoint.run_folder import RunFolder, kept_checkpoint
from src.cli import run_command
from src.completion import encode_prompt, length_note
from src.config.schema import Config
from src.data.fingerprint import data_fingerprint
from src.data.host_arrays import check_same, host_rows, to_global
from src.data.loader import HostBatch, train_batches
from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec, Tokenizer
from src.decode import DecodeMetrics, sample
from src.errors import printable, say
from src.report.diagnostics import Profile, Watchdog, advice_on_memory, stack_traces
from src.report.recorder import LiveReport, Result, recorded
from src.report.summary import ending, next_commands, print_header, run_header
from src.report.trackers import Tracking
from src.run import Evaluator, Saver, begin, open_log, open_run
from src.startup import configured, environment
from src.step.narrow_weights import NarrowWeights
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan
from src.step.state import TrainState, batch_sharding
from src.step.train_step import Metrics


def main(argv: Sequence[str] | ConfigDict) -> Result | None:
    """Runs the command line `argv`; None if it only asked for help. Raises UserError, for a non-finite loss too."""
    config = configured(argv)
    if config is None:
        return None
    advice = advice_on_memory(config.per_device_batch_size, config.remat_policy)
    with stack_traces(config.diagnostics), advice, contextlib.ExitStack() as exits:
        return train(config, exits)


def train(config: Config, exits: contextlib.ExitStack) -> Result:
    """Trains by a checked config. What must be closed, however the run ends, is entered in `exits`."""
    # ---- Devices, model and step
    folder, built, tracking, report = begin(config, exits)
    plan, global_batch, schedule = built.plan, built.rows, built.schedule
    train_step = built.train
    if config.compiled_trainstep_file or config.pgle or config.pgle_profile:
        from src.aot import pgle, program  # import private modules of JAX, which another JAX may have elsewhere

        program_header = program.header(built, config.model, config.step, config.batch, config.mesh)
        train_step = pgle.chosen_step(config.aot, built, program_header, folder.path, exits)
    elif plan.quantization.kind or schedule.ramp:
        from src.aot import eight_bits

        train_step = eight_bits.compiled(built)  # of a ramp the full batch, which has to fit, before the smaller ones

    # ---- Data
    tokenizer = make_tokenizer(config.data, config.vocab_size, "decode_metrics" * bool(config.decode_metrics))
    inputs = InputSpec.of(config, tokenizer, run_rules(config.run, config.checkpoint))
    data, eval_sets = open_sources(inputs, config.evaluation)
    place = batch_sharding(plan.layout, plan.fields)
    rows = host_rows(place["tokens"], (global_batch, config.max_target_length))
    streams = schedule.streams()[rows]
    fingerprint = data_fingerprint(inputs, data, global_batch, eval_sets) | schedule.fingerprint()
    check_same(fingerprint, "data or code", "the same files, functions, tokenizer and keys")
    if config.sample_length and tokenizer:
        # A prompt that is too long fails now rather than after the run.
        prompt = encode_prompt(config.decoding, config.max_target_length, tokenizer, config.prompt)
        longest = max(len(prompt), config.decode_prompt_tokens)
        say(length_note(config.decoding, config.max_target_length, longest))
    generated = DecodeMetrics(config.decoding, inputs, global_batch) if config.decode_metrics else None

    # ---- The run's folder, and where in the run it is
    checkpointer, start = open_run(config, folder, built, fingerprint, tokenizer, exits)
    state, first_step = start.state, int(start.state.step)
    finished = ending(config, first_step, start.eval_loss)
    if finished and not start.evaluation_due:  # in a restart loop, or after a kill at the end
        folder.fetch("metrics.jsonl")
        say([*start.messages, f"finished: {finished}."])
        return conclude(config, plan, Result(state, {}, {}, 0), tokenizer, folder, report)
    places, rows_taken, rows_before, saved = start.position
    place_in_data = rows_taken, None if places is None else places[streams], rows_before, saved
    batches = train_batches(inputs, data, streams, global_batch, *place_in_data, schedule, first_step)
    exits.callback(batches.close)  # not before the report, as it waits for rows that are being made
    evaluations = [
        Evaluator(config.evaluation, inputs, plan, built.eval, eval_set, start.eval_position.get(eval_set.name))
        for eval_set in eval_sets
    ]

    # ---- What the user sees
    header = run_header(config, built, inputs, data, eval_sets, folder, first_step, environment()) if report else []
    if not config.quiet:
        print_header(header)
    recorder = open_log(config, folder, header, start, built)
    say(start.messages)
    saver = Saver(
        config, folder, built, rows, checkpointer, start, recorder, fingerprint, tokenizer, data, evaluations, generated
    )

    count_cut = jax.jit(lambda cuts: jnp.sum(cuts[:, 1]), out_shardings=plan.layout.sharding(()))
    cuts_sharding = plan.layout.sharding(("batch", None))

    def update(done: int, state: TrainState, host_batch: HostBatch) -> tuple[TrainState, Metrics]:
        size = schedule.size(done)
        batch = to_global(host_batch.arrays, place, host_batch.rows, size)
        make_update = train_step if size == global_batch else built.train
        state, metrics = make_update(state, batch, hparams_at(config.step, config.steps, done))
        if config.use_sft:
            cuts = to_global(host_batch.cuts, cuts_sharding, host_batch.rows, size)
            metrics["conversations_cut"] = count_cut(cuts)
        return state, metrics

    result = run_steps(saver, batches, update, streams, tracking, report)
    return conclude(config, plan, result, tokenizer, folder, report)


def run_steps(
    saver: Saver,
    batches: Iterator[HostBatch],
    update: Callable[[int, TrainState, HostBatch], tuple[TrainState, Metrics]],
    streams: Sequence[int],
    tracking: Tracking,
    report: LiveReport | None,
) -> Result:
    """Makes a run's steps, each by `update(steps done, state, batch)`, with evaluations and checkpoints."""
    config, folder, start, recorder, built = saver.config, saver.folder, saver.start, saver.recorder, saver.built
    state, done, rows_taken, schedule = start.state, int(start.state.step), start.position[1], built.schedule
    narrow = NarrowWeights(built.plan, state, done + config.log_period)
    say(narrow.messages)
    tracking.start(folder, done if start.resumed else None)
    stopped_by, finished = 0, ending(config, done, start.eval_loss)
    with (
        recorder,
        contextlib.closing(Profile(config.diagnostics, done, config.steps, folder.local)) as profile,
        contextlib.closing(Preemption(folder.path)) as preemption,
        saver,
        Watchdog(config.diagnostics, folder, streams, saver.data.names) as watchdog,
    ):
        preemption.save = saver.save_now
        if start.evaluation_due and saver.evaluations:
            finished = saver.evaluate()
            recorder.start_clock()
        while not (finished or stopped_by):  # a step is recorded while the next one runs
            with recorder.waits_for_data(), preemption.waits_for_data():
                host_batch = next(batches)
            if schedule.changes_at(done):  # it is compiled again, in the time of this step and not of the last one
                recorder.flush()
                watchdog.pause()
            size = schedule.size(done)
            with profile.step(done, state):
                state, metrics = update(done, state, host_batch)
            done, rows_taken = done + 1, rows_taken + size
            evaluates = saver.reached(done, state, host_batch, rows_taken)
            recorder.add(done, metrics, built.tokens * size // built.rows)
            say(narrow.after(done, state))
            watchdog.step(done, rows_taken, host_batch.stream_positions)
            if preemption.reached(done) and done < config.steps:  # else nothing is left to resume
                stopped_by = tracking.stopped_by = preemption.signal or signal.SIGTERM  # 0: another process got it
                tracking.lacks_evaluation = evaluates
            saves = done % config.checkpoint_period == 0 or stopped_by or done == config.steps
            if evaluates or saves:
                recorder.flush()
                watchdog.pause()
                if saves:  # first, as an evaluation may fail
                    saver.save()
                finished = ending(config, done, None)
                if evaluates and not stopped_by:
                    finished = saver.evaluate()
                if report:
                    report.update()
                recorder.start_clock()
                watchdog.resume()
        watchdog.pause()
        say(saver.checkpointer.finish())  # while signals are still caught
    if stopped_by:
        note = kept_checkpoint(folder.path)
        note += f"; the same command, run_name={folder.name}, goes on from it" if note.endswith("stands") else ""
        say([f"stopped by {'Ctrl-C' if stopped_by == signal.SIGINT else 'SIGTERM'} after step {done}; {note}"])
    elif done < config.steps or not recorder.last:  # by target_eval_loss, or in an earlier start
        say([f"finished: {finished}."])
    return Result(state, recorder.last, saver.eval_metrics, stopped_by)


def conclude(
    config: Config,
    plan: StepPlan,
    result: Result,
    tokenizer: Tokenizer | None,
    folder: RunFolder,
    report: LiveReport | None,
) -> Result:
    """Writes the report; of a finished run, also a sample before it and the commands to use its model.

    Returns the result; of a run that was finished before, with the metrics that a process with a report knows.
    """
    state, stopped_by = result.state, result.stopped_by
    if config.sample_length and tokenizer and not stopped_by:
        text = printable(sample(config.decoding, config.max_target_length, plan, state.weights, tokenizer))
        say(["sample:", *(f"  {line}" for line in text.splitlines())])
        folder.write_text("sample.txt", f"after step {int(state.step)}\n{text}\n")
    folder.sync()
    if report:
        say([f"report: {report.finish()}"])
    if config.enable_checkpointing and not (stopped_by or config.quiet):
        say(next_commands(folder.path, tokenizer, config))
    return result if result.metrics else recorded(state, report)


if __name__ == "__main__":
    run_command(main)
