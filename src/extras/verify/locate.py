"""Finds where two forward passes part: the first array, by its layer and name, that differs.

The arrays are those that the model names for its remat policies (`checkpoint_name`), which a new mixer does too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from src.extras.verify.subject import PLAIN_DESCENT, Subject
from src.model.params import Weights
from src.parallel.sequence import zigzag_order
from src.step.loss import hidden_states, in_zigzag
from src.step.plan import StepPlan
from src.step.train_step import with_dropout_keys

UNROLLED: dict[str, Any] = {"scan_layers": "false", "remat_policy": "none"}
LAYER = "decoder_layer_input"  # the first name of every layer
EMBEDDED = "the embedded tokens"  # the first layer's input
INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")

Values = list[tuple[str, np.ndarray]]  # what a forward pass computes, in its order


def forward_values(subject: Subject, plan: StepPlan, batch: Mapping[str, Any]) -> Values:
    """Computes the model's named arrays for a batch, with tokens in the text's order.

    Arrays within loops and shard_map, which no policy can save by name either, are left out.
    """
    names: list[str] = []

    def evaluate(weights: Weights) -> list[jax.Array]:
        decoder, keyed = plan.decoder(weights), with_dropout_keys({**batch}, jnp.int32(0), plan)
        hidden_BTD, context, _ = hidden_states(decoder, in_zigzag(keyed, plan.layout), plan)
        # The vocabulary's padding has logits that are larger than all others.
        return [hidden_BTD, decoder.logits(hidden_BTD, context)[..., : plan.spec.vocab_size]]

    placed = subject.placed(plan)
    traced = jax.make_jaxpr(evaluate)(placed)

    def run(leaves: list[jax.Array]) -> list[jax.Array]:
        found: list[tuple[str, jax.Array]] = []
        ends = _run(traced.jaxpr, traced.consts, leaves, found)
        found = [] if plan.execution.schedule else found  # a pipeline has most layers in a loop
        names[:] = [name for name, _ in found]
        return [*(array for _, array in found), *ends]

    arrays = jax.device_get(jax.jit(run)(jax.tree.leaves(placed)))
    at = np.cumsum([name == LAYER for name in names]) - 1
    labels = [f"layer {layer}'s {name}" for layer, name in zip(at, names, strict=True)]
    labels[:1] = [EMBEDDED] * bool(names)
    (B, T), order = batch["tokens"].shape, np.argsort(zigzag_order(batch["tokens"].shape[1], plan.layout))
    return [
        (label, array[:, order] if array.shape[:2] == (B, T) else array)
        for label, array in zip([*labels, "the final hidden states", "logits"], arrays, strict=True)
    ]


def parting_of(subject: Subject, devices: int, keys: Mapping[str, Any], batch: Mapping[str, Any], bound: float) -> str:
    """Says which array of a forward pass with other keys differs first; "" for keys that unrolling replaces."""
    if UNROLLED.keys() & keys.keys():
        return ""
    found = forward_values(subject, subject.plan(devices, **{**keys, **UNROLLED}), batch)
    expected = forward_values(subject, subject.plan(**PLAIN_DESCENT, **UNROLLED), batch)
    place = parting(found, expected, batch["segment_ids"] > 0, bound)
    return f"from {place} on" if place else "though the logits agree"


def parting(found: Values, expected: Values, real: np.ndarray, bound: float) -> str:
    """Names the first array that differs at a token where `real` [B, T] is true; "" if none does.

    `bound` is relative to the largest value; 0 compares bits. Arrays that a mesh has in other shapes, or in a loop, are
    not compared.
    """
    theirs: dict[str, list[np.ndarray]] = {}
    for label, array in expected:
        theirs.setdefault(label, []).append(array)
    for label, array in found:
        wanted = theirs[label].pop(0) if theirs.get(label) else np.zeros(0)
        if array.shape != wanted.shape:
            continue
        if array.shape[:2] == real.shape:
            array, wanted = array[real], wanted[real]
        error = np.abs(np.float64(array) - np.float64(wanted))
        if not np.all(error <= bound * np.max(np.abs(wanted), initial=0)):
            return label
    return ""


def _run(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], found: list[tuple[str, Any]]) -> list[Any]:
    """Evaluates a program, and adds its named arrays to `found`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        given, primitive = [read(variable) for variable in eqn.invars], eqn.primitive
        inner = [each for each in eqn.params.values() if hasattr(getattr(each, "jaxpr", each), "eqns")]
        if primitive.name in INLINED and inner:
            outputs = _run(getattr(inner[0], "jaxpr", inner[0]), getattr(inner[0], "consts", ()), given, found)
        else:
            outputs = primitive.bind(*given, **primitive.get_bind_params(eqn.params))
            outputs = outputs if primitive.multiple_results else [outputs]
        if primitive.name == "name":
            found.append((eqn.params["name"], outputs[0]))
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(variable) for variable in jaxpr.outvars]
