"""Check h: counts of parameters and FLOPs, for reports and the MFU, against the arrays and matmuls of a traced step."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from src.extras.verify.rows import Row, not_applicable, verdict
from src.extras.verify.subject import PLAIN_DESCENT, ROWS, Context
from src.model.flops import all_layers, block_weights, count_params, flops_per_token, head_elements, mean_keys
from src.model.params import by_path, dotted
from src.model.parts import layer_costs
from src.model.spec import ModelSpec
from src.step.loss import LossFunction, next_token_loss
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.train_step import compile_steps

# With these keys the step computes each matmul once, scores for all keys, and only the experts that a token is sent to.
PLAIN: dict[str, Any] = {
    **{"scan_layers": "false", "remat_policy": "none", "attention": "dot_product", "num_vocab_tiling": 1},
    **{"gradient_accumulation_steps": 1, "lora_rank": 0, "trainable_parameters": (), "capacity_factor": -1.0},
    **PLAIN_DESCENT,
}
MOST_TERMS = 3  # most terms whose sum may explain the error of a count


def rows(context: Context) -> Iterator[Row]:
    """Compares the counts of parameters, of keys that tokens attend to, and of a step's FLOPs with independent counts.

    The latter count entries of arrays, entries of a mask, and matmuls of a traced step. Both must be equal. Neither
    counts elementwise operations, softmax or lookups. If a type of layer counts its operations token by token, only the
    FLOPs of matmuls with weights are compared.
    """
    subject = context.subject
    plan, arrays = subject.plan(**PLAIN), by_path(subject.weights)
    spec, tokens = plan.spec, ROWS * subject.length
    sizes, terms = dict[str, int](), dict[str, int]()
    for path, axes in by_path(plan.axes).items():
        name, shape = dotted(path), arrays[path].shape
        sizes[name] = math.prod(spec.vocab_size if axis == "vocab" else n for axis, n in zip(axes, shape, strict=True))
        terms |= {name: sizes[name], f"padding of {name}": math.prod(shape) - sizes[name]}
    yield _compared("parameters", sum(sizes.values()), count_params(spec), terms)

    kinds = (layer_costs(layer)["attention"].scores for layer in all_layers(spec))
    for scores in {(scores.window, scores.chunk): scores for scores in kinds if scores}.values():
        within = f" within a window of {scores.window}" * (scores.window > 0)
        within += f" within blocks of {scores.chunk}" * (scores.chunk > 0)
        seen = int(np.sum(visible(subject.length, scores.window, scores.chunk)))
        counted = round(subject.length * mean_keys(scores, subject.length))
        yield _compared(f"keys that tokens attend to{within}", seen, counted, {})
    state, made = abstract_state(plan), {False: -tokens * _useless(spec), True: 0}
    # The MFU counts the FLOPs of the next-token loss, even if the config has another loss.
    traced = traced_step(plan, state, next_token_loss, subject.length)
    for _, is_batched, size in matmuls(traced.jaxpr.jaxpr):
        made[is_batched] += size
    flops = flops_per_token(spec, subject.length)
    special = {each.attention_type for each in all_layers(spec) if layer_costs(each)["attention"].other_flops}
    with_weights = flops.layers + 6 * (head_elements(spec) + spec.mtp_num_layers * 2 * spec.emb_dim**2)
    counted, found = round(tokens * (with_weights if special else flops.palm)), made[False] + made[True] * (not special)
    terms, experts = {}, max(layer.num_experts for layer in spec.layers)
    unused = 1 - max(layer.num_experts_per_tok for layer in spec.layers) / experts
    for path, axes in by_path(plan.axes).items():
        every = 6 * tokens * sizes[dotted(path)]
        terms |= {dotted(path): every}
        terms |= {f"the unused experts of {dotted(path)}": round(every * unused)} if "expert" in axes else {}
    name = f"FLOPs of {'matmuls with weights' if special else 'all matmuls'}"
    yield _compared(name, found, counted, terms)
    if special:
        why = f"{' and '.join(special)} counts operations token by token; the program computes them in chunks"
        yield not_applicable("FLOPs of other matmuls", why)


def visible(length: int, window: int, chunk: int) -> np.ndarray:
    """Returns the mask [T, S] of the keys that each token attends to, in one document of `length` tokens.

    A `window` or `chunk` of 0 does not limit them.
    """
    T = np.arange(length)
    ahead = T[:, None] - T
    return (ahead >= 0) & (ahead < (window or length)) & (T[:, None] // (chunk or length) == T // (chunk or length))


def traced_step(plan: StepPlan, state: TrainState, loss: LossFunction, length: int) -> jax.stages.Traced:
    """Traces a training step on abstract arrays: ROWS rows of `length` tokens per micro-batch."""
    train_step, _ = compile_steps(plan, state, loss=loss)
    batch = abstract_batch(plan, ROWS * plan.accumulation.micro_batches, length)
    return train_step.trace(state, batch, hparams_at(plan.step, 1, 0))


def _compared(name: str, found: int, counted: int, terms: Mapping[str, int]) -> Row:
    """Compares two counts; names the fewest of `terms`, at most MOST_TERMS, that add up to the difference."""
    difference = abs(found - counted)
    named = {label: size for label, size in terms.items() if size}
    sums = (chosen for number in range(1, MOST_TERMS + 1) for chosen in itertools.combinations(named, number))
    fewest = next((chosen for chosen in sums if sum(named[label] for label in chosen) == difference), ())
    note = f": the difference is that of {' and '.join(fewest)}" if fewest else ""
    return verdict(name, difference, 0, f"{counted:,} counted, {found:,} found{note}")


def _useless(spec: ModelSpec) -> int:
    """FLOPs per token that the MFU leaves out: logits of padded ids, and the one-hot matmuls of experts' biases."""
    flops = 6 * (1 + spec.mtp_num_layers) * spec.emb_dim * (spec.padded_vocab_size - spec.vocab_size)
    for layer, count in all_layers(spec).items():
        for each in block_weights(layer, spec):
            # `wo_bias` is scaled by the router's weight, which has a gradient: a third matmul.
            passes = {"wi_bias": 2, "wo_bias": 3}.get(each.path[-1], 0) * (each.used < each.size)
            flops += 2 * passes * count * layer.num_experts_per_tok * each.size
    return flops


def matmuls(jaxpr: Any) -> Iterator[tuple[Any, bool, int]]:
    """Yields each matmul's equation, whether it has a batch dim (scores and recurrences have one), and its FLOPs.

    The FLOPs are multiplied by the lengths of the scans around the matmul.
    """
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            (summed, _), (batch, _) = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[dim] for dim in summed)
            yield eqn, bool(batch), 2 * times * math.prod(eqn.outvars[0].aval.shape) * terms
        elif eqn.primitive.name == "ragged_dot_general":  # each row of the left is multiplied by one group's matrix
            left, right = (each.aval.shape for each in eqn.invars[:2])
            dims = eqn.params["ragged_dot_dimension_numbers"]
            (_, summed), (_, batch) = dims.dot_dimension_numbers
            free = {*range(len(right))}.difference(summed, batch, dims.rhs_group_dimensions)
            yield eqn, False, 2 * times * math.prod(left) * math.prod(right[dim] for dim in free)


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields all equations of a jaxpr and the jaxprs in it, each with how often it runs.

    That is `times`, multiplied by the lengths of the scans around the equation. The body of a while loop counts once,
    and so does each branch of a conditional.
    """
    for eqn in jaxpr.eqns:
        yield eqn, times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations(inner, times * eqn.params.get("length", 1))
