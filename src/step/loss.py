"""The training objective: edit this file to change it.

`next_token_loss` computes what a step minimises, as sums over tokens. Another objective is a function with the same
signature, here or in your own file that the key `loss` names; docs/forking.md has an example.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from src.model.attention import with_segment_lists
from src.model.decoder import Decoder, OutputPart
from src.model.forward_context import ForwardContext
from src.model.params import Tree, Weights
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import to_zigzag
from src.step.plan import Batch, StepPlan

Metrics = dict[str, Any]
LogitsOf = Callable[[Array], Array]  # hidden states [B, t, D] to float32 logits [B, t, V]


class LossSums(NamedTuple):
    """Sums over the tokens of a batch, or of a part of one."""

    loss: Array  # nats
    z: Array  # squared log-sum-exps of the logits
    mtp: Array  # [P] nats, one per multi-token prediction layer
    non_padding: Array  # int32: tokens that go through the experts, all but padding
    router: Tree  # the layers' reports: sums over tokens, such as the experts' loads
    metrics: Mapping[str, tuple[Array, Array]] = {}  # from a custom loss: values to record, (sum, count)


class TokenCounts(NamedTuple):
    """Token counts of a whole batch, by which sums are divided; a single micro-batch or device does not know them."""

    loss: Array  # tokens that the loss counts
    mtp: Array  # [P] tokens that each multi-token prediction layer predicts
    non_padding: Array


LossFunction = Callable[[Decoder, Batch, StepPlan], LossSums]


def next_token_loss(model: Decoder, batch: Batch, plan: StepPlan) -> LossSums:
    """Sums the cross-entropy of each next token, and with `mtp_num_layers` of the tokens after it.

    The batch has arrays [b, T] as listed in src/data/types.py, in sequence order; `dropout_keys` for dropout; and the
    fields that `batch_transform` adds.
    """
    inputs = in_zigzag(batch, plan.layout)
    ahead = [in_zigzag(each, plan.layout) for each in mtp_batches(batch, plan)]
    hidden_BTD, context, reports = hidden_states(model, inputs, plan)
    loss, z = batch_cross_entropy(model, context, hidden_BTD, inputs, plan)
    hidden_ahead, mtp_reports = model.mtp_hidden_states(
        hidden_BTD, [each["tokens"] for each in ahead], context, plan.execution
    )
    mtp = [
        batch_cross_entropy(model, context, each_BTD, targets, plan)[0]
        for each_BTD, targets in zip(hidden_ahead, ahead, strict=True)
    ]
    return LossSums(loss, z, jnp.array(mtp), jnp.sum(batch["segment_ids"] > 0), reports | mtp_reports)


@jax.named_scope("loss")
def objective(
    trainable: Tree, weights: Weights, counts: TokenCounts, batch: Batch, plan: StepPlan, loss: LossFunction
) -> tuple[Array, tuple[Metrics, Tree]]:
    """Computes a micro-batch's share of the minimised loss; also its share of each reported loss, and layers' reports.

    Shares of all micro-batches add up to means, because `counts` covers the whole batch. Gradients are taken with
    respect to `trainable`, which replaces `weights.trainable`.
    """
    model = plan.decoder(dataclasses.replace(weights, trainable=trainable))
    sums = loss(model, batch, plan)
    step, denominator = plan.step, jnp.maximum(counts.loss, 1.0)
    losses: Metrics = {"loss": sums.loss / denominator}
    if sums.metrics:
        losses["user_metrics"] = {**sums.metrics}
    total = (sums.loss + step.z_loss_multiplier * sums.z) / denominator
    if plan.spec.has_experts and (step.load_balance_loss_weight or step.router_z_loss_weight):
        from src.model.moe import router

        replicas = plan.accumulation.manual_axes
        losses |= router.loss_shares(sums.router, sums.non_padding, counts.non_padding, plan.layout, replicas)
        total += step.load_balance_loss_weight * losses["load_balance_loss"]
        total += step.router_z_loss_weight * losses["router_z_loss"]
    if plan.spec.mtp_num_layers:
        losses["mtp_loss"] = jnp.mean(sums.mtp / jnp.maximum(counts.mtp, 1.0))
        total += step.mtp_loss_scaling_factor * losses["mtp_loss"]
    return total, (losses, sums.router)


def count_tokens(batch: Batch, plan: StepPlan) -> TokenCounts:
    """Counts the tokens of a whole batch [B, T]."""
    # The last tokens of a document have no later targets: each extra layer predicts fewer than the one before.
    loss, *mtp = (jnp.sum(each["loss_mask"], dtype=jnp.float32) for each in (batch, *mtp_batches(batch, plan)))
    return TokenCounts(loss, jnp.array(mtp), jnp.sum(batch["segment_ids"] > 0))


def hidden_states(model: Decoder, inputs: Batch, plan: StepPlan) -> tuple[Array, ForwardContext, Tree]:
    """Computes the hidden states [B, T, D] of a batch that is `in_zigzag`, their context, and the layers' reports."""
    context = ForwardContext(
        inputs["positions"],
        inputs["segment_ids"],
        plan.layout,
        plan.kernel,
        plan.packed,
        dropout_keys_BTW=inputs.get("dropout_keys"),
        log_internals=plan.step.log_internals > 0,
        grad_barriers=plan.execution.grad_barriers,
        separate_factors=plan.execution.for_gpu,
        mlp_in_halves=plan.execution.mlp_in_halves,
        recomputes_activated=plan.execution.recomputes_activated,
    )
    context = with_segment_lists(context)
    hidden_BTD, _, reports = model(inputs["tokens"], context, plan.execution)
    return hidden_BTD, context, reports


