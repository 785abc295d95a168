"""Says what a run's checkpoint holds: entries of arrays, and facts beside them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from src.checkpoint.data_position import Facts
from src.checkpoint.load_weights import identity
from src.checkpoint.run_folder import absolute
from src.config.schema import Checkpoint
from src.data.batch_schedule import BatchSchedule
from src.data.host_arrays import to_global
from src.data.types import Tokenizer
from src.step.plan import StepPlan
from src.step.state import TrainState


def checkpoint_entries(
    plan: StepPlan, state: TrainState, position: np.ndarray, rows: Sequence[int], schedule: BatchSchedule
) -> dict[str, Any]:
    """Returns what a checkpoint holds: the state, and the data position after its last step of all hosts' streams."""
    sharding = plan.layout.sharding(("batch", None, None))  # `position`: of this host's, int32 [streams, S, 2]
    positions = to_global(position, sharding, rows, schedule.rows)
    if schedule.ramp:  # devices have the streams in another order
        positions = _taking(sharding)(positions, np.argsort(schedule.streams()))
    return {**saved_entries(plan, state), "data_position": positions}


@functools.cache  # or each save would compile it
def _taking(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    return jax.jit(lambda rows, places: rows[places], out_shardings=sharding)


def saved_entries(plan: StepPlan, state: TrainState) -> dict[str, Any]:
    """Returns the entries of a state that are saved; with adapters, the weights under them are not."""
    return {name: entry for name, entry in state.by_name().items() if not (plan.step.lora_rank and name == "frozen")}


def saved_meta(plan: StepPlan, loading: Checkpoint, fingerprint: Facts, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns what a checkpoint says about itself beside its arrays; `loading` says what the weights began with."""
    vocab_size, tokenizer_facts = plan.spec.vocab_size, tokenizer.fingerprint() if tokenizer else None
    meta = {"data": fingerprint, "vocab_size": vocab_size, "tokenizer": tokenizer_facts}
    if plan.step.lora_rank:
        meta["lora"] = {
            "rank": plan.step.lora_rank,
            "alpha": plan.step.lora_alpha,
            "base": str(absolute(loading.load_parameters_path)),
            "base_identity": identity(loading.load_parameters_path),
            "base_ema": loading.load_ema,
        }
    return meta
