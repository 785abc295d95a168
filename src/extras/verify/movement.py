"""Check e: a step with the config's optimizer moves every trained weight downhill, and no frozen weight."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from src.config.optimizer_keys import OPTIMIZERS
from src.extras.verify.comparison import NONE, clipped, differences, largest_entry, norm, strong
from src.extras.verify.derivatives import LEFT_OUT, Loss
from src.extras.verify.kinds import decays, rule_of
from src.extras.verify.rows import PASS, Row, largest, none_of, not_applicable, worst
from src.extras.verify.subject import PLAIN_DESCENT, Context, Subject, flat
from src.model.moe.router import totals
from src.model.params import STACKED, by_path, dotted, nested
from src.model.selection import Path
from src.step.plan import StepPlan
from src.step.state import TrainState
from src.system.errors import first_few

# For slopes along entries without a gradient, relative to the largest gradient's norm: rounding gave at most 5e-5, a
# missing gradient 0.3 to 1.4.
BOUND = 3e-3
# With an EMA decay near 1, rounding would hide which weights were averaged. The bound is relative to the update:
# rounding gives 1e-5, stale weights 0.25.
EMA_DECAY, EMA_BOUND = 0.75, 0.05
# The bound is relative to what the config's highest decay rate takes from a weight: rounding gives 3e-6 if that rate is
# 0.1 and 3e-3 if it is LEAST_DECAY; a weight that should not decay, but does, gives 1. The learning rate is chosen so
# that the highest decay rate takes DECAYED, an eighth, of a weight.
DECAY_BOUND, DECAYED, LEAST_DECAY = 0.03, 0.125, 1e-4
# Relative to a weight's largest gradient: rounding gives 8e-7, gradients that are clipped one by one 3.
CLIP_BOUND = 5e-3
# Larger than any score of a router, but a float32 bias of this size can still change by 0.001. If a weight that is used
# changes by it, at least the rounding of the loss changes.
FAR = 64.0
# Makes all scores of experts negative, and rounds them by 2e-7. The bound is relative to all choices: rounding gives 0
# in DeepSeek V3, and experts outside the chosen groups whose score is 0 instead of the least give 1.7.
SHIFT, SHIFT_BOUND = 4.0, 0.01

Arrays = dict[str, np.ndarray]  # by the weights' dotted paths


def rows(context: Context) -> Iterator[Row]:
    """Checks initial weights and zero gradients, then what a step at the peak learning rate changes: weights and EMA.

    Weight decay, gradient clipping and routers' biases have rows of their own, from other steps. The last row, with a
    `weight_dtype` other than float32, only reports how many updates that dtype would round away.
    """
    subject = context.subject
    yield initial(subject)
    yield from without_gradient(Loss(subject))
    plan = subject.plan(ema_decay=EMA_DECAY if subject.config.step.ema_decay else 0.0)
    before, after = step(subject, plan)
    descent, gradients = subject.plan(**PLAIN_DESCENT), subject.reference.gradients
    stay = _stay(gradients, plan, before, after)
    if waiting := [path for path, rule in flat(plan.rules).items() if OPTIMIZERS[rule.opt_type].waits]:
        before, after = step(subject, plan, waits=True)
        gradients = subject.result(descent, subject.batch, subject.batch).gradients
        second = _stay(gradients, plan, before, after)
        stay |= {path: second[path] for path in waiting}
    note = f"{first_few(waiting)} in the second step, because the first one only prepares" if waiting else ""
    yield worst("trained weights move downhill", stay, 0.0, note)
    old, new = flat(before.weights.trainable), flat(after.weights.trainable)
    updates = {path: new[path].astype(np.float64) - old[path] for path in old}
    frozen, left = flat(before.weights.frozen), flat(after.weights.frozen)
    changes = {path: float(np.sum(frozen[path] != left[path])) for path in frozen}
    yield worst("frozen weights keep their bits", changes, 0.0, otherwise="every weight is trained")
    mean, wanted = flat(after.ema), flat(before.ema)
    sizes = {}
    for path in (path for path in mean if np.any(updates[path])):
        error = mean[path] - EMA_DECAY * np.float64(wanted[path]) - (1 - EMA_DECAY) * np.float64(new[path])
        sizes[path] = float(np.max(np.abs(error)) / np.max(np.abs(updates[path])))
    yield worst("average of the new weights", sizes, EMA_BOUND, otherwise="ema_decay is 0")
    yield decay(subject)
    yield clipping(subject)
    yield router_biases(subject)
    yield router_choices(subject)
    yield stuck(old, updates, context.whole.step.weight_dtype)


def initial(subject: Subject) -> Row:
    """Checks that no two initial matrices are equal, across weights, layers and experts, except constant ones."""
    plan, of_seeds = subject.reference_plan, []
    for seed in (0, 1):
        seeded = dataclasses.replace(plan, step=dataclasses.replace(plan.step, init_weights_seed=seed))
        of_seeds.append(by_path(jax.device_get(jax.jit(lambda seeded=seeded: seeded.init_weights().merged())())))
    seen, wrong = set[bytes](), []
    for path, axes in by_path(plan.axes).items():
        one, other = (of_seed[path] for of_seed in of_seeds)
        if np.array_equal(one, other):
            continue
        stacks = one.shape[: sum(axis in STACKED for axis in axes)]
        for number, matrix in enumerate(one.reshape(-1, *one.shape[len(stacks) :])):
            wrong += [f"{dotted(path)}, matrix {number}"] * (matrix.tobytes() in seen)
            seen.add(matrix.tobytes())
    return none_of("initial weights differ from each other", wrong, f"{len(seen)} arrays")


def without_gradient(loss: Loss) -> Iterator[Row]:
    """Finds entries whose gradient is zero although the loss depends on them, and weights that nothing uses.

    Experts that no token chose, ids that are not in the batch and a bias of all keys rightly have no gradient: changing
    all such entries of a weight at once changes the loss only by rounding. If nothing uses a weight, even a large
    change leaves all bits of the loss as they were.
    """
    largest_norm = max(float(np.linalg.norm(gradient)) for gradient in loss.gradients.values())
    least = NONE * largest_entry(loss.gradients)
    unused, sizes, unknown, whole = dict.fromkeys(loss.gradients, 0.0), {}, [], []
    for path, gradient in loss.gradients.items():
        if not np.any(none := np.abs(gradient) <= least):
            continue
        tried = itertools.islice(loss.slopes(path, largest_norm * BOUND / 4, none), 4)
        if slopes := [abs(slope) for slope, _ in tried if slope is not None]:
            sizes[path] = max(slopes) / largest_norm
            if np.all(none) and not any(slopes):
                changes = (FAR * loss.rng.choice([-1.0, 1.0], gradient.shape), np.zeros(gradient.shape))
                unused[path] = float(len({loss.after(path, change) for change in changes}) == 1)
            whole += [path] * bool(np.all(none))
        else:
            unknown.append(path)
    yield worst("every trained weight is used", unused, 0.0)
    name, note = "entries without a gradient move no loss", f"none of {', '.join(whole)} does" if whole else ""
    if sizes or not unknown:
        yield worst(name, sizes, BOUND, note, otherwise="every entry has a gradient")
    if unknown:
        yield not_applicable(name, f"{LEFT_OUT}: all of {', '.join(unknown)}")


def _stay(gradients: Arrays, plan: StepPlan, before: TrainState, after: TrainState) -> dict[str, float]:
    """Counts, by weight, the entries with a `strong` gradient that do not move; all of them if the weight moves uphill.

    The count is 0 for a weight whose learning_rate_scale is 0.
    """
    old, new, rules = flat(before.weights.trainable), flat(after.weights.trainable), flat(plan.rules)
    stay = {}
    of_all = largest_entry(gradients)
    for path, gradient in gradients.items():
        update = new[path].astype(np.float64) - old[path]
        still = float(np.sum(strong(gradient, of_all) & ((update == 0) | (np.sum(update * gradient) >= 0))))
        stay[path] = still if rules[path].learning_rate_scale else 0.0
    return stay


def step(subject: Subject, plan: StepPlan, waits: bool = False) -> tuple[TrainState, TrainState]:
    """Returns the states before and after a step at the peak learning rate; with `waits`, it follows one at rate 0.

    The EMA begins as the weights reversed along their first dims, so that it differs from them.
    """
    state = subject.first_state(plan)
    before = jax.device_get(dataclasses.replace(state, ema=jax.tree.map(lambda x: x[::-1], state.ema)))
    if waits:
        before, _ = subject.last(plan, before, [0.0])
    return before, subject.last(plan, before, [plan.step.learning_rate])[0]


def decay(subject: Subject) -> Row:
    """Compares a step without weight decay with one that has it.

    They should differ by each weight times its learning rate and its decay rate: its rule's rate, if it has one, or
    else adam_weight_decay if the weight `decays`. Each step follows one at the rate 0, for optimizers whose first step
    only prepares.
    """
    name, keys, plan = "weight decay takes its rate of each weight", subject.config.step, subject.reference_plan
    declared, scales, rates = by_path(plan.decays), dict[str, float](), dict[str, float]()
    for path, axes in by_path(plan.split(plan.axes).trainable).items():
        rule, default = rule_of(keys, path), keys.adam_weight_decay * decays(path, axes, declared[path])
        scales[dotted(path)] = rule.get("learning_rate_scale", 1.0)
        rates[dotted(path)] = rule.get("weight_decay", default)
    if (highest := max(rates.values())) < LEAST_DECAY:
        return not_applicable(name, f"the highest rate is {highest:g}")
    rate = DECAYED / highest
    without = tuple({**rule, "weight_decay": 0.0} for rule in keys.optimizer_rules)
    new, plain = (
        flat(subject.last(each, subject.first_state(each), [0.0, rate])[0].weights.trainable)
        for each in (plan, subject.plan(adam_weight_decay=0.0, optimizer_rules=without))
    )
    taken = {}
    for path, old in flat(plan.split(subject.weights).trainable).items():
        error = np.float64(plain[path]) - new[path] - rate * scales[path] * rates[path] * np.float64(old)
        taken[path] = float(np.max(np.abs(error)) / np.max(np.abs(old))) / (DECAYED * (scales[path] or 1.0))
    still = [path for path in rates if not rates[path]]
    return worst(name, taken, DECAY_BOUND, f"without decay: {first_few(still)}" if still else "")


def clipping(subject: Subject) -> Row:
    """Sets the clipping threshold to a quarter of the global norm: each gradient must become a quarter of itself."""
    name, gradients = "clipping scales all gradients alike", subject.reference.gradients
    if not subject.config.step.gradient_clipping_threshold:
        return not_applicable(name, "gradient_clipping_threshold is 0")
    threshold = norm(gradients) / 4
    found = subject.result(subject.plan(**PLAIN_DESCENT | {"gradient_clipping_threshold": threshold}))
    return worst(name, dict(differences(found.gradients, clipped(gradients, threshold))), CLIP_BOUND)


def router_biases(subject: Subject) -> Row:
    """Checks that each router's bias moves by the update rate, towards an even load, by its own layer's loads.

    In a second step, the biases are set so that in each layer all tokens choose a certain expert, and none in one half
    of the experts: the first half in one layer, the second in the next. The bias of the chosen expert must fall, and
    the bias of the expert that is chosen in the next layer, which no token chooses in this one, must rise.
    """
    name, weights, popular = "routers' biases move by their loads", by_path(subject.weights), {}
    stats = [path for path in weights if dotted(path) in subject.reference.stats]
    most = max(layer.num_experts_per_tok for layer in subject.reference_plan.spec.layers)
    if not stats or not subject.config.step.routed_bias_update_rate:
        return not_applicable(name, "no router has a bias that the loads move")
    if any(2 * most > weights[path].shape[-1] for path in stats):
        return not_applicable(name, "a token chooses more than half of the experts")
    wrong = dict.fromkeys(map(dotted, stats), 0.0)
    if not subject.config.model.dropout_rate:
        wrong = _moves_wrongly(subject, stats)
    for path in stats:
        weights[path] = np.zeros_like(weights[path])
        for bias in weights[path].reshape(-1, weights[path].shape[-1]):
            layer, half = sum(map(len, popular.values())), len(bias) // 2
            each, after = (half * (number % 2) + number // 2 % half for number in (layer, layer + 1))
            bias[half * (1 - layer % 2) :][:half], bias[each] = -FAR, FAR
            popular.setdefault(dotted(path), []).append((each, after))
    other = subject.with_weights(nested(weights))
    for path, experts in popular.items():
        old, new = (x.reshape(len(experts), -1) for x in (flat(other.weights)[path], other.reference.stats[path]))
        rises = np.take_along_axis(new - old, np.array(experts), axis=1)
        wrong[path] += float(np.sum((rises[:, 0] >= 0) | (rises[:, 1] <= 0)))
    return worst(name, wrong, 0.0)


def _moves_wrongly(subject: Subject, stats: Sequence[Path]) -> dict[str, float]:
    """Counts, by bias, the experts whose bias the reference step did not move as DeepSeek-V3, section 2.1.2, says.

    It rises by the rate if the expert's load, without padding, is below the mean of all experts, and falls by the rate
    if it is above.
    """
    rate, biases, wrong = subject.config.step.routed_bias_update_rate, by_path(subject.weights), {}
    (loads,) = _loads(subject)
    for path in stats:
        old, load = biases[path], loads[(*path[:-1], "expert_load")]
        load = np.mean(load, axis=tuple(range(load.ndim - old.ndim)))  # layers may share the bias
        even = np.sum(subject.batch["segment_ids"] > 0) / old.shape[-1]
        move = subject.reference.stats[dotted(path)] - old
        wrong[dotted(path)] = float(np.sum(np.abs(move - rate * np.sign(even - load)) > rate / 2))
    return wrong


def _loads(*subjects: Subject) -> list[dict[Path, np.ndarray]]:
    """Sums routers' reports over the batch's tokens, by their paths, for subjects that differ only in their weights."""
    subject, plan = subjects[0], subjects[0].reference_plan
    reports = jax.jit(lambda weights: totals(subject.loss(plan.decoder(weights), subject.batch, plan).router))
    return [by_path(jax.device_get(reports(each.placed(plan)))) for each in subjects]


def router_choices(subject: Subject) -> Row:
    """Subtracts SHIFT from all biases of routers, which must not change the experts' loads: only differences count."""
    name, weights = "a constant in routers' biases changes no choice", by_path(subject.weights)
    stats = [path for path in weights if dotted(path) in subject.reference.stats]
    if not stats:
        return not_applicable(name, "no router has a bias that the loads move")
    shifted = subject.with_weights(nested(weights | {path: weights[path] - np.float32(SHIFT) for path in stats}))
    (expected, found), moved = _loads(subject, shifted), {}
    for path in stats:
        old, new = (loads[(*path[:-1], "expert_load")] for loads in (expected, found))
        moved[dotted(path)] = float(np.sum(np.abs(new - old)) / np.sum(old))
    return worst(name, moved, SHIFT_BOUND)


def stuck(old: Arrays, updates: Arrays, dtype: str) -> Row:
    """Reports the fraction of updates that are too small to change a weight stored in `dtype`; always passes."""
    name = f"updates that {dtype} rounds away"
    if dtype == "float32":
        return not_applicable(name, "weight_dtype is float32")
    stay, size = {}, {}
    for path, update in updates.items():
        kept, asked = old[path].astype(dtype), update != 0
        stay[path], size[path] = int(np.sum(asked & ((np.float32(kept) + update).astype(dtype) == kept))), np.sum(asked)
    share = sum(stay.values()) / sum(size.values())
    most = largest({path: stay[path] / max(size[path], 1) for path in stay})
    note = f"{share:.0%} of the entries stay at this learning rate if their deviation is 0.2, most of {most}"
    return Row(name, PASS, share, note=note)
