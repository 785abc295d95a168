"""The training step: pure functions of pytrees, compiled alike by train.py and train_compile.py."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from src.errors import UserError
from src.model.decoder import Decoder
from src.model.dropout import token_keys
from src.model.forward_context import ForwardContext
from src.model.moe import router
from src.parallel.accumulate import accumulate
from src.parallel.mesh import Layout
from src.parallel.sequence import from_zigzag, to_zigzag
from src.step.loss import cross_entropy
from src.step.optimizer import Hyper, clip
from src.step.plan import Batch, StepPlan
from src.step.state import TrainState, batch_sharding, optimizer, state_weights

Metrics = dict[str, jax.Array]


def compile_steps(
    plan: StepPlan, state: TrainState, compiler_options: Mapping[str, str] | None = None
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """The jitted `train_step(state, batch, hyper)` and `eval_step(parts, batch)`; `state` gives the shardings.

    `compiler_options` are XLA's, for the first.
    """
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch, copy = batch_sharding(plan.layout), plan.layout.sharding(())
    train = jax.jit(
        functools.partial(train_step, plan=plan),
        in_shardings=(state_shardings, batch, copy),
        out_shardings=(state_shardings, copy),
        donate_argnums=0,
        compiler_options=dict(compiler_options or {}),
    )
    return train, compile_eval_step(plan, state_weights(state_shardings))


def compile_eval_step(plan: StepPlan, shardings: tuple[Any, ...]) -> jax.stages.Wrapped:
    """The jitted `eval_step(parts, batch)`, for weights of these shardings."""
    batch = {name: at for name, at in batch_sharding(plan.layout).items() if name != "data_position"}
    return jax.jit(
        functools.partial(eval_step, plan=plan),
        in_shardings=(shardings, batch),
        out_shardings=plan.layout.sharding(()),
    )


def train_step(state: TrainState, batch: Batch, hyper: Hyper, plan: StepPlan) -> tuple[TrainState, Metrics]:
    """One update on one batch of [B, T].

    The loss is a mean over the whole batch's tokens, however they fall into micro-batches and shards. An update whose
    loss or gradient is not finite leaves weights and optimizer as they were; step and data position go on. What an
    update makes of the weights is looked at, and not undone: that would take a copy of them.

    Returns:
        The next state, and scalars: `loss` (nats per token), `grad_norm` (before clipping), `tokens` (that count),
        `finite` (whether the update was made), `usable` (whether the weights are now such that a layer can be
        computed), and where the model has them `load_balance_loss` and `router_z_loss`
        (sums over layers; means over micro-batches where one has a weight, else of the whole batch) and `mtp_loss` (the
        mean over the extra prediction layers of their losses, each in nats per token that the layer predicts). With
        experts also, of each layer that has some, `expert_load_max` (the busiest one's load over the mean) and
        `tokens_dropped` (the fraction of choices).
    """
    tokens = jnp.sum(batch["loss_mask"], dtype=jnp.float32)
    apart = plan.summed_by_hand()

    def micro_loss(trainable: Any, others: Any, rows: Batch) -> tuple[jax.Array, Any]:
        """This micro-batch's share of the loss to descend, and of what is reported: sums over them are means."""
        frozen, stats, tokens, mtp_tokens, real = others
        decoder = plan.decoder(trainable, frozen, stats)
        loss_sum, square_sum, mtp_sums, reports = loss_sums(decoder, rows, plan)
        denominator = jnp.maximum(tokens, 1.0)
        shares = {"loss": loss_sum / denominator}
        objective = (loss_sum + plan.z_loss * square_sum) / denominator
        if plan.spec.has_experts and (plan.load_balance or plan.router_z_loss):
            # Of all tokens of the micro-batch, of which a device that adds up its own gradients has a part.
            whole, through_experts = jax.lax.psum((router.totals(reports), jnp.sum(rows["segment_ids"] > 0)), apart)
            layers = router.by_layer(whole, through_experts)
            share = through_experts / jnp.maximum(real, 1) / plan.layout.size(apart)
            shares["load_balance_loss"] = share * jnp.sum(layers["load_balance_loss"])
            shares["router_z_loss"] = share * jnp.sum(layers["router_z_loss"])
            objective += plan.load_balance * shares["load_balance_loss"] + plan.router_z_loss * shares["router_z_loss"]
        if plan.spec.mtp_num_layers:
            shares["mtp_loss"] = jnp.mean(mtp_sums / jnp.maximum(mtp_tokens, 1.0))
            objective += plan.further_loss * shares["mtp_loss"]
        return objective, (shares, reports)

    def gradient(given: tuple[Any, Any], rows: Batch) -> tuple[Any, Any]:
        return jax.grad(micro_loss, has_aux=True)(*given, rows)

    real = jnp.sum(batch["segment_ids"] > 0)
    # A document's last tokens have nothing further on: each extra layer predicts fewer than the one before.
    mtp_tokens = [jnp.sum(ahead["loss_mask"], dtype=jnp.float32) for ahead in mtp_batches(batch, plan)]
    given = (state.trainable, (state.frozen, state.stats, tokens, jnp.array(mtp_tokens), real))
    rows = {name: x for name, x in batch.items() if name != "data_position"}
    if plan.spec.dropout_rate > 0 or any(layer.dropout_rate > 0 for layer in plan.spec.layers):
        step_key = jax.random.fold_in(jax.random.key(plan.seed), state.step)
        keys_BTW = token_keys(step_key, *batch["tokens"].shape)
        rows["dropout_keys"] = plan.layout.constrain(keys_BTW, "batch", None, None)
    placed, updated_at = plan.by_part(plan.shardings)["trainable"], plan.update_shardings()
    gradients, (losses, reports) = accumulate(
        gradient, given, rows, plan.micro_batches, plan.layout, apart, placed, updated_at
    )
    weights = state.trainable
    if plan.shard_optimizer:
        if not apart:
            # First as the weights lie: else XLA cuts gradients within their layers, and for that sums them whole over
            # all devices.
            gradients = jax.lax.with_sharding_constraint(gradients, placed)
        gradients, weights = jax.lax.with_sharding_constraint((gradients, weights), (updated_at, updated_at))
    grad_norm = _norm(gradients)
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(grad_norm)

    def updated(gradients: Any, weights: Any, opt: Any) -> tuple[Any, Any]:
        gradients = clip(gradients, grad_norm, hyper["clip"])
        updates, opt = optimizer(plan, hyper).update(gradients, opt, weights)
        return optax.apply_updates(weights, updates), opt

    def updated_on_device(gradients: Any, weights: Any, opt: Any) -> tuple[Any, Any]:
        weights, new = updated(gradients, weights, jax.device_put(opt, jax.memory.Space.Device))
        return weights, jax.tree.map(lambda new, old: jax.device_put(new, jax.typeof(old).memory_space), new, opt)

    if plan.offload_optimizer:
        # In a branch, which is taken when all gradients are there: elsewhere XLA would have the state on the device
        # all through the step.
        trainable, opt = jax.lax.cond(
            finite, updated_on_device, lambda _, weights, opt: (weights, opt), gradients, weights, state.opt
        )
    else:
        trainable, opt = _where(finite, updated(gradients, weights, state.opt), (weights, state.opt))
    if plan.spec.has_experts:
        reports = router.totals(reports)
        layers = router.by_layer(reports, real)
        losses = {name: jnp.sum(layers[name]) for name in ("load_balance_loss", "router_z_loss")} | losses
        losses |= {name: layers[name] for name in ("expert_load_max", "tokens_dropped")}
    stats = _where(finite, router.update_router_bias(state.stats, reports, real, plan.bias_update_rate), state.stats)
    state = TrainState(state.step + 1, trainable, state.frozen, stats, opt, batch["data_position"])
    usable = _usable(trainable)
    return state, {**losses, "grad_norm": grad_norm, "tokens": tokens, "finite": finite, "usable": usable}


def _usable(trainable: Any) -> jax.Array:
    """Whether a layer can be computed with the weights.

    A gated feed-forward multiplies an input by three matrices and twice by the scale of a norm, and none of these five
    can be more than the norm of all weights.
    """
    return jnp.isfinite(_norm(trainable) ** 5)


def _norm(tree: Any) -> jax.Array:
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def _where(condition: jax.Array, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def eval_step(parts: tuple[Any, ...], batch: Batch, plan: StepPlan) -> Metrics:
    """The loss of a batch, without update: scalars `loss_sum` in nats and `tokens`, to be added up over batches.

    And `further`, where `eval_metrics` has metrics of its own: each a sum and the number to divide it by.
    """
    decoder = plan.decoder(*parts)
    rows, parts = shared_out(batch, plan.layout), plan.layout.shards("norm_length")
    hidden_BTD, context, _ = hidden_states(decoder, rows, plan)
    logits_of = functools.partial(decoder.logits, context=context)
    loss_sum, _ = cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)
    sums = {"loss_sum": loss_sum, "tokens": jnp.sum(batch["loss_mask"], dtype=jnp.float32)}
    if plan.eval_metrics:
        hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
        hidden_BTD = from_zigzag(hidden_BTD, plan.layout.shards("length"))
        sums["further"] = _sums_and_counts(plan.eval_metrics(logits_of(hidden_BTD)[..., : plan.spec.vocab_size], batch))
    return sums


def _sums_and_counts(found: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What a user's `eval_metrics` returned. Raises UserError where it is no {name: (sum, count)}."""
    if not isinstance(found, dict) or not all(
        isinstance(pair, tuple | list) and [jnp.shape(each) for each in pair] == [(), ()] for pair in found.values()
    ):
        raise UserError(f"eval_metrics must return {{name: (sum, count)}}, scalars both: it returned {found}")
    if taken := {"loss", "perplexity"}.intersection(found):
        raise UserError(f"eval_metrics must name its metrics otherwise than {', '.join(sorted(taken))}")
    return found


def loss_sums(decoder: Decoder, batch: Batch, plan: StepPlan) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Sums over a batch's tokens: of the loss in nats, of the squared log-normaliser, of each extra layer's loss [P].

    And the layers' reports. Where the batch has `dropout_keys`, there is dropout.
    """
    rows, parts = shared_out(batch, plan.layout), plan.layout.shards("norm_length")
    ahead = [shared_out(shifted, plan.layout) for shifted in mtp_batches(batch, plan)]
    hidden_BTD, context, reports = hidden_states(decoder, rows, plan)
    logits_of = functools.partial(decoder.logits, context=context)
    loss, squares = cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)
    predicted, more_reports = decoder.mtp_hidden_states(
        hidden_BTD, [rows["tokens"] for rows in ahead], context, plan.execution
    )
    mtp_losses = [
        cross_entropy(logits_of, hidden_BTD, rows["targets"], rows["loss_mask"], plan.vocab_tiles, parts)[0]
        for hidden_BTD, rows in zip(predicted, ahead, strict=True)
    ]
    return loss, squares, jnp.array(mtp_losses), {**reports, **more_reports}


def hidden_states(decoder: Decoder, batch: Batch, plan: StepPlan) -> tuple[jax.Array, ForwardContext, Any]:
    """The hidden states [B, T, D] of a `shared_out` batch, what the blocks were told, and their reports."""
    positions_BT, segment_ids_BT, keys_BTW = (batch.get(name) for name in ("positions", "segment_ids", "dropout_keys"))
    context = ForwardContext(positions_BT, segment_ids_BT, plan.layout, plan.kernel, plan.packed, keys_BTW)
    hidden_BTD, _, reports = decoder(batch["tokens"], context, plan.execution)
    return hidden_BTD, context, reports


def shared_out(batch: Batch, layout: Layout) -> Batch:
    """A batch's arrays [B, T, ...] in the order of `zigzag_order`: those of the step that has them in the text's."""
    return {name: to_zigzag(x, layout) for name, x in batch.items() if name != "data_position"}


def mtp_batches(batch: Batch, plan: StepPlan) -> list[Batch]:
    """Returns what each extra prediction layer reads and predicts, the nearest first: arrays [B, T]."""
    return [shifted(batch, distance) for distance in range(1, plan.spec.mtp_num_layers + 1)]


def shifted(batch: Batch, distance: int) -> Batch:
    """The tokens, targets and masks [B, T] of `distance` tokens on; masked where those are another segment's."""
    names = ("tokens", "targets", "loss_mask", "segment_ids")
    ahead = {name: jnp.roll(batch[name], -distance, axis=1) for name in names}
    length = batch["tokens"].shape[1]
    same_BT = (ahead.pop("segment_ids") == batch["segment_ids"]) & (jnp.arange(length) < length - distance)
    return {**ahead, "loss_mask": ahead["loss_mask"] * same_BT}
