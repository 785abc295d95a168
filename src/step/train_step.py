"""The training step: pure functions of pytrees, compiled identically by train.py and train_compile.py."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from src.model.params import Tree, Weights
from src.parallel.accumulate import accumulate
from src.step.eval_step import compile_eval_step
from src.step.loss import LossFunction, Metrics, TokenCounts, count_tokens, next_token_loss, objective
from src.step.optimizer import HParams, clip
from src.step.plan import Batch, StepPlan
from src.step.state import TrainState, batch_sharding


def compile_steps(
    plan: StepPlan, state: TrainState, compiler_options: Mapping[str, str] = {}, loss: LossFunction = next_token_loss
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """Jits `train_step(state, batch, hparams)`, which minimises `loss`, and `eval_step(weights, batch)`."""
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch, copy = batch_sharding(plan.layout, plan.fields), plan.layout.sharding(())
    train = jax.jit(
        functools.partial(train_step, plan=plan, loss=loss),
        in_shardings=(state_shardings, batch, copy),
        out_shardings=(state_shardings, copy),
        donate_argnums=0,
        compiler_options=dict(compiler_options),  # for XLA
    )
    return train, compile_eval_step(plan)


def train_step(
    state: TrainState, batch: Batch, hparams: HParams, plan: StepPlan, loss: LossFunction = next_token_loss
) -> tuple[TrainState, Metrics]:
    """Makes one update on one batch of [B, T].

    The loss is a mean over the whole batch's tokens, however they are split into micro-batches and shards. An update
    whose loss or gradient is not finite leaves weights and optimizer unchanged, and so does a batch in which no token
    counts in the loss, or a spike with `skip_step_on_spikes`; the step count still advances. Updated weights that are
    not usable are reported, but the update is not undone: that would require a copy of them.

    Returns:
        The next state; and `loss` (nats per token), `grad_norm` (before clipping), `tokens` (number that count: if 0,
        the other two are NaN), `finite` (loss and gradient were: otherwise no update was made), `usable` (layers can be
        computed with the weights). If the step has them, also `spike` and `updates_skipped` (`skip_spikes`), `mtp_loss`
        (mean over the extra prediction layers), `load_balance_loss` and `router_z_loss` (sums over layers; means over
        micro-batches if one has a weight, otherwise of the whole batch), for each layer of experts `expert_load_max`
        (the largest load over the mean) and `tokens_dropped` (the fraction of choices), `user_metrics` (a custom loss's
        means) and `internals` (of `log_internals`).
    """
    counts = count_tokens(batch, plan)
    rows = with_dropout_keys(batch, state.step, plan)
    gradient = functools.partial(loss_gradient, plan=plan, loss=loss)
    grads, (losses, buffers) = accumulate(gradient, (state.weights, counts), rows, plan.accumulation)
    grad_norm = _norm(grads)
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(grad_norm)
    counted = jnp.any(batch["loss_mask"] != 0)
    keep, spikes, spike_metrics = finite & counted, state.spikes, {}
    if plan.step.skip_step_on_spikes:
        from src.step.spikes import skip_spikes

        keep, spikes, spike_metrics = skip_spikes(spikes, losses["loss"], grad_norm, keep, hparams["spike_factor"])
    trainable, opt, internals = apply_update(grads, grad_norm, state, hparams, plan, keep_if=keep)
    stats, of_experts = state.weights.stats, {}
    if plan.spec.has_experts:
        from src.model.moe import router

        rate = plan.step.routed_bias_update_rate
        stats, of_experts = router.after_step(stats, buffers, counts.non_padding, rate)
    weights = Weights(trainable, state.weights.frozen, _where(keep, stats, state.weights.stats))
    ema = state.ema
    if plan.step.ema_decay:
        ema = _where(keep, optax.incremental_update(trainable, ema, 1 - hparams["ema_decay"]), ema)
    metrics: Metrics = {
        **of_experts,
        **loss_metrics(losses, counts),
        **spike_metrics,
        "loss": jnp.where(counted, losses["loss"], jnp.nan),
        "grad_norm": jnp.where(counted, grad_norm, jnp.nan),
        "tokens": counts.loss,
        "finite": finite,
        "usable": _usable(trainable),
    }
    if plan.step.log_internals:
        from src.model.internals import activation_rms

        outputs = activation_rms(buffers, counts.non_padding, plan.spec.emb_dim)
        metrics["internals"] = {"activation_rms": outputs, **internals}
    return TrainState(state.step + 1, weights, opt, ema, spikes), metrics


def loss_metrics(losses: Metrics, counts: TokenCounts) -> Metrics:
    """Divides a custom loss's metrics by their counts, and makes `mtp_loss` NaN if a prediction layer has no tokens."""
    losses = dict(losses)
    if "user_metrics" in losses:
        losses["user_metrics"] = {name: total / count for name, (total, count) in losses["user_metrics"].items()}
    if "mtp_loss" in losses:  # a mean over the layers, valid only if each has tokens
        losses["mtp_loss"] = jnp.where(jnp.all(counts.mtp != 0), losses["mtp_loss"], jnp.nan)
    return losses


