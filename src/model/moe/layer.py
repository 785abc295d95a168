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
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.costs import Costs
from src.model.feed_forward import FeedForward, activated
from src.model.forward_context import ForwardContext
from src.model.lora import Adapted
from src.model.low_precision import QTensor
from src.model.moe import dispatch, router
from src.model.moe.dispatch import CapacitySlots, ExpertGroup, Rows
from src.model.moe.grouped_matmul import GroupedCodes, add_by_group, batched_matmul, encoded, grouped_matmul
from src.model.moe.router import Report
from src.model.params import Buffer, Rngs, matmul, weight
from src.model.quantization import Quantized
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import replicate_rows, zigzag_order
from src.system.errors import Unsupported

# Logical axes of the expert weights; for wi and its bias, of each factor separately.
AXES = {
    "wi": ("expert", "expert_embed", "mlp"),
    "wo": ("expert", "mlp", "expert_embed"),
    "wi_bias": ("expert", "mlp"),
    "wo_bias": ("expert", None),
}


class Experts(nnx.Module):
    """E feed-forward layers, of which each token uses the k that its router chooses (Shazeer et al. 2017)."""

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs) -> None:
        self.spec = spec
        emb_dim, E, A, F = spec.emb_dim, spec.num_experts, len(spec.mlp_activations), spec.moe_mlp_dim
        self.router = weight(rngs, (emb_dim, E), ("embed", None), dtype, fan_in=(0,))
        if spec.router_bias:
            self.router_bias = weight(rngs, (E,), (None,), dtype, constant=0.0, decays=False)
        if spec.routed_bias:
            self.correction_bias = Buffer(jnp.zeros(E), out_sharding=(None,), fan_in=(), decays=False)
        self.wi = weight(rngs, (E, emb_dim, A, F), ("expert", "expert_embed", None, "mlp"), dtype, fan_in=(1,))
        self.wo = weight(rngs, (E, F, emb_dim), AXES["wo"], dtype, fan_in=(1,), scale=out_scale)
        if spec.mlp_bias:
            self.wi_bias = weight(rngs, (E, A, F), ("expert", None, "mlp"), dtype, constant=0.0, decays=False)
            self.wo_bias = weight(rngs, (E, emb_dim), AXES["wo_bias"], dtype, constant=0.0, decays=False)
        if spec.shared_experts:
            self.shared = FeedForward(spec, out_scale, dtype, rngs, spec.shared_experts * F)
        if spec.shared_expert_gate:
            self.shared_gate = weight(rngs, (emb_dim, 1), ("embed", None), dtype, fan_in=(0,))

    @staticmethod
    def costs(spec: LayerSpec) -> Costs:
        """Declares the activations of the experts that a token uses, including shared ones, and the saved arrays."""
        expert = FeedForward.costs(spec, spec.moe_mlp_dim)
        width = (spec.num_experts_per_tok + spec.shared_experts) * expert.activation_size
        return expert._replace(activation_size=width, active=spec.num_experts_per_tok / spec.num_experts)

    def __call__(self, x_BTD: Array, context: ForwardContext) -> tuple[Array, Report]:
        """Maps [B, T, D] to [B, T, D]; also returns the router's `report` on this batch."""
        with jax.named_scope("router"):
            logits_BTE = self._logits(x_BTD)
            scores_BTE = router.SCORE_FUNCTIONS[self.spec.routed_score_func](logits_BTE)
            correction_E = self.correction_bias[...] if self.spec.routed_bias else None
            experts_BTk, weights_BTk = router.choose(scores_BTE, correction_E, self.spec)
        non_padding_BT = context.segment_ids_BT > 0
        out_BTD, kept_BTk = self._run(x_BTD, experts_BTk, weights_BTk, non_padding_BT, context.layout)
        out_BTD = context.reduce_scatter_sequence(out_BTD)
        if self.spec.shared_experts:
            # The shared expert is independent of the others, so a compiler may run it while tokens are exchanged. XLA's
            # GPU compiler does so with its latency-hiding scheduler; libtpu does not yet (docs/log.md).
            gate_BT1 = None
            if self.spec.shared_expert_gate:
                gate_BT1 = jax.nn.sigmoid(matmul(x_BTD, self.shared_gate[...], "BTD,DO->BTO"))
            out_BTD += self.shared(x_BTD, context, gate_BT1)[0]
        with jax.named_scope("router"):
            report = router.report(logits_BTE, scores_BTE, experts_BTk, kept_BTk, non_padding_BT, context.layout)
        return checkpoint_name(out_BTD, "mlpwo"), report

    def _logits(self, x_BTD: Array) -> Array:
        """Computes the router's logits in float32: a choice between two close logits must not depend on rounding."""
        logits_BTE = matmul(x_BTD.astype(jnp.float32), self.router[...], "BTD,DE->BTE", precision="highest")
        return logits_BTE + self.router_bias[...].astype(jnp.float32) if self.spec.router_bias else logits_BTE

    def _run(
        self, x_BTD: Array, experts_BTk: Array, weights_BTk: Array, non_padding_BT: Array, layout: MeshLayout
    ) -> tuple[Array, Array]:
        """Runs the experts: weighted sums of their outputs [B, T, D], and which choices have a slot [B, T, k].

        A device holds its tokens with all of D, and shards of the experts' weights, which it gathers along D.
        """
        kernels, axes = self._kernels(x_BTD.dtype)
        spec, (_, T, k), kept_BTk, capacity = self.spec, experts_BTk.shape, jnp.ones(experts_BTk.shape, bool), 0
        if spec.capacity_factor != -1:
            capacity = math.ceil(T * k * spec.capacity_factor / spec.num_experts)
        if capacity and layout.shards("length") > 1:
            # All choices kept in a sequence may be on one device, so buffers of fixed size would need room for all.
            kept_BTk = _kept_in_rows(experts_BTk, non_padding_BT, spec.num_experts, capacity, layout)
            capacity = 0
        axis = layout.axes("expert")
        group = ExpertGroup(axis, layout.size(axis), layout.axes_within_slices, layout.platform)
        gathered, summed, parts = layout.axes("expert_embed"), layout.axes("mlp"), layout.shards("mlp")

        def on_device(
            x_BTD: Array, experts_BTk: Array, kept_BTk: Array, weights_BTk: Array, non_padding_BT: Array, kernels: Any
        ) -> tuple[Array, Array]:
            slots = None
            if capacity:
                slots = dispatch.assign_slots(experts_BTk, non_padding_BT, spec.num_experts, capacity)
                kept_BTk = slots.kept_M().reshape(experts_BTk.shape)
            kernels = jax.tree.map(functools.partial(_gather, over=gathered), axes, kernels, is_leaf=_is_axes)
            if spec.mlp_bias:
                kernels["wo_bias"] /= parts  # `psum` adds it once per shard
            x_XD = x_BTD.reshape(-1, x_BTD.shape[2])
            tokens = x_XD, weights_BTk.reshape(-1, k).astype(x_XD.dtype)
            # Padding goes to no expert: all padding is alike and would go to the same experts.
            sent_BTk = jnp.where(non_padding_BT[..., None] & kept_BTk, experts_BTk, spec.num_experts)
            out_XD = _run_experts(spec, tokens, sent_BTk.reshape(-1, k), slots, kernels, group)
            return (jax.lax.psum(out_XD, summed) if summed else out_XD).reshape(x_BTD.shape), kept_BTk

        tokens, of_tokens = layout.spec(("batch", "length", None)), layout.spec(("batch", "length"))
        kernel_specs = jax.tree.map(layout.spec, axes, is_leaf=_is_axes)
        mapped = layout.shard_map(on_device, (*[tokens] * 4, of_tokens, kernel_specs), (tokens, tokens))
        return mapped(x_BTD, experts_BTk, kept_BTk, weights_BTk, non_padding_BT, kernels)

    def _kernels(self, dtype: Any) -> tuple[Any, Any]:
        """Prepares the weights for matmuls, in this dtype, with their logical axes in the same nesting.

        A TPU's compiler would copy an array with a dim of two factors to another memory layout for each kernel, and
        likewise a weight that is gathered along its last dim. Each factor is therefore a separate array, and wo is
        transposed while it is still sharded.
        """

        def multiplied(weight: Array | Quantized) -> Array | GroupedCodes:
            return encoded(weight, dtype) if isinstance(weight, Quantized) else weight.astype(dtype)

        weights = {name: getattr(self, name)[...] for name in AXES if hasattr(self, name)}
        weights = jax.tree.map(multiplied, weights, is_leaf=_is_quantized)
        for name in weights.keys() & {"wi", "wi_bias"}:
            weights[name] = [weights[name][..., factor, :] for factor in range(len(self.spec.mlp_activations))]
        axes = {name: _by_leaf(kernel, AXES[name]) for name, kernel in weights.items()}
        weights["wo"] = jax.tree.map(lambda x: x.swapaxes(1, 2), weights["wo"])
        axes["wo"] = jax.tree.map(lambda each: (each[0], each[2], each[1]), axes["wo"], is_leaf=_is_axes)
        return weights, axes