def in_zigzag(batch: Batch, layout: MeshLayout) -> Batch:
    """Reorders a batch's arrays [B, T, ...] from sequence order to zigzag order, and shards T.

    Fields that `batch_transform` added in another shape are unchanged. Raises as `to_zigzag` does.
    """
    return {name: to_zigzag(x, layout) if x.shape[:2] == batch["targets"].shape else x for name, x in batch.items()}


def mtp_batches(batch: Batch, plan: StepPlan) -> list[Batch]:
    """Inputs and targets of each multi-token prediction layer, nearest token first: arrays [B, T]."""
    names, length = ("tokens", "targets", "loss_mask", "segment_ids"), batch["tokens"].shape[1]
    batches = []
    for distance in range(1, plan.spec.mtp_num_layers + 1):  # tokens ahead, masked if in another segment
        ahead = {name: jnp.roll(batch[name], -distance, axis=1) for name in names}
        same_BT = (ahead.pop("segment_ids") == batch["segment_ids"]) & (jnp.arange(length) < length - distance)
        batches.append({**ahead, "loss_mask": ahead["loss_mask"] * same_BT})
    return batches


# ---- Cross-entropy


def batch_cross_entropy(
    model: Decoder, context: ForwardContext, hidden_BTD: Array, inputs: Batch, plan: StepPlan
) -> tuple[Array, Array]:
    """Computes the sums of `cross_entropy` for a batch that is `in_zigzag`, in tiles of V if possible, else of T."""
    tiles, shards = plan.step.num_vocab_tiling, plan.layout.shards("norm_length")
    logits_of = functools.partial(model.logits, context=context)
    targets_BT, mask_BT = inputs["targets"], inputs["loss_mask"]
    if tiles > 1:
        from src.step.tiles import output_parts, over_parts

        if parts := output_parts(model, tiles, plan.layout):

            def of_part(hidden_BTD: Array, part: OutputPart) -> tuple[Array, Array]:
                return of_logits(logits_of(hidden_BTD, part=part), targets_BT, part.ids_V)

            with jax.named_scope("cross_entropy"):
                return _sums(*over_parts(of_part, hidden_BTD, parts), mask_BT)
    return cross_entropy(logits_of, hidden_BTD, targets_BT, mask_BT, tiles, shards)


@jax.named_scope("cross_entropy")
def cross_entropy(
    logits_of: LogitsOf, hidden_BTD: Array, targets_BT: Array, mask_BT: Array, tiles: int, shards: int = 1
) -> tuple[Array, Array]:
    """Sums over the tokens whose mask is 1: the loss, in nats, and the squared log-sum-exp of their logits.

    The second times `z_loss_multiplier` is the z-loss of PaLM (Chowdhery et al. 2022, section 5). T has `shards`
    shards, each cut into `tiles`; with more than one tile, the backward pass recomputes each tile's logits.
    """

    def sums(hidden_BtD: Array, targets_Bt: Array, mask_Bt: Array) -> tuple[Array, Array]:
        logits_BtV = logits_of(hidden_BtD)
        return _sums(*of_logits(logits_BtV, targets_Bt, jnp.arange(logits_BtV.shape[-1])), mask_Bt)

    arrays = hidden_BTD, targets_BT, mask_BT
    if tiles == 1:
        return sums(*arrays)
    from src.step.tiles import sum_over_tiles

    return sum_over_tiles(sums, arrays, tiles, shards)


def of_logits(logits_BTV: Array, targets_BT: Array, ids_V: Array) -> tuple[Array, Array]:
    """Computes the log-sum-exp [B, T] of logits, and the target's logit, or 0 if it is not among the tokens `ids_V`."""
    # The target's logit is a sum, not a lookup, for which XLA would hold the logits in float32.
    log_normaliser_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    return log_normaliser_BT, jnp.sum(jnp.where(targets_BT[..., None] == ids_V, logits_BTV, 0.0), axis=-1)


def _sums(log_normaliser_BT: Array, target_logit_BT: Array, mask_BT: Array) -> tuple[Array, Array]:
    return jnp.sum((log_normaliser_BT - target_logit_BT) * mask_BT), jnp.sum(jnp.square(log_normaliser_BT) * mask_BT)
