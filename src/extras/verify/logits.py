"""The logits of whole batches, for checks that change tokens and compare."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from src.config.schema import keys_of
from src.extras.verify.subject import NOT_APPLICABLE, Row, Subject
from src.model.spec import layer_models
from src.parallel.sequence import to_zigzag, zigzag_order
from src.step.loss import hidden_states, in_zigzag
from src.step.plan import Batch, StepPlan

# For a model with other layers, which patterns of these keys may not name.
NO_PATTERNS: dict[str, Any] = {"lora_rank": 0, "trainable_parameters": (), "optimizer_rules": ()}

ONE_LAYER = {**NO_PATTERNS, "decoder_segments": (), "base_num_decoder_layers": 1, "mtp_num_layers": 0}

Arrays = dict[str, Any]  # a batch, of NumPy's arrays


def evaluated(subject: Subject, plan: StepPlan, batches: Sequence[Arrays]) -> tuple[np.ndarray, np.ndarray]:
    """Computes logits [n, 1 + P, B, T, V] of the model and its P multi-token prediction layers, and the losses' sums.

    One program computes all n batches, so that equal inputs give equal bits. Raises NotApplicable if batches have
    further fields.
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
            return logits, jnp.stack([sums.loss, sums.z, *sums.mtp])

        return jax.lax.map(one, stacked)

    logits, sums = subject.forward(plan, evaluate)
    in_order = np.argsort(zigzag_order(logits.shape[3], plan.layout))
    return logits[..., in_order, : plan.spec.vocab_size], sums


def unlimited(check: str, subject: Subject) -> tuple[Subject, list[Row]]:
    """Gives experts capacity for all tokens, and a row that says so if they have not."""
    spec, name = subject.reference_plan.spec, "capacity_factor"
    if not spec.has_capacity:
        return subject, []
    factor = float(max(layer.num_experts for layer in spec.layers))
    segments = [
        {**entry, "pattern": [{key: factor if key == name else keys[key] for key in keys} for keys in entry["pattern"]]}
        for entry in subject.config.model.decoder_segments
    ]
    note = f"what {name} drops depends on the whole sequence: the other rows have capacity for every token"
    config = subject.config.replace(**{name: factor, "decoder_segments": segments})
    return Subject(config, subject.seed), [Row(check, "experts of limited capacity", NOT_APPLICABLE, note=note)]


def single_layers(subject: Subject) -> Iterator[tuple[int, Subject]]:
    """Yields each kind of layer as a model of its own, with its number in the whole one."""
    seen = set()
    for number, (model, _) in enumerate(layer_models(subject.config.model)):
        keys = {key: getattr(model, key) for key in keys_of("model")} | ONE_LAYER
        alone = Subject(subject.config.replace(**keys), subject.seed)
        if (layer := alone.reference_plan.spec.layers[0]) not in seen:
            seen.add(layer)
            yield number, alone
