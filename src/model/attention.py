"""Grouped-query attention: projections, positions, and the call of a kernel."""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model.context import Context
from src.model.embeddings import rope
from src.model.kernels import attend
from src.model.spec import AttentionSpec
from src.model.weights import matmul, weight


class Attention(nnx.Module):
    """Causal self-attention within a segment, N query heads reading K key/value heads (Ainslie et al. 2023)."""

    def __init__(self, spec: AttentionSpec, emb_dim: int, out_scale: float, dtype: str, rngs: nnx.Rngs) -> None:
        self.spec = spec
        N, K, H = spec.num_query_heads, spec.num_kv_heads, spec.head_dim
        self.query = weight(rngs, (emb_dim, N, H), ("embed", "heads", "head_dim"), dtype, fan_in=(0,))
        self.key = weight(rngs, (emb_dim, K, H), ("embed", "kv_heads", "head_dim"), dtype, fan_in=(0,))
        self.value = weight(rngs, (emb_dim, K, H), ("embed", "kv_heads", "head_dim"), dtype, fan_in=(0,))
        self.out = weight(rngs, (N, H, emb_dim), ("heads", "head_dim", "embed"), dtype, fan_in=(0, 1), scale=out_scale)
        if spec.bias:
            self.query_bias = weight(rngs, (N, H), ("heads", "head_dim"), dtype, constant=0.0, decays=False)
            self.key_bias = weight(rngs, (K, H), ("kv_heads", "head_dim"), dtype, constant=0.0, decays=False)
            self.value_bias = weight(rngs, (K, H), ("kv_heads", "head_dim"), dtype, constant=0.0, decays=False)
            self.out_bias = weight(rngs, (emb_dim,), (None,), dtype, constant=0.0, decays=False)

    def __call__(self, x_BTD: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """[B, T, D] to [B, T, D], and the cache, which training leaves None."""
        q_BTNH = matmul(x_BTD, self.query[...], "BTD,DNH->BTNH")
        k_BSKH = matmul(x_BTD, self.key[...], "BTD,DKH->BTKH")
        v_BSKH = matmul(x_BTD, self.value[...], "BTD,DKH->BTKH")
        if self.spec.bias:
            q_BTNH += self.query_bias[...].astype(x_BTD.dtype)
            k_BSKH += self.key_bias[...].astype(x_BTD.dtype)
            v_BSKH += self.value_bias[...].astype(x_BTD.dtype)
        if self.spec.rope_max_timescale is not None:
            q_BTNH = rope(q_BTNH, context.positions_BT, self.spec.rope_max_timescale)
            k_BSKH = rope(k_BSKH, context.positions_BT, self.spec.rope_max_timescale)
        constrain = context.layout.constrain
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch", "length", "heads", "head_dim"), "query_proj")
        k_BSKH = checkpoint_name(constrain(k_BSKH, "batch", "length", "kv_heads", "head_dim"), "key_proj")
        v_BSKH = checkpoint_name(constrain(v_BSKH, "batch", "length", "kv_heads", "head_dim"), "value_proj")
        out_BTNH = checkpoint_name(attend(q_BTNH, k_BSKH, v_BSKH, context), "context")
        out_BTD = matmul(out_BTNH, self.out[...], "BTNH,NHD->BTD")
        if self.spec.bias:
            out_BTD += self.out_bias[...].astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "out_proj"), cache
