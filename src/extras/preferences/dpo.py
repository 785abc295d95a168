"""The loss of Direct Preference Optimization (Rafailov et al. 2023, equation 7), which train_dpo.py minimizes.

A batch row contains a pair, as made by `pairs.pair_batch`. C: its two answers, chosen and rejected.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from src.model.decoder import Decoder
from src.model.params import Tree, Weights
from src.step.loss import LossSums, hidden_states, in_zigzag
from src.step.plan import Batch, StepPlan
from src.step.token_scores import token_scores
from src.system.errors import UserError

LOSS = "src.step.dpo:dpo_loss"  # the value of the key `loss`, a former path that runs have saved (`src.MOVED`)


def dpo_loss(model: Decoder, batch: Batch, plan: StepPlan) -> LossSums:
    """Sums the pairs' losses, in nats, and the metrics of `preferences`. Raises UserError for batches without pairs."""
    if "reference" not in batch:
        raise UserError(f"loss={LOSS} needs preference pairs: continue this run with python -m src.train_dpo")
    log_probs_BC, reports = answer_log_probs(model, batch, plan)
    loss, metrics = preferences(log_probs_BC, batch, plan)
    return LossSums(loss, jnp.zeros(()), jnp.zeros(0), jnp.sum(batch["segment_ids"] > 0), reports, metrics)


def preferences(log_probs_BC: jax.Array, batch: Batch, plan: StepPlan) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the sum of the pairs' losses, in nats, and each metric as (sum over pairs, number of pairs).

    `log_probs_BC` are the answers' log-probabilities, in nats; padding rows do not count. An answer's reward is
    `dpo_beta` times its log-probability ratio to the reference. With `dpo_label_smoothing`, the loss is conservative
    DPO (Mitchell 2023).
    """
    reward_BC = plan.step.dpo_beta * (log_probs_BC - batch["reference"])
    margin_B, smoothing = reward_BC[:, 0] - reward_BC[:, 1], plan.step.dpo_label_smoothing
    loss_B = -(1 - smoothing) * jax.nn.log_sigmoid(margin_B) - smoothing * jax.nn.log_sigmoid(-margin_B)
    is_pair_B = jnp.sum(batch["loss_mask"], axis=1)  # 0 for a padding row
    of_pair = {"accuracy": margin_B > 0, "margin": margin_B}
    of_pair |= {"reward_chosen": reward_BC[:, 0], "reward_rejected": reward_BC[:, 1]}
    of_pair |= {"log_prob_chosen": log_probs_BC[:, 0], "log_prob_rejected": log_probs_BC[:, 1]}
    metrics = {name: (jnp.sum(x_B * is_pair_B), jnp.sum(is_pair_B)) for name, x_B in of_pair.items()}
    return jnp.sum(loss_B * is_pair_B), metrics


@jax.named_scope("answers")
def answer_log_probs(model: Decoder, batch: Batch, plan: StepPlan) -> tuple[jax.Array, Tree]:
    """Computes the log-probability [B, C] of each answer given its prompt, in nats, and the layers' reports.

    As in `cross_entropy`, logits are computed for one of `num_vocab_tiling` tiles of the sequence at a time.
    """
    inputs = in_zigzag(batch, plan.layout)
    hidden_BTD, context, reports = hidden_states(model, inputs, plan)
    mask_BTC = (inputs["segment_ids"][..., None] == jnp.array([1, 2])) * inputs["answer_mask"][..., None]
    tiles, shards = plan.step.num_vocab_tiling, plan.layout.shards("norm_length")
    logits_of = functools.partial(model.logits, context=context)
    log_probs_BT, _ = token_scores(logits_of, hidden_BTD, inputs["targets"], tiles, shards)
    return jnp.sum(log_probs_BT[..., None] * mask_BTC, axis=1), reports


def measure(weights: Weights, batch: Batch, plan: StepPlan) -> dict[str, Any]:
    """Replaces `eval_step`: computes its sums for pairs, which `tokens` counts, and `log_probs` [B, C], in nats."""
    log_probs_BC, _ = answer_log_probs(plan.decoder(weights), batch, plan)
    loss, metrics = preferences(log_probs_BC, batch, plan)
    pairs = jnp.sum(batch["loss_mask"])
    return {"log_probs": log_probs_BC, "loss_sum": loss, "tokens": pairs, "user_metrics": metrics}
