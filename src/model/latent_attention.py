"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values come from one latent."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.config.schema import LOGICAL_AXES
from src.model.attention import attend
from src.model.attention_kernels.scores import ScoreSpec, masked_attention, score_spec
from src.model.cache import Cache, CacheArray, cache_slots, decode_mask, update
from src.model.costs import Costs
from src.model.forward_context import ForwardContext
from src.model.norm import Norm
from src.model.params import Rngs, matmul, weight
from src.model.rope import rope
from src.model.rope_stretching import yarn_size
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import replicate_rows


class LatentAttention(nnx.Module):
    """Causal self-attention within a segment, where N heads expand one latent of R numbers per token.

    A head has a part without positions and a rotary part, whose key all heads share. The cache holds the latent and
    that key. Decoding never expands the cached latents, but applies the expansion to the query and the output (section
    2.1.2 of the paper).
    """

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs) -> None:
        self.spec, self.scores = spec, _scores(spec)
        emb_dim, N, H, Q, R = spec.emb_dim, spec.num_query_heads, _head_dim(spec), spec.q_lora_rank, spec.kv_lora_rank
        if Q:
            self.query_down = weight(rngs, (emb_dim, Q), ("embed", None), dtype, fan_in=(0,))
            self.query_down_norm = Norm(spec, (Q,), dtype, rngs, epsilon=spec.latent_norm_epsilon)
        query_axes = ("latent" if Q else "embed", "heads", "head_dim")
        self.query = weight(rngs, (Q or emb_dim, N, H), query_axes, dtype, fan_in=(0,))
        self.kv_down = weight(rngs, (emb_dim, R + spec.qk_rope_head_dim), ("embed", None), dtype, fan_in=(0,))
        self.kv_down_norm = Norm(spec, (R,), dtype, rngs, epsilon=spec.latent_norm_epsilon)
        expanded = spec.qk_nope_head_dim + spec.v_head_dim
        self.kv_up = weight(rngs, (R, N, expanded), ("latent", "heads", "head_dim"), dtype, fan_in=(0,))
        out_axes = ("heads", "head_dim", "embed")
        self.out = weight(rngs, (N, spec.v_head_dim, emb_dim), out_axes, dtype, fan_in=(0, 1), scale=out_scale)

    @staticmethod
    def costs(spec: LayerSpec) -> Costs:
        """Declares latent attention's activations, the arrays that remat policies save, and its scores."""
        heads = (spec.num_query_heads, spec.num_query_heads)
        saved_by = {"query": ("query_proj",), "kv_up": ("key_proj", "value_proj"), "out": ("out_proj",)}
        width = sum(heads) * (_head_dim(spec) + spec.v_head_dim)  # queries and keys; values and attention's output
        return Costs(width, {"heads": heads}, saved_by, output_weight="out", scores=_scores(spec))

    @staticmethod
    def cache_arrays(spec: LayerSpec, rows: int, length: int) -> dict[str, CacheArray]:
        """Declares the cached latents and rotary keys, side by side, of `rows` sequences of up to `length` tokens."""
        shape = (rows, 1, cache_slots(_scores(spec), length), spec.kv_lora_rank + spec.qk_rope_head_dim)
        return {"latent": CacheArray(shape, ("batch", None, None, None))}

    def __call__(self, x_BTD: Array, context: ForwardContext, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Maps [B, T, D] to [B, T, D]; also returns the updated cache (None without a cache)."""
        constrain = context.layout.constrain
        query_BTQ, query = x_BTD, self.query[...]
        if self.spec.q_lora_rank:
            query_BTQ = self.query_down_norm(matmul(x_BTD, self.query_down[...], "BTD,DQ->BTQ"))
            query = _whole(query, x_BTD.dtype, context.layout)
        q_BTNH = matmul(query_BTQ, query, "BTQ,QNH->BTNH")
        nope_BTNH, rope_BTNH = jnp.split(q_BTNH, [self.spec.qk_nope_head_dim], axis=-1)
        rope_BTNH = self._rotate(rope_BTNH, context)
        down_BT1R = matmul(x_BTD, self.kv_down[...], "BTD,DR->BTR")[:, :, None]
        latent_BT1R, shared_BT1H = jnp.split(down_BT1R, [self.spec.kv_lora_rank], axis=-1)
        # The latent, normalised, and the rotary key that all heads share.
        latent_BT1R, shared_BT1H = self.kv_down_norm(latent_BT1R), self._rotate(shared_BT1H, context)
        if cache is not None:
            cache = update(cache, {"latent": jnp.concatenate([latent_BT1R, shared_BT1H], axis=-1)}, context)
        if cache and context.decoding:
            out_BTNH = self._attend_latents(nope_BTNH, rope_BTNH, jnp.swapaxes(cache["latent"], 1, 2), context)
        else:
            q_BTNH = constrain(jnp.concatenate([nope_BTNH, rope_BTNH], axis=-1), "batch", "length", "heads", "head_dim")
            k_BSNH, v_BSNH = self._expand(latent_BT1R, shared_BT1H, context)
            out_BTNH = attend(checkpoint_name(q_BTNH, "query_proj"), k_BSNH, v_BSNH, self.scores, None, context)
        out_BTD = context.reduce_scatter_sequence(matmul(out_BTNH, self.out[...], "BTNH,NHD->BTD"))
        return checkpoint_name(out_BTD, "out_proj"), cache

    def _rotate(self, x_BTNH: Array, context: ForwardContext) -> Array:
        return rope(x_BTNH, context.positions_BT, self.spec) if self.spec.position_type == "rope" else x_BTNH

    def _expand(self, latent_BT1R: Array, shared_BT1H: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Expands the latent to keys and values of every head, each [B, n S, N, H] for n shards of a sequence.

        If sequences are sharded, each device gathers the latent and expands complete sequences: that takes less time
        than gathering the expanded shards (docs/log.md). Remat policies then save the latent instead of keys and
        values.
        """
        layout = context.layout
        rows_shared = layout.shards("length") > 1
        if rows_shared:
            latent_BT1R = replicate_rows(checkpoint_name(latent_BT1R, "value_proj"), layout, None, None)
            shared_BT1H = replicate_rows(checkpoint_name(shared_BT1H, "key_proj"), layout, None, None)
        latent_BTR, kv_up = latent_BT1R[:, :, 0], _whole(self.kv_up[...], latent_BT1R.dtype, layout)
        expanded_BSNH = matmul(latent_BTR, kv_up, "BTR,RNH->BTNH")
        nope_BSNH, v_BSNH = jnp.split(expanded_BSNH, [self.spec.qk_nope_head_dim], axis=-1)
        shared_BSNH = jnp.broadcast_to(shared_BT1H, (*nope_BSNH.shape[:-1], shared_BT1H.shape[-1]))
        k_BSNH = jnp.concatenate([nope_BSNH, shared_BSNH], axis=-1)
        k_BSNH, v_BSNH = (layout.constrain(x, "batch", "length", "heads", "head_dim") for x in (k_BSNH, v_BSNH))
        if rows_shared:
            return k_BSNH, v_BSNH
        return checkpoint_name(k_BSNH, "key_proj"), checkpoint_name(v_BSNH, "value_proj")

    def _attend_latents(self, nope_BTNH: Array, rope_BTNH: Array, cache_BS1R: Array, context: ForwardContext) -> Array:
        """Attends to cached latents, which act as one head's keys and, without their rotary part, as its values."""
        R, nope_dim = self.spec.kv_lora_rank, self.spec.qk_nope_head_dim
        kv_up = self.kv_up[...]
        q_BTNR = jnp.concatenate([matmul(nope_BTNH, kv_up[..., :nope_dim], "BTNH,RNH->BTNR"), rope_BTNH], axis=-1)
        mask_BTS = decode_mask(self.scores, context.positions_BT, cache_BS1R.shape[1])
        out_BTNR = masked_attention(q_BTNR, cache_BS1R, cache_BS1R[..., :R], mask_BTS, self.scores, None)
        return matmul(out_BTNR, kv_up[..., nope_dim:], "BTNR,RNH->BTNH")


def _whole(kernel: Any, dtype: jnp.dtype, layout: MeshLayout) -> Any:
    """Gathers the rows of an up-projection, unless it is adapted or quantized.

    XLA on TPUs would multiply by each shard's few rows in turn (docs/log.md).
    """
    return layout.constrain(kernel.astype(dtype), None, "heads", "head_dim") if isinstance(kernel, Array) else kernel


def undivided_latents(layout: MeshLayout, spec: ModelSpec) -> list[str]:
    """Describes each latent size that is not divisible by the mesh axes of the default rule."""
    latents = [layer for layer in dict.fromkeys(spec.layers) if layer.attention_type == "mla"]
    sizes = sorted({size for layer in latents for size in (layer.q_lora_rank, layer.kv_lora_rank) if size})
    by_default = dataclasses.replace(layout, rules={**layout.rules, "latent": LOGICAL_AXES["latent"][0]})
    return [problem for _, problem in by_default.indivisible(sizes, ["latent"] * len(sizes))]


def place_latents(layout: MeshLayout, spec: ModelSpec) -> MeshLayout:
    """Leaves latents unsharded if the default rule's mesh axes do not divide a latent size.

    A rule that the user set is kept: it fails in `MeshLayout.check`.
    """
    if layout.rules["latent"] == LOGICAL_AXES["latent"][0] and undivided_latents(layout, spec):
        return dataclasses.replace(layout, rules={**layout.rules, "latent": ()})
    return layout


def _head_dim(spec: LayerSpec) -> int:
    return spec.qk_nope_head_dim + spec.qk_rope_head_dim


def _scores(spec: LayerSpec) -> ScoreSpec:
    scores = dataclasses.replace(score_spec(spec, _head_dim(spec)), value_dim=spec.v_head_dim)
    if spec.position_type == "rope" and spec.rope_type == "yarn" and spec.mscale_all_dim:
        # DeepSeek: mscale_all_dim scales the whole score here; `stretch` scales the rotated part by mscale /
        # mscale_all_dim.
        return dataclasses.replace(scores, scale=scores.scale * yarn_size(spec, spec.mscale_all_dim) ** 2)
    return scores
