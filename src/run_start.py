"""Begins a run, for `src/train.py` and `src/train_dpo.py`: its folder, where it goes on, and what it writes to."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from src.checkpoint.changes import compare_configs
from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.resume import ResumePoint, starting_state
from src.checkpoint.run_folder import RunFolder, in_run_folder
from src.config import load as configuration
from src.config.schema import Config
from src.console import say
from src.data.batch_schedule import BatchSchedule
from src.data.fingerprint import EVALUATION
from src.data.types import Tokenizer
from src.report.metrics import MetricsLog, StepPrinter
from src.report.summary import dates
from src.startup import environment
from src.step.plan import StepPlan
from src.step.state import TrainState


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
    changes = compare_configs(config, folder, plan, abstract)
    accepted = (*config.accept_changes, *[EVALUATION] * (not config.target_eval_loss))
    start = starting_state(
        config.checkpoint, config.data, accepted, plan, abstract, checkpointer, fingerprint, tokenizer
    )
    if start.resumed:
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
    log = MetricsLog(folder.fetch("metrics.jsonl"), folder.local / "tensorboard", resume_step)
    say(log.messages)
    return log, StepPrinter(config.steps, first_step, config.log_period, config.quiet, schedule.rows_before)
