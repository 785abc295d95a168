"""Loads the loss function that the key `loss` names, and checks its results."""

import functools

import jax
import jax.numpy as jnp

from src.model.decoder import Decoder
from src.step.loss import LossFunction, LossSums
from src.step.plan import Batch, StepPlan
from src.system.errors import UserError
from src.system.user_code import call, check_metrics, class_name, load_function


def loss_function(name: str) -> LossFunction:
    """Wraps the function that the key `loss` names in a check of its result; raises as `load_function` does."""
    return functools.partial(_checked, load_function(name, "loss"))


def _checked(function: LossFunction, model: Decoder, batch: Batch, plan: StepPlan) -> LossSums:
    """Calls a user's loss while a step is traced. Raises UserError unless it returns sums that a step can add up."""
    sums = call("loss", function, model, batch, plan)
    if not isinstance(sums, LossSums):
        found = "an array" if isinstance(sums, jax.Array) else f"a value of type {class_name(sums)}"
        raise UserError(f"loss={plan.step.loss} returned {found}: expected a LossSums")
    expected = {
        "loss": ((), jnp.floating, "a sum over the tokens of loss_mask"),
        "z": ((), jnp.floating, "a sum over the same tokens; jnp.zeros(()) without a z-loss"),
        "mtp": ((plan.spec.mtp_num_layers,), jnp.floating, "a sum for each layer of mtp_num_layers"),
        "non_padding": ((), jnp.integer, "a number of tokens"),
    }
    for field, (shape, kind, meaning) in expected.items():
        value = getattr(sums, field)
        is_array = isinstance(value, jax.Array)
        if not is_array or value.shape != shape or not jnp.issubdtype(value.dtype, kind):
            returned = f"{value.dtype}{list(value.shape)}" if is_array else class_name(value)
            raise UserError(
                f"loss={plan.step.loss} returned LossSums with {field} of {returned}: expected {kind.__name__}"
                f"{list(shape)}, {meaning}"
            )
    check_metrics(f"loss={plan.step.loss}, its metrics,", sums.metrics)
    if not isinstance(sums.router, dict) or (
        (plan.spec.has_experts or plan.step.log_internals) and "segments" not in sums.router
    ):
        raise UserError(
            f"loss={plan.step.loss} returned LossSums with router={sums.router}: expected the layers' reports, "
            "the third result of hidden_states"
        )
    if "mtp" in plan.split(plan.shapes).stats and "mtp" not in sums.router:
        raise UserError(
            f"loss={plan.step.loss} returned LossSums without the prediction layers' reports, by which routed_bias "
            "moves: add the second result of mtp_hidden_states to router, as next_token_loss does"
        )
    return sums
