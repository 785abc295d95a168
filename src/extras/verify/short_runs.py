"""Short runs of src.train in a temporary folder, for checks f and k."""

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from src.config.schema import Config
from src.extras.verify.logits import NO_PATTERNS
from src.extras.verify.rows import first_line
from src.extras.verify.subject import Subject
from src.step.state import TrainState
from src.system.errors import Unsupported
from src.system.imports import named

KEYS: dict[str, Any] = {"dataset_type": "synthetic", "quiet": True}


class Ended(NamedTuple):
    """What a run leaves: its last state, and the lines of its metrics.jsonl."""

    state: TrainState
    metrics: list[dict[str, Any]]


def obstacle(subject: Subject, *keys: Mapping[str, Any]) -> str:
    """Says why runs with these keys cannot begin on all devices; empty if they can.

    An error after that, in a run that began, is a fault, whatever its class.
    """
    try:
        for each in keys:
            subject.plan(len(jax.devices()), **each)
    except Unsupported as error:
        return first_line(error)
    return ""


def with_base(config: Config) -> Config:
    """Gives adapters, if there are any, weights that they add to: those of a short run without them, in this folder."""
    if not config.step.lora_rank:
        return config
    keys: dict[str, Any] = {"run_name": "base", "load_parameters_path": "", "enable_checkpointing": True}
    train(config.replace(**NO_PATTERNS | keys | {"steps": 1, "checkpoint_period": 1}))
    return config.replace(load_parameters_path=f"{config.run.base_output_directory}/base/checkpoints/1")


def train(config: Config) -> Ended:
    """Runs a config, without its lines on stdout."""
    with contextlib.ExitStack() as exits, contextlib.redirect_stdout(io.StringIO()):
        state = named("src.train:train")(config, exits).state
    lines = Path(config.run.base_output_directory, config.run.run_name, "metrics.jsonl").read_text().splitlines()
    return Ended(state, [json.loads(line) for line in lines])
