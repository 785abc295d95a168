"""Check e: a step with the config's own optimizer moves every trained weight downhill, and nothing else."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from src.config.optimizer_keys import OPTIMIZERS
from src.extras.verify.comparison import NONE, differences, largest_entry, strong
from src.extras.verify.derivatives import LEFT_OUT, Loss
from src.extras.verify.rows import PASS, Row, largest, not_applicable, worst
from src.extras.verify.subject import PLAIN_DESCENT, Context, Subject, flat
from src.extras.verify.updates import adamw
from src.model.params import by_path, dotted, matches, nested
from src.model.selection import Path
from src.step.optimizer_rules import Rule
from src.step.plan import StepPlan
from src.step.state import TrainState
from src.system.errors import first_few

# Relative to the largest gradient's norm: rounding alone gave at most 5e-5, a gradient that is missing 0.3 to 1.4.
BOUND = 3e-3
# A decay near 1 would hide in rounding which weights were averaged. Relative to the update: rounding gives 1e-5, stale
# weights 0.25.
EMA_DECAY, EMA_BOUND = 0.75, 0.05
# What decay takes from a weight, relative to what the highest rate of the config takes: rounding gives 3e-6 if that is
# 0.1, and 3e-3 if it is the least; a weight that decays and should not 1. The learning rate is so high that the highest
# rate takes an eighth of a weight.
DECAY_BOUND, DECAYED, LEAST_DECAY = 0.03, 0.125, 1e-4
# Relative to what an entry should move: rounding gives 8e-7, exchanged betas 0.03 to 0.05, a step too many in the count
# 0.3, and gradients that are clipped one by one 3.
RATE_BOUND = 5e-3
# More than any score of a router, and little enough for its bias to show a step of 0.001. Changed by it, a weight that
# is used at least makes the loss round otherwise.
FAR = 64.0
UNDECAYED = {"scale", "bias", "norm", "rate"}  # in the names of weights that are not vectors and do not decay either

Arrays = dict[str, np.ndarray]  # by the weights' dotted paths


def rows(context: Context) -> Iterator[Row]:
    """Checks gradients that are zero, and what a step changes at the largest learning rate of the schedule."""
    subject = context.subject
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
    yield worst("entries of trained weights that do not move downhill", stay, 0.0, note)
    old, new = flat(before.weights.trainable), flat(after.weights.trainable)
    updates = {path: new[path].astype(np.float64) - old[path] for path in old}
    frozen, left = flat(before.weights.frozen), flat(after.weights.frozen)
    changes = {path: float(np.sum(frozen[path] != left[path])) for path in frozen}
    yield worst("entries of frozen weights that change", changes, 0.0, otherwise="every weight is trained")
    mean, wanted = flat(after.ema), flat(before.ema)
    sizes = {}
    for path in (path for path in mean if np.any(updates[path])):
        error = mean[path] - EMA_DECAY * np.float64(wanted[path]) - (1 - EMA_DECAY) * np.float64(new[path])
        sizes[path] = float(np.max(np.abs(error)) / np.max(np.abs(updates[path])))
    yield worst("average of the new weights", sizes, EMA_BOUND, otherwise="ema_decay is 0")
    yield from optimizer(subject)
    yield clipping(subject)
    yield router_biases(subject)
    yield stuck(old, updates, context.whole.step.weight_dtype)


def without_gradient(loss: Loss) -> Iterator[Row]:
    """Finds entries whose gradient is zero although the loss depends on them, and weights that it does not depend on.

    Experts that no token chose, tokens that are not in the batch and a bias of all keys have no gradient: changing all
    such entries of a weight at once leaves the loss as it is, but for rounding. If nothing uses a weight, even the bits
    of the loss stay, however large the change is.
    """
    norm = max(float(np.linalg.norm(gradient)) for gradient in loss.gradients.values())
    least = NONE * largest_entry(loss.gradients)
    unused, sizes, unknown, whole = dict.fromkeys(loss.gradients, 0.0), {}, [], []
    for path, gradient in loss.gradients.items():
        if not np.any(none := np.abs(gradient) <= least):
            continue
        tried = itertools.islice(loss.slopes(path, norm * BOUND / 4, none), 4)
        if slopes := [abs(slope) for slope, _ in tried if slope is not None]:
            sizes[path] = max(slopes) / norm
            if np.all(none) and not any(slopes):
                changes = (FAR * loss.rng.choice([-1.0, 1.0], gradient.shape), np.zeros(gradient.shape))
                unused[path] = float(len({loss.after(path, change) for change in changes}) == 1)
            whole += [path] * bool(np.all(none))
        else:
            unknown.append(path)
    yield worst("trained weights that nothing uses", unused, 0.0)
    name, note = "entries without a gradient move no loss", f"none of {', '.join(whole)} does" if whole else ""
    if sizes or not unknown:
        yield worst(name, sizes, BOUND, note, otherwise="every entry has a gradient")
    if unknown:
        yield not_applicable(name, f"{LEFT_OUT}: all of {', '.join(unknown)}")


def _stay(gradients: Arrays, plan: StepPlan, before: TrainState, after: TrainState) -> dict[str, float]:
    """Counts each weight's entries that stay, or move uphill with all others, although their gradient is large."""
    old, new, rules = flat(before.weights.trainable), flat(after.weights.trainable), flat(plan.rules)
    stay = {}
    of_all = largest_entry(gradients)
    for path, gradient in gradients.items():
        update = new[path].astype(np.float64) - old[path]
        still = float(np.sum(strong(gradient, of_all) & ((update == 0) | (np.sum(update * gradient) >= 0))))
        stay[path] = still if rules[path].learning_rate_scale else 0.0
    return stay