def _kept_in_rows(experts_BTk: Array, non_padding_BT: Array, experts: int, capacity: int, layout: MeshLayout) -> Array:
    """Mask [B, T, k] of the choices that have a slot, for sharded sequences: the same as on one device.

    A device gathers the choices of its sequences, 4 k bytes per token, and sorts them all.
    """
    sharing, order = layout.axes("length"), zigzag_order(experts_BTk.shape[1], layout)

    def kept(row_BTk: Array, row_BT: Array) -> Array:
        kept_M = dispatch.assign_slots(row_BTk, row_BT, experts, capacity).kept_M()
        kept_BTk = kept_M.reshape(row_BTk.shape)[:, order]
        size = len(order) // layout.size(sharing)
        return jax.lax.dynamic_slice_in_dim(kept_BTk, size * jax.lax.axis_index(sharing), size, axis=1)

    tokens, of_tokens = layout.spec(("batch", "length", None)), layout.spec(("batch", "length"))
    run = layout.shard_map(kept, (tokens, of_tokens), tokens)
    return run(replicate_rows(experts_BTk, layout, None), replicate_rows(non_padding_BT, layout))


def _by_leaf(kernel: Any, axes: tuple[str | None, ...]) -> Any:
    """Logical axes for each array of an expert weight, which may be split, quantized or adapted; same nesting."""
    if isinstance(kernel, list):
        return [_by_leaf(each, axes) for each in kernel]
    if isinstance(kernel, Adapted):  # a rank of 1 must not be taken for a scale
        return Adapted(_by_leaf(kernel.base, axes), (*axes[:2], None), (axes[0], None, axes[2]))
    # Scales have dims of size 1, which cannot be sharded.
    return jax.tree.map(lambda x: tuple(axes[dim] if size > 1 else None for dim, size in enumerate(x.shape)), kernel)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and not isinstance(node, QTensor)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _gather(axes: tuple[str | None, ...], kernel: Array, over: tuple[str, ...]) -> Array:
    if not over or "expert_embed" not in axes:
        return kernel
    # The gradient is a reduce-scatter; on TPUs only for arrays of three dims, otherwise a larger all-reduce.
    whole = jax.lax.all_gather(kernel, over, axis=axes.index("expert_embed"), tiled=True)
    return checkpoint_name(whole, "gathered_experts")  # named so that no policy saves it for the backward pass


