"""Check l: an optimizer's update in the second of two steps, against its paper's algorithm in float64.

Letters of tensors are as in kinds.py.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from src.config.optimizer_keys import OPTIMIZERS
from src.config.schema import Step
from src.extras.verify.comparison import clipped, largest_entry, norm, strong
from src.extras.verify.kinds import LOOKED_UP, Kind, Matrices, kind_of, rule_of
from src.extras.verify.rows import Row, mesh_name, not_applicable, unless_refused, worst
from src.extras.verify.subject import PLAIN_DESCENT, SGD_RATE, Context, flat, mesh_keys
from src.model.params import by_path, dotted
from src.step.plan import StepPlan
from src.system.errors import first_few

# Relative to the root mean square of a weight's expected update: three seeds of five kinds of models give at most 4e-5
# for Muon, whose iteration amplifies rounding, and 2e-6 for AdamW and Adafactor. A forgotten factor gives 0.7 to 16,
# Nesterov's momentum that is left out 1.7, another polynomial 0.2, an update that is not clipped 0.3 to 1.2.
BOUND = 1e-3
MESH = {"fsdp": 2, "tensor": 2}  # shards both sides of matrices

# Jordan et al. 2024, kellerjordan.github.io/posts/muon: the quintic that is iterated five times.
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
MUON_RMS = 0.2  # Liu et al. 2025 (arXiv 2502.16982), section 2.2, equation 4
# Shazeer and Stern 2018 (arXiv 1804.04235), section 9: epsilon_1, epsilon_2, d, and the exponent of the decay rates.
SMALLEST_SQUARE, SMALLEST_SCALE, LONGEST, EXPONENT = 1e-30, 1e-3, 1.0, 0.8


class Past(NamedTuple):
    """One weight's matrices, and their gradients in two steps."""

    first: Matrices  # gradients of the two steps
    second: Matrices
    weight: Matrices
    is_matrix: bool


class Expected(NamedTuple):
    """The update that one weight should get."""

    optimizer: str
    kind: Kind
    update: Matrices  # divided by the weight's learning rate
    rate_scale: float  # the weight's learning_rate_scale
    strong: np.ndarray  # mask [S, I, O] of the entries to compare
    is_clipped: bool  # by Adafactor


def rows(context: Context) -> Iterator[Row]:
    """Compares the update of each trained weight in the second step with the published one of its optimizer.

    The first step has the rate 0, and neither has decay, which check `e` tests. Muon and Adafactor compute with whole
    matrices, so they are also compared on a mesh that shards these. If the config clips gradients, the threshold is the
    geometric mean of the two steps' gradient norms, so that the longer gradient is clipped.
    """
    subject, plan = context.subject, context.subject.reference_plan
    keys, of_one_row = plan.step, subject.batch["loss_mask"] * (np.arange(subject.rows)[:, None] == 0)
    # The gradient of a row is longer than the mean of all rows, so that Adafactor clips its second update.
    batches = [subject.batch, {**subject.batch, "loss_mask": of_one_row}]
    gradients = subject.reference.gradients, subject.result(subject.plan(**PLAIN_DESCENT), *batches).gradients
    threshold = float(np.sqrt(norm(gradients[0]) * norm(gradients[1]))) if keys.gradient_clipping_threshold else 0.0
    without = tuple({**rule, "weight_decay": 0.0} for rule in keys.optimizer_rules)
    own: dict[str, Any] = {"adam_weight_decay": 0.0, "optimizer_rules": without, "ema_decay": 0.0}
    own |= {"skip_step_on_spikes": False, "gradient_clipping_threshold": threshold}
    old = flat(plan.split(subject.weights).trainable)
    expected, left_out, unknown = expected_updates(plan, old, *(clipped(each, threshold) for each in gradients))

    @functools.cache
    def stepped(*sizes: tuple[str, int]) -> dict[str, np.ndarray]:
        """Returns the trained weights after a step on each batch, on a mesh; only the last step changes them."""
        planned = subject.plan(*[4] * bool(sizes), **own, **mesh_keys(dict(sizes)))
        after, _ = subject.last(planned, subject.first_state(planned), [0.0, SGD_RATE], batches)
        return flat(after.weights.trainable)

    def compared(name: str, optimizer: str, sizes: Mapping[str, int] = {}) -> Row:
        own = {path: each for path, each in expected.items() if each.optimizer == optimizer}
        without = [f"{path} ({why})" for path, (of, why) in left_out.items() if of == optimizer]
        notes, masks = [], [each.strong for each in own.values()]
        if optimizer == "adafactor":
            notes.append(f"{sum(each.is_clipped for each in own.values())} of {len(own)} are clipped")
        if weak := sum(int(np.sum(~mask)) for mask in masks):
            notes.append(f"left out {weak:,} of {sum(mask.size for mask in masks):,} entries (weak gradients)")
        if without:
            notes.append(f"left out {len(without)} of {len(own) + len(without)} weights: {first_few(without)}")
        new = stepped(*sizes.items()) if own else {}
        figures = {path: _error(old[path].astype(np.float64) - new[path], each) for path, each in own.items()}
        return worst(name, figures, BOUND, "; ".join(notes), "; ".join(notes))

    optimizers = dict.fromkeys([*(each.optimizer for each in expected.values()), *(of for of, _ in left_out.values())])
    names = {optimizer: f"{optimizer}'s second update" for optimizer in optimizers}
    for optimizer, name in names.items():
        yield compared(name, optimizer)
    for optimizer in sorted(unknown):
        note = f"opt_type={optimizer} is not one of {', '.join(UPDATES)}"
        note = "its update is the gradient, which check b compares" if optimizer == "sgd" else note
        yield not_applicable(f"{optimizer}'s second update", note)
    for optimizer in [*dict.fromkeys(each.optimizer for each in expected.values() if each.optimizer != "adamw")]:
        name = f"{names[optimizer]}, {mesh_name(MESH)}"
        yield unless_refused(name, functools.partial(compared, name, optimizer, MESH))