def step(subject: Subject, plan: StepPlan, waits: bool = False) -> tuple[TrainState, TrainState]:
    """The states before and after a step at the peak of the learning rate; the average begins far from the weights.

    If it `waits`, it is the second, after one at the rate 0.
    """
    state = subject.first_state(plan)
    before = jax.device_get(dataclasses.replace(state, ema=jax.tree.map(lambda x: x[::-1], state.ema)))
    if waits:
        ((state, _),) = subject.steps(plan, before, [0.0])
        before = jax.device_get(state)
    ((after, _),) = subject.steps(plan, before, [plan.step.learning_rate])
    return before, jax.device_get(after)


def optimizer(subject: Subject) -> Iterator[Row]:
    """Compares a step of the config's own optimizer with what its keys say of each weight.

    A step without decay differs from it by the weight times its rule's rate, or adam_weight_decay if the weight decays
    by default. AdamW's second step moves each entry as `updates.adamw` says. The first step has the rate 0, so that
    weights stay; both gradients are read from such steps of plain gradient descent.
    """
    names = "weight decay takes its rate of each weight", "AdamW's second update follows from its keys"
    keys, plan = subject.config.step, subject.reference_plan
    rules = {dotted(path): _rule(plan, path) for path in by_path(plan.split(plan.shapes).trainable)}
    decays = {path: rule.weight_decay or 0.0 for path, rule in rules.items()}
    highest = max(decays.values())
    rate = DECAYED / max(highest, LEAST_DECAY)
    without = tuple({**rule, "weight_decay": 0.0} for rule in keys.optimizer_rules)
    of_one_row = subject.batch["loss_mask"] * (np.arange(subject.rows)[:, None] == 0)
    batches = [{**subject.batch, "loss_mask": of_one_row}, subject.batch]
    old = flat(plan.split(subject.weights).trainable)
    (_, new), (_, plain) = (
        [
            flat(jax.device_get(after.weights.trainable))
            for after, _ in subject.steps(each, jax.device_get(subject.first_state(each)), [0.0, rate], batches)
        ]
        for each in (plan, subject.plan(adam_weight_decay=0.0, optimizer_rules=without))
    )
    descent = subject.plan(**PLAIN_DESCENT)
    results = subject.result(descent, batches[0]), subject.result(descent, *batches)
    g, h = (clipped(result.gradients, keys.gradient_clipping_threshold) for result in results)
    taken, moved, of_all = {}, {}, largest_entry(h)
    for path, rule in rules.items():
        scale = rule.learning_rate_scale
        error = np.float64(plain[path]) - new[path] - rate * scale * decays[path] * np.float64(old[path])
        taken[path] = float(np.max(np.abs(error)) / np.max(np.abs(old[path]))) / (DECAYED * (scale or 1.0))
        compared = strong(h[path], of_all)
        if rule.opt_type == "adamw" and np.any(compared):
            update = adamw(keys, g[path], h[path])
            error = np.float64(plain[path]) - old[path] + rate * scale * update
            moved[path] = float(np.max(np.abs(error[compared]))) / (rate * (scale or 1.0))
    has_decay = highest >= LEAST_DECAY
    still = [path for path in decays if not decays[path]]
    note = f"none of {first_few(still)}" if still else ""
    otherwise = f"the highest rate is {highest:g}"
    yield worst(names[0], taken if has_decay else {}, DECAY_BOUND, note, otherwise)
    factors = keys.mup_base_emb_dim or keys.adam_clip_threshold
    why = "adam_clip_threshold or mup_base_emb_dim scales updates" if factors else "no weight has opt_type=adamw"
    yield worst(names[1], {} if factors else moved, RATE_BOUND, otherwise=why)


