"""Collects the contents of a checkpoint, and compares a run's config with its config at the last start."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from src.checkpoint.run_folder import RunFolder, absolute, steps_in
from src.config.load import compare_runs, from_yaml
from src.config.schema import Config
from src.data.batch_schedule import BatchSchedule
from src.data.host_arrays import to_global
from src.data.types import DataPosition, InputSpec, Rows, TrainData
from src.step.plan import StepPlan
from src.step.state import TrainState
from src.system.errors import UserError


def checkpoint_entries(
    plan: StepPlan, state: TrainState, position: np.ndarray, rows: Rows, schedule: BatchSchedule
) -> dict[str, Any]:
    """Collects a checkpoint's arrays: the state, and the data position of all hosts' streams after its last step.

    `position` has the positions of this host's streams, int32 [streams, S, 2], and `rows` the streams' numbers.
    """
    sharding = plan.layout.sharding(("batch", None, None))
    positions = to_global(position, sharding, rows, schedule.rows)
    if schedule.ramp:  # devices hold the streams in another order than checkpoints, which have them by number
        positions = _taking(sharding)(positions, np.argsort(schedule.streams()))
    return {**saved_entries(plan, state), "data_position": positions}


@functools.cache  # avoids compiling it at each save
def _taking(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    return jax.jit(lambda rows, places: rows[places], out_shardings=sharding)


def saved_entries(plan: StepPlan, state: TrainState) -> dict[str, Any]:
    """Selects the entries of a state to save: with adapters, all but the base weights."""
    return {name: entry for name, entry in state.by_name().items() if not (plan.step.lora_rank and name == "frozen")}


def saved_meta(
    plan: StepPlan, inputs: InputSpec, data: TrainData, start: DataPosition, fingerprint: Mapping[str, Any]
) -> dict[str, Any]:
    """Builds the meta of all checkpoints of this launch, whose data begin at `start`; raises as `identity` does."""
    meta = {
        "data": fingerprint,
        "vocab_size": plan.spec.vocab_size,
        "tokenizer": inputs.tokenizer.fingerprint() if inputs.tokenizer else None,
        "rows_before": start.rows_before,
        "mixture": {"names": data.names, "weights": data.weights},
    }
    if plan.step.lora_rank:
        from src.checkpoint.load_weights import identity

        loading = inputs.config.checkpoint
        meta["lora"] = {
            "rank": plan.step.lora_rank,
            "alpha": plan.step.lora_alpha,
            "base": str(absolute(loading.load_parameters_path)),
            "base_identity": identity(loading.load_parameters_path),
            "base_ema": loading.load_ema,
        }
    return meta


def compare_configs(config: Config, folder: RunFolder) -> list[str]:
    """Describes each change since the last start in a line; raises UserError for breaking ones not accepted.

    A run without checkpoints may change in any way; one that has some must keep enable_checkpointing.
    """
    if not steps_in(folder.path / "checkpoints"):  # a start that was killed may leave an empty folder
        return []
    if not config.checkpoint.enable_checkpointing:
        raise UserError(
            f"{folder.path} has checkpoints, which a run with enable_checkpointing=false would neither use nor "
            "add to. Use another run_name."
        )
    if not (saved := folder.read_text("config.yml")):
        return ["the run's config.yml is missing or empty: cannot tell what has changed since its last start"]
    harmless, breaking = compare_runs(from_yaml(saved), config)
    if breaking:
        listed = "\n".join(f"  {change}" for change in breaking.values())
        raise UserError(
            f"This run was started with different settings for its weights or data (old -> new):\n{listed}\n"
            f"Restore them, or use another run_name (load_parameters_path={folder.path} starts it from these weights), "
            "or accept the changes, if they keep the shapes of the weights and of the optimizer's arrays: "
            f"accept_changes=[{', '.join(breaking)}]"
        )
    return [f"changed since the run's last start: {change}" for change in harmless.values()]