def expected_updates(
    plan: StepPlan, old: Mapping[str, np.ndarray], g: Mapping[str, np.ndarray], h: Mapping[str, np.ndarray]
) -> tuple[dict[str, Expected], dict[str, tuple[str, str]], set[str]]:
    """Computes the updates of the trained weights in a step with gradients h, after one with gradients g.

    Also lists weights that are left out, each with its optimizer and why, and optimizers that `UPDATES` lacks.
    """
    keys, expected, left_out, unknown = plan.step, {}, {}, set()
    of_all = largest_entry(h)
    for path, axes in by_path(plan.split(plan.axes).trainable).items():
        name, rule, kind = dotted(path), rule_of(keys, path), kind_of(path, axes, plan.spec.vocab_size)
        chosen, scale = rule.get("opt_type", keys.opt_type), rule.get("learning_rate_scale", 1.0)
        if kind is None:
            left_out[name] = chosen, "its matrices are not known"
            continue
        is_hidden = bool(kind.inputs) and not LOOKED_UP & {*axes}
        optimizer = "adamw" if OPTIMIZERS[chosen].hidden_only and not is_hidden else chosen
        first, second, weight = (kind.matrices(each[name]) for each in (g, h, old))
        compared = strong(second, of_all)
        if optimizer not in UPDATES:
            unknown.add(optimizer)
            continue
        if not scale or not np.any(compared):  # check `e` tests that a weight stays if its rate is 0
            left_out[name] = optimizer, "its gradient is rounding" if scale else "its rate is 0"
            continue
        past = Past(first, second, weight, is_matrix=bool(kind.inputs))
        update, is_clipped = UPDATES[optimizer](keys, past), False
        if optimizer == "adafactor":
            is_clipped = bool(np.any(root_mean_square(preconditioned(past)) > LONGEST))
        if chosen == "adamw" and keys.adam_clip_threshold:
            update = limited(update, keys.adam_clip_threshold)
        if keys.mup_base_emb_dim and kind.inputs and axes[0] not in LOOKED_UP:
            # Yang et al. 2022, table 3: the rate of a weight used in matmuls falls with the width.
            update = update * keys.mup_base_emb_dim / plan.spec.emb_dim
        expected[name] = Expected(optimizer, kind, update, scale, compared, is_clipped)
    return expected, left_out, unknown


def _error(moved: np.ndarray, expected: Expected) -> float:
    """The largest error of `moved` among the compared entries, relative to the expected update's root mean square."""
    update, size = expected.update[expected.strong], SGD_RATE * expected.rate_scale
    found = expected.kind.matrices(moved)[expected.strong] / size
    return float(np.max(np.abs(found - update)) / np.sqrt(np.mean(np.square(update))))


# ---- The published algorithms: from gradients to updates at a learning rate of 1


def adamw(keys: Step, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1, after gradients `first` and `second`, with both moments' biases corrected."""
    b1, b2 = keys.adam_b1, keys.adam_b2
    mean = (b1 * first + second) / (1 + b1)
    square = (b2 * first**2 + second**2) / (1 + b2)
    return mean / (np.sqrt(square) + keys.adam_eps)


def muon(keys: Step, past: Past) -> Matrices:
    """Jordan et al. 2024: Nesterov momentum, roughly orthogonalised, and scaled as by Liu et al. 2025.

    A factor on the momentum, which some implementations have, makes no difference, because `x` is normalised.
    """
    momentum = keys.muon_beta * past.first + past.second
    x = past.second + keys.muon_beta * momentum
    rows, columns = x.shape[1:]
    x = x / (np.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        square = np.swapaxes(x, 1, 2) @ x
        x = a * x + b * x @ square + c * x @ square @ square
    return MUON_RMS * np.sqrt(max(rows, columns)) * x


def adafactor(keys: Step, past: Past) -> Matrices:
    """Shazeer and Stern 2018, algorithms 4 and 5, without a first moment."""
    scale = np.maximum(SMALLEST_SCALE, root_mean_square(past.weight))
    return scale * limited(preconditioned(past), LONGEST)


def preconditioned(past: Past) -> Matrices:
    """Divides the second gradient by the root of Adafactor's second moment, factored into row and column means.

    Vectors have the whole second moment. In step t the moments decay by 1 - t^-0.8 (section 7.2).
    """
    squares, decay = [np.square(each) + SMALLEST_SQUARE for each in (past.first, past.second)], 1 - 2**-EXPONENT
    square = decay * squares[0] + (1 - decay) * squares[1]
    if past.is_matrix:
        by_row, by_column = (np.mean(square, axis=axis, keepdims=True) for axis in (2, 1))
        square = by_row * by_column / np.mean(square, axis=(1, 2), keepdims=True)
    return past.second / np.sqrt(square)


def limited(update: Matrices, most: float) -> Matrices:
    """Scales each matrix down to a root mean square of at most `most` (Shazeer and Stern 2018, section 6)."""
    return update / np.maximum(1.0, root_mean_square(update) / most)


def root_mean_square(matrices: Matrices) -> np.ndarray:
    """The root mean square of each matrix, [S, 1, 1]."""
    return np.sqrt(np.mean(np.square(matrices), axis=(1, 2), keepdims=True))


UPDATES: Mapping[str, Callable[[Step, Past], Matrices]] = {
    "adamw": lambda keys, past: adamw(keys, past.first, past.second),
    "adafactor": adafactor,
    "muon": muon,
}