def _run_experts(
    spec: LayerSpec, tokens: Rows, experts_Xk: Array, slots: CapacitySlots | None, kernels: Any, group: ExpertGroup
) -> Array:
    """Weighted sums [X, D] of the expert outputs of a device's tokens; without `slots`, no choice is dropped here."""
    x_XD, weights_Xk = tokens
    if spec.scale_expert_inputs and weights_Xk is not None:  # treat each of a token's choices as a separate token
        tokens = (x_XD[:, None] * weights_Xk[..., None]).reshape(-1, x_XD.shape[1]), None
        experts_Xk = experts_Xk.reshape(-1, 1)
    if slots:
        out_XD = dispatch.with_capacity(tokens, slots, kernels, functools.partial(_by_expert, spec), group)
    else:
        feed = functools.partial(_sorted_rows, spec, group.platform)
        out_XD = dispatch.dropless(tokens, experts_Xk, kernels, feed, group)
    return jnp.sum(out_XD.reshape(len(x_XD), -1, x_XD.shape[1]), axis=1) if spec.scale_expert_inputs else out_XD


def _sorted_rows(spec: LayerSpec, platform: str, rows: Rows, kernels: Any, rows_E: Array) -> Array:
    product = functools.partial(grouped_matmul, rows_G=rows_E, platform=platform)
    return _feed_forward(spec, rows, kernels, product, functools.partial(add_by_group, rows_G=rows_E))


def _by_expert(spec: LayerSpec, rows: Rows, kernels: Any) -> Array:
    def add(x_ER: Array, bias_E: Array, factor_ER: Array | None = None) -> Array:
        bias_ER = bias_E[:, None].astype(x_ER.dtype)
        return x_ER + (bias_ER if factor_ER is None else bias_ER * factor_ER)

    return _feed_forward(spec, rows, kernels, batched_matmul, add)


@jax.named_scope("experts")
def _feed_forward(spec: LayerSpec, rows: Rows, kernels: Any, product: Callable, add: Callable) -> Array:
    """Computes `FeedForward` with each expert's weights; `product` and `add` know each row's expert."""
    x, weights = rows
    factors = [product(x, kernel) for kernel in kernels["wi"]]
    if spec.mlp_bias:
        factors = list(map(add, factors, kernels["wi_bias"]))
    hidden = activated(factors, spec)
    if weights is not None:  # before the last matmul, so that the weights' gradient does not need its output
        hidden *= weights
    out = product(hidden, kernels["wo"], transposed=True)
    return add(out, kernels["wo_bias"], weights) if spec.mlp_bias else out


def check_mesh(spec: ModelSpec, layout: MeshLayout) -> None:
    """Raises Unsupported if the mesh shards experts, but does not divide their number, or the model has none."""
    shards, by = layout.shards("expert"), layout.sharded_by("expert")
    if shards > 1 and not spec.has_experts:
        raise Unsupported(
            f"the mesh shards experts over {by}, but this model has no experts (num_experts=1): set "
            "ici_expert_parallelism=1 and dcn_expert_parallelism=1; fsdp, context and tensor shard other weights"
        )
    for layer in spec.layers:
        if layer.num_experts > 1 and layer.num_experts % shards:
            raise Unsupported(
                f"num_experts={layer.num_experts} is not divisible by {by}: change it, or ici_expert_parallelism or "
                "dcn_expert_parallelism"
            )
