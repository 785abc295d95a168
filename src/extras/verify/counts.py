"""Check h: the parameters and FLOPs of reports and the MFU, against the arrays and the matmuls of a traced step."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from src.extras.verify.subject import FAIL, LENGTH, NOT_APPLICABLE, PASS, PLAIN_DESCENT, ROWS, Row, Subject
from src.model.flops import all_layers, block_weights, count_params, flops_per_token, head_elements
from src.model.params import by_path, dotted
from src.model.parts import layer_costs
from src.model.spec import ModelSpec
from src.step.loss import LossFunction, next_token_loss
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.train_step import compile_steps

# Each matmul is made once and for all keys, and each row by the experts that it is sent to.
PLAIN: dict[str, Any] = {
    **{"scan_layers": "false", "remat_policy": "none", "attention": "dot_product", "num_vocab_tiling": 1},
    **{"gradient_accumulation_steps": 1, "lora_rank": 0, "trainable_parameters": (), "capacity_factor": -1.0},
    **PLAIN_DESCENT,
}
TOKENS = ROWS * LENGTH


def rows(subject: Subject) -> Iterator[Row]:
    """Compares integers, so the bound is 0; neither side counts elementwise operations, softmax and lookups."""
    plan, arrays = subject.plan(**PLAIN), by_path(subject.weights)
    spec, elements = plan.spec, 0
    for path, axes in by_path(plan.axes).items():
        sizes = zip(axes, arrays[path].shape, strict=True)
        elements += math.prod(spec.vocab_size if axis == "vocab" else size for axis, size in sizes)
    yield _compared("parameters", elements, count_params(spec))

    state, made = abstract_state(plan), {False: -TOKENS * _useless(spec), True: 0}
    traced = traced_step(plan, state, next_token_loss)  # which the MFU counts, even if the config has another loss
    for _, is_batched, size in matmuls(traced.jaxpr.jaxpr):
        made[is_batched] += size
    flops = flops_per_token(spec, LENGTH)
    special = {each.attention_type for each in all_layers(spec) if layer_costs(each)["attention"].other_flops}
    with_weights = flops.layers + 6 * (head_elements(spec) + spec.mtp_num_layers * 2 * spec.emb_dim**2)
    counted, found = round(TOKENS * (with_weights if special else flops.palm)), made[False] + made[True] * (not special)
    same = []
    for layer, count in all_layers(spec).items():
        weights = block_weights(layer, spec)
        same += [dotted(each.path) for each in weights if 6 * TOKENS * count * each.used == abs(found - counted) > 0]
    note = f": the difference is that of {' or '.join(same)}" if same else ""
    yield _compared(f"FLOPs of {'matmuls with weights' if special else 'all matmuls'}", found, counted, note)
    if special:
        why = f"{' and '.join(special)} counts operations token by token; the program computes them in chunks"
        yield Row("h", "FLOPs of other matmuls", NOT_APPLICABLE, note=why)


def traced_step(plan: StepPlan, state: TrainState, loss: LossFunction) -> jax.stages.Traced:
    """Traces a training step without arrays."""
    train_step, _ = compile_steps(plan, state, loss=loss)
    return train_step.trace(state, abstract_batch(plan, ROWS, LENGTH), hparams_at(plan.step, 1, 0))


def _compared(name: str, found: int, counted: int, note: str = "") -> Row:
    status = PASS if found == counted else FAIL
    return Row("h", name, status, abs(found - counted), 0, f"{counted:,} counted, {found:,} found{note}")


def _useless(spec: ModelSpec) -> int:
    """FLOPs of a token that the MFU leaves out: padded logits, and experts' biases, added by one-hot matmuls."""
    flops = 6 * (1 + spec.mtp_num_layers) * spec.emb_dim * (spec.padded_vocab_size - spec.vocab_size)
    for layer, count in all_layers(spec).items():
        for each in block_weights(layer, spec):
            # `wo_bias` is scaled by the router's weight, which has a gradient: a third matmul.
            passes = {"wi_bias": 2, "wo_bias": 3}.get(each.path[-1], 0) * (each.used < each.size)
            flops += 2 * passes * count * layer.num_experts_per_tok * each.size
    return flops


def matmuls(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, bool, int]]:
    """Yields each matmul's equation, whether it has a batch dim, as none with a weight has, and its FLOPs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (summed, _), (batch, _) = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[dim] for dim in summed)
            yield eqn, bool(batch), 2 * times * math.prod(eqn.outvars[0].aval.shape) * terms
        elif eqn.primitive.name == "ragged_dot_general":  # each row of the left meets one group's matrix
            left, right = (each.aval.shape for each in eqn.invars[:2])
            dims = eqn.params["ragged_dot_dimension_numbers"]
            (_, summed), (_, batch) = dims.dot_dimension_numbers
            free = {*range(len(right))}.difference(summed, batch, dims.rhs_group_dimensions)
            yield eqn, False, 2 * times * math.prod(left) * math.prod(right[dim] for dim in free)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from matmuls(inner, times * eqn.params.get("length", 1))
