"""Short runs of src.train in a temporary folder, for checks `f` and `k`."""

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
    """A run's last state, and the lines of its metrics.jsonl."""

    state: TrainState
    metrics: list[dict[str, Any]]


def obstacle(subject: Subject, *keys: Mapping[str, Any]) -> str:
    """Says why a run with one of the `keys` is unsupported on all virtual devices; empty if each can begin.

    Only planning may find that: an error in a run that began is a fault, also if it is Unsupported.
    """
    try:
        for each in keys:
            subject.plan(len(jax.devices()), **each)
    except Unsupported as error:
        return first_line(error)
    return ""


def with_base(config: Config) -> Config:
    """Makes a config with adapters load base weights, from a run of one step, made here in the config's output folder.

    Returns a config without adapters as it is.
    """
    if not config.step.lora_rank:
        return config
    keys: dict[str, Any] = {"run_name": "base", "load_parameters_path": "", "enable_checkpointing": True}
    train(config.replace(**NO_PATTERNS | keys | {"steps": 1, "checkpoint_period": 1}))
    return config.replace(load_parameters_path=f"{config.run.base_output_directory}/base/checkpoints/1")


def train(config: Config) -> Ended:
    """Runs src.train with a config in this process, and suppresses its output to stdout."""
    with contextlib.ExitStack() as exits, contextlib.redirect_stdout(io.StringIO()):
        state = named("src.train:train")(config, exits).state
    lines = Path(config.run.base_output_directory, config.run.run_name, "metrics.jsonl").read_text().splitlines()
    return Ended(state, [json.loads(line) for line in lines])