def _rule(plan: StepPlan, path: Path) -> Rule:
    """What the keys say of a weight's update, by its name and dims.

    Matrices and lookup tables decay by default. Vectors do not, nor do norms, scales, biases and rates. An array that
    is none of these, such as a convolution's kernel, decays as it is declared.
    """
    keys, dims = plan.step, by_path(plan.matrices)[path]
    is_vector = len(dims.dims) == 1 or UNDECAYED.intersection(path[-1].split("_"))
    decays = not is_vector and (dims.reduction or by_path(plan.decays)[path])
    default = Rule(keys.opt_type, weight_decay=keys.adam_weight_decay if decays else 0.0)
    chosen = next((rule for rule in keys.optimizer_rules if matches(path, [rule["match"]])), {})
    rule = dataclasses.replace(default, **chosen)
    is_hidden = not is_vector and dims.reduction and {"segments", "mtp"}.intersection(path)
    if OPTIMIZERS[rule.opt_type].hidden_only and not is_hidden:
        return dataclasses.replace(rule, opt_type="adamw")
    return rule


def clipped(gradients: Arrays, threshold: float) -> Arrays:
    """Scales all gradients to the norm `threshold` if their norm is larger, unless `threshold` is 0."""
    norm = float(np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values())))
    return {path: min(1.0, (threshold or np.inf) / norm) * gradient for path, gradient in gradients.items()}


def clipping(subject: Subject) -> Row:
    """Clips all gradients to a quarter of their norm, with plain gradient descent: each must be a quarter."""
    name, gradients = "clipping scales all gradients alike", subject.reference.gradients
    if not subject.config.step.gradient_clipping_threshold:
        return not_applicable(name, "gradient_clipping_threshold is 0")
    norm = float(np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values())))
    found = subject.result(subject.plan(**PLAIN_DESCENT | {"gradient_clipping_threshold": norm / 4}))
    return worst(name, dict(differences(found.gradients, clipped(gradients, norm / 4))), RATE_BOUND)


def router_biases(subject: Subject) -> Row:
    """Checks that each router's bias moves by its own layer's loads.

    In every layer all tokens choose one expert of one half of them, and in the next layer one of the other half: its
    bias must fall, and the bias of the next layer's expert, which no token chooses here, must rise.
    """
    name, weights, popular = "routers' biases that their loads do not move", by_path(subject.weights), {}
    stats = [path for path in weights if dotted(path) in subject.reference.stats]
    most = max(layer.num_experts_per_tok for layer in subject.reference_plan.spec.layers)
    if not stats or not subject.config.step.routed_bias_update_rate:
        return not_applicable(name, "no router has a bias that the loads move")
    if any(2 * most > weights[path].shape[-1] for path in stats):
        return not_applicable(name, "a token chooses more than half of the experts")
    for path in stats:
        weights[path] = np.zeros_like(weights[path])
        for bias in weights[path].reshape(-1, weights[path].shape[-1]):
            layer, half = sum(map(len, popular.values())), len(bias) // 2
            each, after = (half * (number % 2) + number // 2 % half for number in (layer, layer + 1))
            bias[half * (1 - layer % 2) :][:half], bias[each] = -FAR, FAR
            popular.setdefault(dotted(path), []).append((each, after))
    other = subject.with_weights(nested(weights))
    wrong = {}
    for path, experts in popular.items():
        old, new = (x.reshape(len(experts), -1) for x in (flat(other.weights)[path], other.reference.stats[path]))
        rises = np.take_along_axis(new - old, np.array(experts), axis=1)
        wrong[path] = float(np.sum((rises[:, 0] >= 0) | (rises[:, 1] <= 0)))
    return worst(name, wrong, 0.0)


def stuck(old: Arrays, updates: Arrays, dtype: str) -> Row:
    """Tells the share of entries that keep their value in a dtype of low precision: their update is too small."""
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
