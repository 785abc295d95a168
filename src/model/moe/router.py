"""The router: which experts a token goes through, with what weights, and the sums it reports.

Tensor letters: src/model/spec.py. A token goes through k experts.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from src.model.params import Tree, by_path, nested
from src.model.spec import LayerSpec
from src.parallel.mesh import MeshLayout

Report = dict[str, Array]
LOSSES = ("load_balance_loss", "router_z_loss")
SCORE_FUNCTIONS = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def choose(scores_BTE: Array, correction_E: Array | None, spec: LayerSpec) -> tuple[Array, Array]:
    """Chooses each token's k experts and their weights; both [B, T, k].

    `correction_E`, if any, affects the choice, not the weights (DeepSeek-V3, arXiv:2412.19437, 2.1.2).
    """
    choice_BTE = scores_BTE
    if correction_E is not None:
        choice_BTE = choice_BTE + jax.lax.stop_gradient(correction_E)
    if spec.n_routing_groups > 1:
        choice_BTE = jnp.where(_in_best_groups(choice_BTE, spec), choice_BTE, -jnp.inf)
    _, experts_BTk = jax.lax.top_k(choice_BTE, spec.num_experts_per_tok)
    weights_BTk = jnp.take_along_axis(scores_BTE, experts_BTk, axis=-1)
    if spec.norm_topk_prob:
        weights_BTk /= jnp.sum(weights_BTk, axis=-1, keepdims=True) + 1e-20
    return experts_BTk, weights_BTk * spec.routed_scaling_factor


def _in_best_groups(choice_BTE: Array, spec: LayerSpec) -> Array:
    """Mask [B, T, E] of the experts in their token's best groups (DeepSeek-V2, section 2.2.2)."""
    grouped_BTGe = choice_BTE.reshape(*choice_BTE.shape[:2], spec.n_routing_groups, -1)
    best = {"max": 1, "top2": 2}[spec.routing_group_score]
    group_BTG = jnp.sum(jax.lax.top_k(grouped_BTGe, best)[0], axis=-1)
    _, chosen_BTg = jax.lax.top_k(group_BTG, spec.topk_routing_group)
    chosen_BTG = jnp.any(jax.nn.one_hot(chosen_BTg, spec.n_routing_groups, dtype=bool), axis=-2)
    return jnp.repeat(chosen_BTG, grouped_BTGe.shape[-1], axis=-1)


def report(
    logits_BTE: Array, scores_BTE: Array, experts_BTk: Array, kept_BTk: Array, non_padding_BT: Array, layout: MeshLayout
) -> Report:
    """Sums over each device's non-padding tokens, [devices, ...]; `totals` adds them up, so no layer waits for that.

    `expert_load` [E]: the fraction of a token's choices that each expert got. `expert_share` [E]: each expert's
    fraction of the token's scores. `router_z` [1]: the squared log-sum-exp of its logits. `tokens_dropped` [1]: the
    fraction of its choices without a slot.
    """

    def sums(*arrays: Array) -> Report:
        logits_BTE, scores_BTE, experts_BTk, kept_BTk, non_padding_BT = arrays
        each = {
            "expert_load": jnp.sum(jax.nn.one_hot(experts_BTk, scores_BTE.shape[-1]), axis=-2) / experts_BTk.shape[-1],
            "expert_share": scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True),
            "router_z": jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)),
            "tokens_dropped": jnp.mean(~kept_BTk, axis=-1, keepdims=True),
        }
        return {name: jnp.sum(each_BT * non_padding_BT[..., None], axis=(0, 1))[None] for name, each_BT in each.items()}

    tokens, of_tokens = layout.spec(("batch", "length", None)), layout.spec(("batch", "length"))
    by_device = PartitionSpec(layout.axes("batch") + layout.axes("length") or None)
    mapped = layout.shard_map(sums, (*[tokens] * 4, of_tokens), by_device)
    return mapped(logits_BTE, scores_BTE, experts_BTk, kept_BTk, non_padding_BT)


