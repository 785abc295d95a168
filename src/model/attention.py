"""Grouped-query attention: projections, positions, and the call of a kernel.

All kernels compute the same function: a token attends to the tokens of its own segment up to and including itself,
within the layer's window or chunk, with weights softmax(scale q k). Scores may be capped, and a sink may take part of
the weight.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.attention_kernels.scores import ScoreSpec, dot_product, masked_attention, score_spec
from src.model.cache import Cache, CacheArray, cache_slots, decode_mask, update
from src.model.costs import Costs
from src.model.forward_context import ForwardContext
from src.model.norm import Norm, rms_normalise
from src.model.params import Rngs, matmul, weight
from src.model.rope import rope
from src.model.spec import LayerSpec
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import replicate_rows
from src.system.imports import named

# The function of each kernel. All but the plain one are imported on use: importing Pallas takes a second.
KERNELS: dict[str, Any] = {
    "dot_product": dot_product,
    "blocked": "src.model.attention_kernels.blocked:blocked",
    "flash": "src.model.attention_kernels.splash:splash",
    "cudnn_flash": "src.model.attention_kernels.cudnn:cudnn",
}


class Attention(nnx.Module):
    """Causal self-attention within a segment: N query heads read K key/value heads (Ainslie et al. 2023)."""

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs) -> None:
        self.spec, self.scores = spec, score_spec(spec, spec.head_dim)
        emb_dim, N, K, H = spec.emb_dim, spec.num_query_heads, spec.num_kv_heads, spec.head_dim
        project = functools.partial(weight, rngs, dtype=dtype, fan_in=(0,))
        vector = functools.partial(weight, rngs, dtype=dtype, constant=0.0, decays=False)
        self.query = project((emb_dim, N, H), ("embed", "heads", "head_dim"))
        self.key = project((emb_dim, K, H), ("embed", "kv_heads", "head_dim"))
        if not spec.share_kv_projections:
            self.value = project((emb_dim, K, H), ("embed", "kv_heads", "head_dim"))
        self.out = project((N, H, emb_dim), ("heads", "head_dim", "embed"), fan_in=(0, 1), scale=out_scale)
        if spec.attention_bias:
            self.query_bias = vector((N, H), ("heads", "head_dim"))
            self.key_bias = vector((K, H), ("kv_heads", "head_dim"))
        if spec.attention_bias and not spec.share_kv_projections:
            self.value_bias = vector((K, H), ("kv_heads", "head_dim"))
        if spec.attention_bias and spec.attention_out_bias:
            self.out_bias = vector((emb_dim,), (None,))
        if spec.qk_norm == "head":
            self.query_norm = Norm(spec, (H,), dtype, rngs)
            self.key_norm = Norm(spec, (H,), dtype, rngs)
        elif spec.qk_norm == "all_heads":
            self.query_norm = Norm(spec, (N, H), dtype, rngs, ("heads", "head_dim"))
            self.key_norm = Norm(spec, (K, H), dtype, rngs, ("kv_heads", "head_dim"))
        if spec.attention_gate:
            self.gate = project((emb_dim, N, H), ("embed", "heads", "head_dim"))
        if spec.query_dim_scale:
            self.query_dim_scale = vector((H,), ("head_dim",))
        if spec.attention_sink:
            self.sinks = vector((N,), ("heads",))

    @staticmethod
    def costs(spec: LayerSpec) -> Costs:
        """Declares attention's activations, the arrays that remat policies save, and its scores."""
        heads = (spec.num_query_heads, spec.num_kv_heads)
        saved_by: dict[str, tuple[str, ...]] = {name: (f"{name}_proj",) for name in ("query", "key", "value", "out")}
        if spec.share_kv_projections:  # one matmul, saved as key and as value
            saved_by["key"] += saved_by.pop("value")
        # The derivative of a norm needs its input, the matmul's output, but remat policies save the norm's output.
        if spec.qk_norm != "none":
            del saved_by["query"], saved_by["key"]
        if spec.value_norm:
            saved_by.pop("key" if spec.share_kv_projections else "value", None)
        width = sum(heads) * 2 * spec.head_dim  # queries and keys; values and attention's output
        if spec.attention_gate:
            width, saved_by["gate"] = width + 2 * heads[0] * spec.head_dim, ("query_proj",)
        return Costs(width, {"heads": heads}, saved_by, output_weight="out", scores=score_spec(spec, spec.head_dim))

    @staticmethod
    def cache_arrays(spec: LayerSpec, rows: int, length: int) -> dict[str, CacheArray]:
        """Declares the cached keys and values of `rows` sequences of up to `length` tokens: [rows, K, S, H] each."""
        slots = cache_slots(score_spec(spec, spec.head_dim), length)
        shape = (rows, spec.num_kv_heads, slots, spec.head_dim)
        return dict.fromkeys(("key", "value"), CacheArray(shape, ("batch", "kv_heads", None, "head_dim")))

    def __call__(self, x_BTD: Array, context: ForwardContext, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Maps [B, T, D] to [B, T, D]; also returns the updated cache (None without a cache)."""
        spec, constrain = self.spec, context.layout.constrain
        q_BTNH = matmul(x_BTD, self.query[...], "BTD,DNH->BTNH")
        k_BTKH = matmul(x_BTD, self.key[...], "BTD,DKH->BTKH")
        if spec.attention_bias:
            q_BTNH += self.query_bias[...].astype(x_BTD.dtype)
            k_BTKH += self.key_bias[...].astype(x_BTD.dtype)
        v_BTKH = self._values(x_BTD, k_BTKH)
        q_BTNH, k_BTKH = self._position(q_BTNH, k_BTKH, context.positions_BT)
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch", "length", "heads", "head_dim"), "query_proj")
        k_BTKH = checkpoint_name(constrain(k_BTKH, "batch", "length", "kv_heads", "head_dim"), "key_proj")
        v_BTKH = checkpoint_name(constrain(v_BTKH, "batch", "length", "kv_heads", "head_dim"), "value_proj")
        sinks_N = self.sinks[...] if spec.attention_sink else None
        if cache is not None:
            cache = update(cache, {"key": k_BTKH, "value": v_BTKH}, context)
        if cache and context.decoding:
            k_BSKH, v_BSKH = (jnp.swapaxes(cache[name], 1, 2) for name in ("key", "value"))
            mask_BTS = decode_mask(self.scores, context.positions_BT, k_BSKH.shape[1])
            out_BTNH = masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, self.scores, sinks_N)
        else:
            k_BSKH, v_BSKH = (repeat_kv(x, spec.num_query_heads, context.layout) for x in (k_BTKH, v_BTKH))
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, self.scores, sinks_N, context)
        if spec.attention_gate:
            gate_BTNH = matmul(x_BTD, self.gate[...], "BTD,DNH->BTNH")
            gate_BTNH = constrain(gate_BTNH, "batch", "length", "heads", "head_dim")
            out_BTNH *= jax.nn.sigmoid(checkpoint_name(gate_BTNH, "query_proj"))
        out_BTD = context.reduce_scatter_sequence(matmul(out_BTNH, self.out[...], "BTNH,NHD->BTD"))
        if spec.attention_bias and spec.attention_out_bias:
            out_BTD += self.out_bias[...].astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "out_proj"), cache

    def _values(self, x_BTD: Array, k_BTKH: Array) -> Array:
        v_BTKH = k_BTKH
        if not self.spec.share_kv_projections:
            v_BTKH = matmul(x_BTD, self.value[...], "BTD,DKH->BTKH")
            if self.spec.attention_bias:
                v_BTKH += self.value_bias[...].astype(x_BTD.dtype)
        return rms_normalise(v_BTKH, self.spec.normalization_layer_epsilon) if self.spec.value_norm else v_BTKH

    def _position(self, q_BTNH: Array, k_BTKH: Array, positions_BT: Array) -> tuple[Array, Array]:
        """Applies the norm of queries and keys (l2: after the rotation), the rotary positions and the query scales."""
        spec = self.spec
        if spec.qk_norm in ("head", "all_heads"):
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if spec.position_type == "rope":
            q_BTNH, k_BTKH = rope(q_BTNH, positions_BT, spec), rope(k_BTKH, positions_BT, spec)
        if spec.qk_norm == "l2":
            epsilon = spec.normalization_layer_epsilon
            q_BTNH, k_BTKH = rms_normalise(q_BTNH, epsilon), rms_normalise(k_BTKH, epsilon)
        if spec.query_dim_scale or spec.attn_temperature_scale:
            from src.model.query_scaling import scale_queries

            scale_H = self.query_dim_scale[...] if spec.query_dim_scale else None
            q_BTNH = scale_queries(q_BTNH, scale_H, positions_BT, spec)
        return q_BTNH, k_BTKH


def attend(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Runs the attention kernel `context.kernel`: q [B, T, N, H] on k, v [B, n S, K, H] to [B, T, N, H].

    Keys and values come from `replicate_rows`: all S = T tokens for each of the n devices that share a sequence.
    `sinks_N` are the heads' sink logits; None: no sinks.
    """
    if spec.chunk:
        # Chunks of positions are separated just like segments, so make each chunk of a segment a segment.
        blocks = -(-q_BTNH.shape[1] // spec.chunk) + 1
        segment_ids = context.segment_ids_BT * blocks + context.positions_BT // spec.chunk
        context = dataclasses.replace(context, segment_ids_BT=segment_ids, packed=True)
    kernel = named(KERNELS[context.kernel])
    out_BTNH = kernel(q_BTNH, k_BSKH, v_BSKH, spec, sinks_N, context)
    return context.layout.constrain(out_BTNH, "batch", "length", "heads", "head_dim")


def with_segment_lists(context: ForwardContext) -> ForwardContext:
    """Adds the segment lists that cuDNN's kernel needs, if it is used, so that layers do not each compute them."""
    if context.kernel != "cudnn_flash":
        return context
    from src.model.attention_kernels.cudnn import segment_lists

    return dataclasses.replace(context, segment_lists=segment_lists(context))


def repeat_kv(x_BTKH: Array, num_query_heads: int, layout: MeshLayout) -> Array:
    """Replicates keys or values [B, T, K, H] along the sequence, to [B, n T, ...] for its n shards.

    If key/value heads are not sharded like query heads, repeats them until a device has those that its queries read.
    With grouped heads, keys and values are small, and gathering them takes less time than computing the scores.
    """
    if layout.axes("kv_heads") != layout.axes("heads"):
        # On a device, `together` neighbouring query heads read the same key/value head.
        group = num_query_heads // x_BTKH.shape[2]
        together = math.gcd(group, num_query_heads // layout.shards("heads"))
        x_BTKH = jnp.repeat(x_BTKH, group // together, axis=2)
    return replicate_rows(x_BTKH, layout, "heads", "head_dim")
