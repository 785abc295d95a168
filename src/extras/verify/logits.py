"""Computes logits of whole batches, and makes variants of a subject, for checks that compare logits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from src.config.schema import keys_of
from src.extras.verify.rows import Row, largest, not_applicable, verdict
from src.extras.verify.subject import Subject, flat, in_every_layer
from src.model.params import STACKED, by_path, dotted
from src.model.spec import layer_models
from src.parallel.sequence import to_zigzag, zigzag_order
from src.step.loss import hidden_states, in_zigzag
from src.step.plan import Batch, StepPlan

# Resets keys whose patterns may match no weight of a model with other layers.
NO_PATTERNS: dict[str, Any] = {"lora_rank": 0, "trainable_parameters": (), "optimizer_rules": ()}

ONE_LAYER = {**NO_PATTERNS, "decoder_segments": (), "base_num_decoder_layers": 1, "mtp_num_layers": 0}

Arrays = dict[str, Any]  # a batch of NumPy arrays


def evaluated(subject: Subject, plan: StepPlan, batches: Sequence[Arrays]) -> tuple[np.ndarray, np.ndarray]:
    """Computes logits [n, 1 + P, B, T, V] of the model and its P multi-token prediction layers, and sums over tokens.

    The sums [n, ...] are of the loss, the z-loss, the MTP losses, and the reports of routers. V is without padding. One
    program computes all n batches, so that equal inputs give equal bits. Raises NotApplicable like `check_fields`.
    """
    subject.check_fields(plan)
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def evaluate(decoder: Any) -> Any:
        def one(batch: Batch) -> tuple[jax.Array, jax.Array]:
            hidden_BTD, context, _ = hidden_states(decoder, in_zigzag(batch, plan.layout), plan)
            later = [jnp.roll(batch["tokens"], -ahead, axis=1) for ahead in range(1, plan.spec.mtp_num_layers + 1)]
            later = [to_zigzag(tokens_BT, plan.layout) for tokens_BT in later]
            predicted, _ = decoder.mtp_hidden_states(hidden_BTD, later, context, plan.execution)
            logits = jnp.stack([decoder.logits(each_BTD, context) for each_BTD in (hidden_BTD, *predicted)])
            sums = subject.loss(decoder, batch, plan)
            of_routers = jax.tree.map(lambda x: jnp.sum(x, axis=-2).ravel(), sums.router.get("segments", {}))
            losses = jnp.stack([sums.loss, sums.z, *sums.mtp])
            return logits, jnp.concatenate([losses, *jax.tree.leaves(of_routers)])

        return jax.lax.map(one, stacked)

    logits, sums = subject.forward(plan, evaluate)
    in_order = np.argsort(zigzag_order(logits.shape[3], plan.layout))
    return logits[..., in_order, : plan.spec.vocab_size], sums


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of the whole vocabulary [..., V], in float64."""
    above = logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True)
    return above - np.log(np.sum(np.exp(above), axis=-1, keepdims=True))


def of_ids(log_probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Picks the log-probability of each id [...] from `log_probs` [..., V]."""
    return np.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]


def unlimited(subject: Subject) -> tuple[Subject, list[Row]]:
    """Returns a subject whose experts have capacity for all tokens, and a row that says so if it was limited before."""
    spec, name = subject.reference_plan.spec, "capacity_factor"
    if not spec.has_capacity:
        return subject, []
    factor = float(max(layer.num_experts for layer in spec.layers))
    note = f"what {name} drops depends on the whole sequence: the other rows have capacity for every token"
    config = in_every_layer(subject.config, name, lambda _: factor)
    return Subject(config, subject.seed), [not_applicable("experts of limited capacity", note)]


def single_layers(subject: Subject) -> Iterator[tuple[int, Subject]]:
    """Yields, for each kind of layer, the index of its first layer in the model, and a subject with only that layer."""
    seen = set()
    for number, (model, _) in enumerate(layer_models(subject.config.model)):
        keys = {key: getattr(model, key) for key in keys_of("model")} | ONE_LAYER
        alone = Subject(subject.config.replace(**keys), subject.seed)
        if (layer := alone.reference_plan.spec.layers[0]) not in seen:
            seen.add(layer)
            yield number, alone


def adapters_merged(subject: Subject, bound: float) -> Row:
    """Compares logits with adapters and with weights into which `merge` added them, relative to the largest logit."""
    name, step = "adapters merged into their weights", subject.config.step
    if not step.lora_rank:
        return not_applicable(name, "lora_rank is 0")
    from src.model.lora import merge

    base = {key: jax.tree.map(jnp.asarray, tree) for key, tree in subject.weights.items() if key != "lora"}
    merged = merge(base, subject.weights["lora"], step.lora_alpha)
    plain = Subject(subject.config.replace(**NO_PATTERNS), subject.seed).with_weights(merged)
    (expected, _), (found, _) = (evaluated(each, each.reference_plan, [subject.batch]) for each in (subject, plain))
    sizes = np.abs(found - expected) / np.max(np.abs(expected))
    *_, row, token, _ = np.unravel_index(np.argmax(sizes), sizes.shape)
    note = f"the logits differ most at token {token} of row {row}"
    if not np.max(sizes) <= bound:
        note += f", and {_furthest(subject, flat(plain.weights))} from the product of its adapters"
    return verdict(name, np.max(sizes), bound, note)


def _furthest(subject: Subject, merged: Mapping[str, Any]) -> str:
    """Names the weight with the largest error of its merge, relative to what its adapters should add."""
    wrong, weights = {}, flat(subject.weights)
    for path, added in of_adapters(subject, weights).items():
        wrong[path] = np.max(np.abs(merged[path] - weights[path] - added)) / np.max(np.abs(added))
    return largest(wrong)


def of_adapters(subject: Subject, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes what the adapters in `weights` add to each adapted weight (Hu et al. 2021, section 4.1)."""
    step, added = subject.config.step, {}
    for path, axes in by_path(subject.reference_plan.axes).items():
        if (name := f"lora.{dotted(path)}.down") in weights:
            down, up = (np.asarray(weights[each]) for each in (name, f"lora.{dotted(path)}.up"))
            stacked = down.shape[: sum(axis in STACKED for axis in axes)]
            product = down.reshape(*stacked, -1, step.lora_rank) @ up.reshape(*stacked, step.lora_rank, -1)
            added[dotted(path)] = step.lora_alpha / step.lora_rank * product.reshape(weights[dotted(path)].shape)
    return added