def totals(reports: Tree) -> Tree:
    """Sums all layers' reports over devices."""
    return jax.tree.map(lambda sums: jnp.sum(sums, axis=-2), reports)


def by_layer(reports: Tree, tokens: Array) -> Report:
    """Computes metrics of each layer of experts, in layer order, [layers] each, from the `totals` over `tokens` tokens.

    `load_balance_loss`: E times the sum over experts of mean load times mean share, 1 if both are even (Switch
    Transformer, arXiv:2101.03961, section 2.2). `router_z_loss`: the mean squared log-sum-exp of the logits (ST-MoE,
    arXiv:2202.08906, equation 5). `expert_load_max`: the load of the most loaded expert, over the mean.
    `tokens_dropped`: the fraction of choices without a slot.
    """
    figures = []
    for blocks in reports["segments"].values():
        pattern = [_figures(block["feed_forward"], tokens) for block in blocks.values() if block["feed_forward"]]
        if pattern:  # the group runs its pattern repeatedly, so interleave its positions
            figures.append(jax.tree.map(lambda *each: jnp.stack(each, axis=1).reshape(-1), *pattern))
    for layer in reports.get("mtp", {}).values():
        if layer["block"]["feed_forward"]:
            figures.append(jax.tree.map(lambda each: each[None], _figures(layer["block"]["feed_forward"], tokens)))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *figures)


def _figures(sums: Report, tokens: Array) -> Report:
    """Computes the metrics of `by_layer` for layers with the same number of experts."""
    means = {name: each / jnp.maximum(tokens, 1) for name, each in sums.items()}
    load_E, share_E = means["expert_load"], means["expert_share"]
    E = load_E.shape[-1]
    return {
        "load_balance_loss": E * jnp.sum(load_E * share_E, axis=-1),
        "router_z_loss": means["router_z"][..., 0],
        "expert_load_max": E * jnp.max(load_E, axis=-1),
        "tokens_dropped": means["tokens_dropped"][..., 0],
    }


def loss_shares(
    reports: Tree, tokens: Array, all_tokens: Array, layout: MeshLayout, replicas: tuple[str, ...]
) -> Report:
    """Computes this replica's share of a micro-batch's LOSSES, each summed over layers.

    All shares of a batch add up to the mean over its micro-batches, weighted by their tokens. The mesh axes `replicas`
    split a micro-batch; `tokens` are this replica's, `all_tokens` the batch's.
    """
    # These losses are not sums over tokens, so first sum their inputs over the replicas.
    buffers, tokens = jax.lax.psum((totals(reports), tokens), replicas)
    layers = by_layer(buffers, tokens)
    share = tokens / jnp.maximum(all_tokens, 1) / layout.size(replicas)
    return {name: share * jnp.sum(layers[name]) for name in LOSSES}


def after_step(stats: Tree, reports: Tree, tokens: Array, rate: float) -> tuple[Tree, Report]:
    """Updates the correction biases `stats`, and computes `by_layer` and the sums of LOSSES, from a batch's reports."""
    sums = totals(reports)
    layers = by_layer(sums, tokens)
    metrics = {**layers, **{name: jnp.sum(layers[name]) for name in LOSSES}}
    return update_router_bias(stats, sums, tokens, rate), metrics


def update_router_bias(stats: Tree, reports: Tree, tokens: Array, rate: float) -> Tree:
    """Moves the correction biases `stats` by `rate` towards an even load (DeepSeek-V3, section 2.1.2).

    `reports` has the same nesting, with the `totals` of each layer over a whole batch of `tokens` non-padding tokens.
    """

    def move(bias_E: Array, load_E: Array) -> Array:
        # Layers that share weights, and hence the bias, report separately.
        load_E = jnp.mean(load_E, axis=tuple(range(load_E.ndim - bias_E.ndim)))
        return bias_E + rate * jnp.sign(tokens / bias_E.shape[-1] - load_E)

    sums = by_path(reports)
    return nested({path: move(bias, sums[(*path[:-1], "expert_load")]) for path, bias in by_path(stats).items()})