def with_dropout_keys(batch: Batch, step: Array, plan: StepPlan) -> Batch:
    """Adds each token's dropout key for this step to the batch, if the model has dropout."""
    if plan.spec.embedding_dropout == 0 and all(layer.dropout_rate == 0 for layer in plan.spec.layers):
        return batch
    from src.model.dropout import dropout_keys

    shards = plan.layout.shards("batch") if plan.ramped else 1
    keys_BTW = dropout_keys(plan.step.init_weights_seed, step, batch["tokens"], shards)
    return {**batch, "dropout_keys": plan.layout.constrain(keys_BTW, "batch", None, None)}


def loss_gradient(
    inputs: tuple[Weights, TokenCounts], batch: Batch, plan: StepPlan, loss: LossFunction
) -> tuple[Tree, Any]:
    """Gradient of a micro-batch's objective with respect to trainable weights, and `objective`'s reported values."""
    weights, counts = inputs
    of_trainable = functools.partial(objective, weights=weights, counts=counts, batch=batch, plan=plan, loss=loss)
    trainable = cast_matrices(weights.trainable, plan) if loss is next_token_loss else weights.trainable
    total, backward, (losses, buffers) = jax.vjp(of_trainable, trainable, has_aux=True)
    # Compute the loss before the backward pass begins: otherwise XLA may hold the logits through it and sum them later.
    one, losses = jax.lax.optimization_barrier((jnp.ones_like(total), losses))
    grads = jax.tree.map(lambda gradient, w: gradient.astype(w.dtype), backward(one)[0], weights.trainable)
    return grads, (losses, buffers)


def cast_matrices(trainable: Tree, plan: StepPlan) -> Tree:
    """Casts the layers' trainable matrices to `dtype` once per step on TPUs, except with quantization.

    A pipeline's matrices are not cast: its micro-batches share them, and their gradients are summed.
    """
    if plan.quantization.kind or plan.execution.schedule or not plan.execution.grad_barriers:
        return trainable
    from src.step.cast_matrices import cast_in_layers

    return cast_in_layers(trainable, plan)


@jax.named_scope("optimizer")
def apply_update(
    grads: Tree, grad_norm: Array, state: TrainState, hparams: HParams, plan: StepPlan, keep_if: Array
) -> tuple[Tree, Any, Metrics]:
    """Updates the trainable weights and the optimizer's state; both stay unchanged if not `keep_if`.

    Also returns, with `log_internals`, the norms of weights, gradients and updates by variable, otherwise {}.
    """
    weights = state.weights.trainable
    if plan.accumulation.updates != plan.accumulation.weights:
        weights = jax.lax.with_sharding_constraint(weights, plan.accumulation.updates)
    of_gradients = _norms(grads, plan)
    as_before = weights, state.opt, jax.tree.map(jnp.zeros_like, of_gradients)

    def updated(weights: Tree, opt: Any, _: Metrics) -> tuple[Tree, Any, Metrics]:
        """Weights, optimizer state (in its own memory) and norms of the updates by clipped gradients."""
        clipped, optimizer = clip(grads, grad_norm, hparams["clip"]), plan.optimizer(hparams)
        if plan.step.optimizer_memory_host_offload:
            from src.step.host_offload import to_device, to_host

            updates, new = optimizer.update(clipped, to_device(opt), weights)
            new = to_host(new, opt)
        else:
            updates, new = optimizer.update(clipped, opt, weights)
        return optax.apply_updates(weights, updates), new, _norms(updates, plan)

    if plan.execution.update_in_branch:
        after = jax.lax.cond(keep_if, updated, lambda *kept: kept, *as_before)
    else:
        after = _where(keep_if, updated(*as_before), as_before)
    trainable, opt, of_updates = after
    internals = {}
    for kind, found in (("weight", _norms(trainable, plan)), ("gradient", of_gradients), ("update", of_updates)):
        internals |= {f"{kind}_norm/{name}": norm for name, norm in found.items()}
    return trainable, opt, internals


def _norms(tree: Tree, plan: StepPlan) -> Metrics:
    if not plan.step.log_internals:
        return {}
    from src.model.internals import norms

    return norms(tree, plan.axes)


def _usable(trainable: Tree) -> Array:
    # A gated feed-forward multiplies an input by three matrices and twice by the scale of a norm, and none of these
    # five can exceed the norm of all weights.
    return jnp.isfinite(_norm(trainable) ** 5)


def _norm(tree: Tree) -> Array:
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def _where(condition: Array, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)
