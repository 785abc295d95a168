"""Trains a model: `python -m src.train configs/base.yml key=value`. Read from top to bottom."""

import contextlib
from collections.abc import Sequence

from ml_collections import ConfigDict

from src.checkpoint.run_rules import run_rules
from src.config.schema import Config
from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.run.diagnostics import advice_on_memory, stack_traces
from src.run.recorder import Result
from src.run.run import Run
from src.run.run_setup import configured
from src.step.optimizer import hparams_at
from src.system.errors import say
from src.system.exit_codes import run_command
from src.system.imports import optional


def main(argv: Sequence[str] | ConfigDict) -> Result | None:
    """Trains with the keys of a command line or a ConfigDict; returns None for --help.

    Raises UserError for a user's mistake or a non-finite loss, TransientError for a failure that may pass.
    """
    config = configured(argv)
    if config is None:
        return None
    advice = advice_on_memory(config.batch.per_device_batch_size, config.step.remat_policy)
    with stack_traces(config.diagnostics), advice, contextlib.ExitStack() as exits:
        return train(config, exits)


def train(config: Config, exits: contextlib.ExitStack) -> Result:
    """Trains with a checked config, raising as `main` does. `exits` closes the run's resources, however it ends."""
    # ---- Devices, model and step
    run = Run(config, exits)
    traced = run.traced
    train_step = traced.train
    if config.aot.compiled_trainstep_file or config.aot.pgle or config.aot.pgle_profile:
        from src.extras.aot import pgle, program  # these import private JAX modules, which other versions may move

        program_header = program.header(traced, config.model, config.step, config.batch, config.mesh)
        train_step = pgle.chosen_step(config.aot, traced, program_header, run.folder.path, exits)
    elif run.plan.quantization.kind or run.schedule.ramp:
        from src.extras.aot import eight_bits

        train_step = eight_bits.compiled(traced)  # in a ramp, compile the full batch first, because it must fit

    # ---- Data
    needed_by = "decode_metrics" * bool(config.decoding.decode_metrics)
    tokenizer = make_tokenizer(config.data, config.model.vocab_size, needed_by)
    inputs = InputSpec.of(config, tokenizer, run_rules(config.run, config.checkpoint))
    data, eval_sets = open_sources(inputs, config.evaluation)
    if config.decoding.sample_length and tokenizer and (completion := optional("generation.completion")):
        # Reject a prompt that is too long now rather than after the run.
        say(completion.check_sample(config.decoding, config.batch.max_target_length, tokenizer))
    if config.decoding.decode_metrics:
        from src.extras.generation.decode import DecodeMetrics

        run.generated = DecodeMetrics(config.decoding, inputs, traced.rows)

    # ---- Start or resume
    run.open(inputs, data, eval_sets)
    if run.is_over():
        return run.conclude()
    run.evaluate_by(traced.eval)
    run.announce()

    # ---- Steps
    with run:
        for step in run.steps():
            batch = run.next_batch()
            is_full = run.schedule.size(step) == traced.rows  # false during a ramp of the batch size
            step_fn = train_step if is_full else traced.train
            hparams = hparams_at(config.step, config.run.steps, step)
            state, metrics = step_fn(run.state, run.to_devices(batch), hparams)
            run.record(state, metrics, batch)
            if run.saves():
                run.save()
            if run.evaluates():
                run.evaluate()
    return run.conclude()


if __name__ == "__main__":
    run_command(main)
