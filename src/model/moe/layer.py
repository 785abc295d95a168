"""A layer of experts: a router sends each token through a few of many feed-forward layers.

Tensor letters: src/model/spec.py. A token goes through k experts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.errors import UserError
from src.model.feed_forward import FeedForward, activated
from src.model.forward_context import Context, even_order, whole_rows
from src.model.moe import dispatch, router
from src.model.moe.dispatch import Peers, Rows
from src.model.moe.grouped_matmul import add_by_group, batched_matmul, grouped_matmul
from src.model.moe.router import Report
from src.model.params import Adapted, Statistic, matmul, weight
from src.model.spec import ExpertsSpec, ModelSpec
from src.parallel.mesh import Layout

# The logical axes of the experts' weights.
AXES = {
    "wi": ("expert", "expert_embed", None, "mlp"),
    "wo": ("expert", "mlp", "expert_embed"),
    "wi_bias": ("expert", None, "mlp"),
    "wo_bias": ("expert", None),
}


class Experts(nnx.Module):
    """E feed-forward layers of which a token goes through those its router scores highest (Shazeer et al. 2017)."""

    def __init__(self, spec: ExpertsSpec, emb_dim: int, out_scale: float, dtype: str, rngs: nnx.Rngs) -> None:
        self.spec = spec
        E, A, F = spec.count, len(spec.expert.activations), spec.expert.mlp_dim
        self.router = weight(rngs, (emb_dim, E), ("embed", None), dtype, fan_in=(0,))
        if spec.router_bias:
            self.router_bias = weight(rngs, (E,), (None,), dtype, constant=0.0, decays=False)
        if spec.correction_bias:
            self.correction_bias = Statistic(jnp.zeros(E), out_sharding=(None,), fan_in=(), decays=False)
        self.wi = weight(rngs, (E, emb_dim, A, F), AXES["wi"], dtype, fan_in=(1,))
        self.wo = weight(rngs, (E, F, emb_dim), AXES["wo"], dtype, fan_in=(1,), scale=out_scale)
        if spec.expert.bias:
            self.wi_bias = weight(rngs, (E, A, F), AXES["wi_bias"], dtype, constant=0.0, decays=False)
            self.wo_bias = weight(rngs, (E, emb_dim), AXES["wo_bias"], dtype, constant=0.0, decays=False)
        if spec.shared:
            self.shared = FeedForward(spec.shared, emb_dim, out_scale, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Report]:
        """[B, T, D] to [B, T, D], and what the router reports of this batch."""
        logits_BTE = self._logits(x_BTD)
        scores_BTE = router.scores(logits_BTE, self.spec)
        correction_E = self.correction_bias[...] if self.spec.correction_bias else None
        experts_BTk, weights_BTk = router.choose(scores_BTE, correction_E, self.spec)
        real_BT = context.segment_ids_BT > 0
        out_BTD, kept_BTk = self._run(x_BTD, experts_BTk, weights_BTk, real_BT, context.layout)
        out_BTD = context.scattered(out_BTD)
        if self.spec.shared:
            # It needs nothing of the others: a compiler may run it while tokens are on their way. XLA's for GPUs does
            # with its latency-hiding scheduler; libtpu does not yet (docs/log.md).
            out_BTD += self.shared(x_BTD, context)[0]
        report = router.report(logits_BTE, scores_BTE, experts_BTk, kept_BTk, real_BT, context.layout)
        return checkpoint_name(out_BTD, "mlpwo"), report

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """The router's, in float32: a choice between two close ones must not hang on rounding."""
        logits_BTE = matmul(x_BTD.astype(jnp.float32), self.router[...], "BTD,DE->BTE", precision="highest")
        if self.spec.router_bias:
            logits_BTE += self.router_bias[...].astype(jnp.float32)
        return logits_BTE

    def _run(
        self, x_BTD: jax.Array, experts_BTk: jax.Array, weights_BTk: jax.Array, real_BT: jax.Array, layout: Layout
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sum of what each token's experts make of it [B, T, D], and which choices have a place [B, T, k].

        Each device has its tokens, whole, and its part of the experts' weights, which it gathers along D.
        """
        kernels = {name: getattr(self, name)[...] for name in AXES if hasattr(self, name)}
        axes = {name: _by_leaf(kernels[name], AXES[name]) for name in kernels}
        platform = layout.mesh.devices.flat[0].platform
        capacity, kept_BTk = _capacity(self.spec, experts_BTk.shape[1]), jnp.ones(experts_BTk.shape, bool)
        if capacity and layout.shards("length") > 1:
            # Of what a row keeps a device may have any part: in buffers of a fixed size each would need room for all.
            capacity, kept_BTk = None, _kept_of_whole_rows(experts_BTk, real_BT, self.spec.count, capacity, layout)
        on_device = functools.partial(
            _on_device,
            spec=self.spec,
            capacity=capacity,
            axes=axes,
            gathered=layout.axes("expert_embed"),
            summed=layout.axes("mlp"),
            parts=layout.shards("mlp"),
            peers=Peers(layout.axes("expert"), layout.shards("expert"), layout.axes_within_slices(), platform),
        )
        tokens = layout.spec(("batch", "length", None))
        run = layout.shard_map(
            on_device,
            in_specs=(*[tokens] * 4, layout.spec(("batch", "length")), _specs(axes, layout)),
            out_specs=(tokens, tokens),
        )
        return run(x_BTD, experts_BTk, kept_BTk, weights_BTk, real_BT, kernels)


def _capacity(spec: ExpertsSpec, length: int) -> int | None:
    """The places that each expert has in a row of so many tokens; None: for all who come."""
    if spec.capacity_factor == -1:
        return None
    return math.ceil(length * spec.per_token * spec.capacity_factor / spec.count)


def _kept_of_whole_rows(
    experts_BTk: jax.Array, real_BT: jax.Array, experts: int, capacity: int, layout: Layout
) -> jax.Array:
    """Which choices have a place [B, T, k], where devices share rows: those of one device that has whole rows.

    A device gathers the choices of its rows, 4 k bytes per token, and sorts them all.
    """
    sharing, order = layout.axes("length"), even_order(experts_BTk.shape[1], layout)

    def kept(whole_BTk: jax.Array, whole_BT: jax.Array) -> jax.Array:
        kept_M = dispatch.take_places(whole_BTk, whole_BT, experts, capacity).kept_M()
        kept_BTk = kept_M.reshape(whole_BTk.shape)[:, order]
        own = len(order) // layout.size(sharing)
        return jax.lax.dynamic_slice_in_dim(kept_BTk, own * jax.lax.axis_index(sharing), own, axis=1)

    tokens, of_tokens = layout.spec(("batch", "length", None)), layout.spec(("batch", "length"))
    run = layout.shard_map(kept, (tokens, of_tokens), tokens)
    return run(whole_rows(experts_BTk, layout, None), whole_rows(real_BT, layout))


def _by_leaf(kernel: jax.Array | Adapted, axes: tuple[str | None, ...]) -> Any:
    """The logical axes of a weight of experts, or of its parts."""
    if isinstance(kernel, Adapted):
        return Adapted(axes, (*axes[:2], None), (axes[0], None, *axes[2:]))
    return axes


def _specs(axes: Any, layout: Layout) -> Any:
    return jax.tree.map(layout.spec, axes, is_leaf=lambda node: isinstance(node, tuple))


def _on_device(
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    kept_BTk: jax.Array,
    weights_BTk: jax.Array,
    real_BT: jax.Array,
    kernels: Any,
    *,
    spec: ExpertsSpec,
    capacity: int | None,
    axes: Any,
    gathered: tuple[str, ...],
    summed: tuple[str, ...],
    parts: int,
    peers: Peers,
) -> tuple[jax.Array, jax.Array]:
    """`Experts._run` of one device's tokens, with its parts of the weights.

    Args:
        x_BTD: the tokens.
        experts_BTk: the experts that each chose.
        kept_BTk: which of these choices may have a place; with `capacity` those beyond it lose theirs.
        weights_BTk: of the choices, in the sum.
        real_BT: which tokens are no padding.
        kernels: the parts of the weights.
        spec: what they are.
        capacity: the places that each expert has in each row; None: for all that are kept.
        axes: their logical axes.
        gathered: the mesh axes that shard D of the weights.
        summed: those that shard F.
        parts: into how many they cut it.
        peers: who has the other experts.

    Returns:
        The weighted sums [B, T, D], and which choices have a place [B, T, k].
    """

    def gather(axes: tuple[str | None, ...], kernel: jax.Array) -> jax.Array:
        kernel = kernel.astype(x_BTD.dtype)
        if not gathered or "expert_embed" not in axes:
            return kernel
        # Its gradient is a reduce-scatter; on TPUs of three dims, or it would be a whole sum.
        matrices = kernel.reshape(*kernel.shape[:2], -1)
        matrices = jax.lax.all_gather(matrices, gathered, axis=axes.index("expert_embed"), tiled=True)
        # Named, so that no policy keeps whole weights for the backward pass.
        return checkpoint_name(matrices, "gathered_experts").reshape(*matrices.shape[:2], *kernel.shape[2:-1], -1)

    def run(x_BTD: jax.Array, weights_BTk: jax.Array, kernels: Any) -> jax.Array:
        kernels = jax.tree.map(gather, axes, kernels, is_leaf=lambda node: isinstance(node, tuple))
        if spec.expert.bias:
            kernels["wo_bias"] /= parts  # each adds its part
        (B, T, D), E, k = x_BTD.shape, spec.count, spec.per_token
        x_XD = x_BTD.reshape(B * T, D)
        weights_Xk = weights_BTk.reshape(B * T, k).astype(x_XD.dtype)
        # Padding goes to no expert: it is all alike, and would go to the same ones.
        sent_BTk = jnp.where(real_BT[..., None] & kept_BTk, experts_BTk, E)
        tokens, experts_Xk = (x_XD, weights_Xk), sent_BTk.reshape(B * T, k)
        if spec.scale_inputs:  # as if each of a token's choices were a token
            tokens = (x_XD[:, None] * weights_Xk[..., None]).reshape(-1, D), None
            experts_Xk = experts_Xk.reshape(-1, 1)
        if places:
            out_XD = dispatch.with_capacity(tokens, places, kernels, functools.partial(_by_expert, spec), peers)
        else:
            feed = functools.partial(_sorted_rows, spec, peers.platform)
            out_XD = dispatch.dropless(tokens, experts_Xk, kernels, feed, peers)
        if spec.scale_inputs:
            out_XD = jnp.sum(out_XD.reshape(B * T, k, D), axis=1)
        return (jax.lax.psum(out_XD, summed) if summed else out_XD).reshape(B, T, D)

    places = None
    if capacity:
        places = dispatch.take_places(experts_BTk, real_BT, spec.count, capacity)
        kept_BTk = places.kept_M().reshape(experts_BTk.shape)
    policy = jax.checkpoint_policies.save_anything_except_these_names("gathered_experts")
    return jax.checkpoint(run, policy=policy)(x_BTD, weights_BTk, kernels), kept_BTk


def _sorted_rows(spec: ExpertsSpec, platform: str, rows: Rows, kernels: Any, rows_E: jax.Array) -> jax.Array:
    """What experts make of rows that are sorted by expert."""
    product = functools.partial(grouped_matmul, rows_G=rows_E, platform=platform)
    return _feed_forward(spec, rows, kernels, product, functools.partial(add_by_group, rows_G=rows_E))


def _by_expert(spec: ExpertsSpec, rows: Rows, kernels: Any) -> jax.Array:
    """What experts make of each its rows, [E, R, D]."""

    def add(x_ER: jax.Array, bias_E: jax.Array, factor_ER: jax.Array | None = None) -> jax.Array:
        bias_ER = bias_E[:, None].astype(x_ER.dtype)
        return x_ER + (bias_ER if factor_ER is None else bias_ER * factor_ER)

    return _feed_forward(spec, rows, kernels, batched_matmul, add)


def _feed_forward(spec: ExpertsSpec, rows: Rows, kernels: Any, product: Callable, add: Callable) -> jax.Array:
    """`FeedForward` with a weight for each expert, which `product` and `add` know to be whose."""
    x, weights = rows
    hidden = product(x, kernels["wi"])
    if spec.expert.bias:
        hidden = add(hidden, kernels["wi_bias"])
    hidden = activated(checkpoint_name(hidden, "mlpwi"), spec.expert)
    if weights is not None:  # before the last product, so that their gradient does not need what comes out of it
        hidden *= weights
    out = product(hidden, kernels["wo"])
    return add(out, kernels["wo_bias"], weights) if spec.expert.bias else out


def check_mesh(spec: ModelSpec, layout: Layout) -> None:
    """Raises UserError where the mesh shards experts and the model has none, or a number that does not divide."""
    if layout.shards("expert") == 1:
        return
    if not spec.has_experts:
        raise UserError(
            f"the mesh shards experts over {layout.sharded_by('expert')}, and this model has none (num_experts=1): set "
            "ici_expert_parallelism=1 and dcn_expert_parallelism=1; fsdp, context and tensor shard other weights"
        )
    for layer in spec.layers:
        if isinstance(layer.feed_forward, ExpertsSpec) and layer.feed_forward.count % layout.shards("expert"):
            raise UserError(
                f"num_experts={layer.feed_forward.count} is not divisible by {layout.sharded_by('expert')}: change it, "
                "or ici_expert_parallelism or dcn_expert_parallelism"
            )
