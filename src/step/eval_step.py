"""Compiles what an evaluation computes of a batch: sums of losses, and of the bytes of their text."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from src.data.types import NOT_TEXT
from src.model.params import Weights
from src.parallel.sequence import from_zigzag
from src.step.compiler_flags import ALWAYS
from src.step.loss import LogitsOf, batch_cross_entropy, hidden_states, in_zigzag
from src.step.plan import Batch, StepPlan
from src.step.state import batch_sharding
from src.user_code import check_metrics


def compile_eval_step(plan: StepPlan, function: Callable[..., dict[str, Any]] | None = None) -> jax.stages.Wrapped:
    """Returns the jitted `eval_step(weights, batch)`, or that of another function of these and the plan."""
    return jax.jit(
        functools.partial(function or eval_step, plan=plan),
        in_shardings=(plan.split(plan.shardings), batch_sharding(plan.layout, plan.fields)),
        out_shardings=plan.layout.sharding(()),
        compiler_options=ALWAYS.get(plan.layout.platform),
    )


def eval_step(weights: Weights, batch: Batch, plan: StepPlan) -> dict[str, Any]:
    """Returns sums over a batch: `loss_sum` in nats, `tokens`, and of `user_metrics` each a sum and its divisor.

    Of a batch with the field `text_bytes` also those of `text_sums`.
    """
    model = plan.decoder(weights)
    inputs = in_zigzag(batch, plan.layout)
    hidden_BTD, context, _ = hidden_states(model, inputs, plan)
    logits_of = functools.partial(model.logits, context=context)
    if "text_bytes" in batch:
        sums = text_sums(logits_of, hidden_BTD, inputs, plan)
    else:
        sums = {"loss_sum": batch_cross_entropy(logits_of, hidden_BTD, inputs, plan)[0]}
    sums["tokens"] = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
    if plan.eval_metrics:
        hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
        hidden_BTD = from_zigzag(hidden_BTD, plan.layout.shards("length"))
        metrics = plan.eval_metrics(logits_of(hidden_BTD)[..., : plan.spec.vocab_size], batch)
        sums["user_metrics"] = check_metrics(
            "eval_metrics", metrics, {"loss", "perplexity", "bits_per_byte", "ema_loss"}
        )
    return sums


def text_sums(logits_of: LogitsOf, hidden_BTD: jax.Array, inputs: Batch, plan: StepPlan) -> dict[str, jax.Array]:
    """Returns `loss_sum` over all tokens, `text_nats` over those of text, `text_bytes` their bytes of UTF-8.

    Beside them `not_text` counts tokens of data that are no text. The ends of documents are in `loss_sum` alone. The
    inputs are `in_zigzag`.
    """
    mask_BT, bytes_BT = inputs["loss_mask"], inputs["text_bytes"]
    is_text_BT = (mask_BT > 0) & (bytes_BT >= 0)

    def loss_sum(mask_BT: jax.Array) -> jax.Array:
        return batch_cross_entropy(logits_of, hidden_BTD, {**inputs, "loss_mask": mask_BT}, plan)[0]

    # Over two masks, on which logits don't depend: they are computed once.
    loss, text = jax.vmap(loss_sum)(jnp.stack([mask_BT, is_text_BT.astype(mask_BT.dtype)]))
    return {
        "loss_sum": loss,
        "text_nats": text,
        "text_bytes": jnp.sum(jnp.where(is_text_BT, bytes_BT, 0)),
        "not_text": jnp.sum((mask_BT > 0) & (bytes_BT == NOT_TEXT)),
    }
