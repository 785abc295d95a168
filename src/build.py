"""The step that a configuration means on given devices: the same one for training and for compiling ahead of time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from src.mesh import global_batch_size, make_layout
from src.model.spec import model_spec
from src.optimizer import Hyper, hyper_parameters
from src.plan import Batch, StepPlan, make_plan
from src.state import TrainState, abstract_batch, abstract_state
from src.train_step import compile_steps


class Built(NamedTuple):
    """A step that is traced but not compiled, and what it is called with: `jax.ShapeDtypeStruct`s with shardings."""

    plan: StepPlan
    compiler_options: Mapping[str, str]  # XLA's, of `train`
    state: TrainState
    batch: Batch
    hyper: Hyper
    train: jax.stages.Wrapped
    eval: jax.stages.Wrapped
    traced: jax.stages.Traced

    @property
    def rows(self) -> int:
        """Of the global batch."""
        return self.batch["tokens"].shape[0]

    @property
    def tokens(self) -> int:
        """Of the global batch, padding among them."""
        return self.batch["tokens"].size


def build(
    config: Mapping[str, Any], devices: Sequence[jax.Device], compiler_options: Mapping[str, str] | None = None
) -> Built:
    """Traces the step of a checked config; `compiler_options` are XLA's.

    Raises:
        UserError: what was asked for does not fit the devices or the mesh.
    """
    layout = make_layout(config, devices)
    plan = make_plan(config, model_spec(config), layout)
    rows = global_batch_size(
        layout, config["per_device_batch_size"], config["gradient_accumulation_steps"], "per_device_batch_size"
    )
    position = (rows, max(len(config["datasets"]), 1), 2)
    state = abstract_state(plan, config, position)
    batch = abstract_batch(plan, position, config["max_target_length"])
    hyper = hyper_parameters(config, 0)
    train, evaluate = compile_steps(plan, state, compiler_options)
    return Built(plan, compiler_options or {}, state, batch, hyper, train, evaluate, train.trace(state, batch, hyper))
