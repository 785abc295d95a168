"""Finds where two forward passes begin to differ: the first array that does, by its layer and name.

The arrays are those that layers, also new mixers, name for remat policies with `checkpoint_name`.
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
LAYER = "decoder_layer_input"  # the first named array of every layer
EMBEDDED = "the embedded tokens"  # label of the first layer's input
INLINED = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")

Values = list[tuple[str, np.ndarray]]  # labels and arrays of a forward pass, in the order of computation


def forward_values(subject: Subject, plan: StepPlan, batch: Mapping[str, Any], step: int = 0) -> Values:
    """Computes the model's named arrays for a batch, its final hidden states and its logits without padded ids.

    Tokens are in the batch's order, also if `plan` shards sequences in zigzag order. Named arrays within loops and
    shard_map are left out, and with pipeline stages all of them. Dropout is that of the step with this number.
    """
    names: list[str] = []

    def evaluate(weights: Weights) -> list[jax.Array]:
        decoder, keyed = plan.decoder(weights), with_dropout_keys({**batch}, jnp.int32(step), plan)
        hidden_BTD, context, _ = hidden_states(decoder, in_zigzag(keyed, plan.layout), plan)
        # Logits of padded ids are masked with a huge number, relative to which no difference would show.
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
    """Says which array of a forward pass with `keys` on `devices` is the first to differ from one device's.

    Both passes run with UNROLLED. Returns "" for `keys` that it would replace. `bound` is as in `parting`.
    """
    if UNROLLED.keys() & keys.keys():
        return ""
    found = forward_values(subject, subject.plan(devices, **{**keys, **UNROLLED}), batch)
    expected = forward_values(subject, subject.plan(**PLAIN_DESCENT, **UNROLLED), batch)
    place = parting(found, expected, batch["segment_ids"] > 0, bound)
    return f"from {place} on" if place else "though the logits agree"


def parting(found: Values, expected: Values, real: np.ndarray, bound: float) -> str:
    """Names the first array that differs at a token where `real` [B, T] is true; "" if none does.

    `bound` is relative to the largest value of the expected array; 0 asks for equality. Arrays that `expected` lacks or
    has in another shape are skipped.
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
    """Evaluates a jaxpr, with the calls in it inlined, and appends its named arrays to `found`; returns its outputs."""
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
