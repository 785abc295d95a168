"""Grouped-query attention: projections, positions, and the call of a kernel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model.attention_kernels.choose import attend, for_queries, masked_attention
from src.model.cache import Cache, in_order, update, visible_BTS
from src.model.embeddings import rope
from src.model.forward_context import Context
from src.model.norm import Norm, root_mean_square
from src.model.params import matmul, weight
from src.model.spec import AttentionSpec, NormSpec


class Attention(nnx.Module):
    """Causal self-attention within a segment, N query heads reading K key/value heads (Ainslie et al. 2023)."""

    def __init__(
        self, spec: AttentionSpec, norm: NormSpec, emb_dim: int, out_scale: float, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.spec, self.epsilon = spec, norm.epsilon
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
        if spec.qk_norm == "head":
            self.query_norm = Norm(norm, (H,), dtype, rngs)
            self.key_norm = Norm(norm, (H,), dtype, rngs)
        elif spec.qk_norm == "all_heads":
            self.query_norm = Norm(norm, (N, H), dtype, rngs, ("heads", "head_dim"))
            self.key_norm = Norm(norm, (K, H), dtype, rngs, ("kv_heads", "head_dim"))
        if spec.sink:
            self.sinks = weight(rngs, (N,), ("heads",), dtype, constant=0.0, decays=False)

    def __call__(self, x_BTD: jax.Array, context: Context, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """[B, T, D] to [B, T, D], and the cache with these tokens, which training leaves None."""
        spec, constrain = self.spec, context.layout.constrain
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD)
        q_BTNH, k_BTKH = self._place(q_BTNH, k_BTKH, context.positions_BT)
        q_BTNH = checkpoint_name(constrain(q_BTNH, "batch", "length", "heads", "head_dim"), "query_proj")
        k_BTKH = checkpoint_name(constrain(k_BTKH, "batch", "length", "kv_heads", "head_dim"), "key_proj")
        v_BTKH = checkpoint_name(constrain(v_BTKH, "batch", "length", "kv_heads", "head_dim"), "value_proj")
        sinks_N = self.sinks[...] if spec.sink else None
        if cache is not None:
            cache = update(cache, {"key": k_BTKH, "value": v_BTKH}, context)
        if context.decoding:
            k_BSKH, v_BSKH = in_order(cache["key"]), in_order(cache["value"])
            mask_BTS = visible_BTS(spec, context.positions_BT, k_BSKH.shape[1])
            out_BTNH = masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, spec, sinks_N)
        else:
            k_BSKH, v_BSKH = (for_queries(x, spec.num_query_heads, context.layout) for x in (k_BTKH, v_BTKH))
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, spec, sinks_N, context)
        out_BTNH = checkpoint_name(out_BTNH, "context")
        out_BTD = context.scattered(matmul(out_BTNH, self.out[...], "BTNH,NHD->BTD"))
        if spec.bias:
            out_BTD += self.out_bias[...].astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "out_proj"), cache

    def _project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BTNH = matmul(x_BTD, self.query[...], "BTD,DNH->BTNH")
        k_BTKH = matmul(x_BTD, self.key[...], "BTD,DKH->BTKH")
        v_BTKH = matmul(x_BTD, self.value[...], "BTD,DKH->BTKH")
        if self.spec.bias:
            q_BTNH += self.query_bias[...].astype(x_BTD.dtype)
            k_BTKH += self.key_bias[...].astype(x_BTD.dtype)
            v_BTKH += self.value_bias[...].astype(x_BTD.dtype)
        return q_BTNH, k_BTKH, v_BTKH

    def _place(self, q_BTNH: jax.Array, k_BTKH: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys normalised, rotated to their positions, and the queries at their temperature."""
        spec = self.spec
        if spec.qk_norm in ("head", "all_heads"):
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if spec.rope:
            q_BTNH, k_BTKH = rope(q_BTNH, positions_BT, spec.rope), rope(k_BTKH, positions_BT, spec.rope)
        if spec.qk_norm == "l2":
            q_BTNH, k_BTKH = root_mean_square(q_BTNH, self.epsilon), root_mean_square(k_BTKH, self.epsilon)
        if spec.temperature_scale:
            # Llama 4's: attention spreads out over long texts, so queries grow with the position.
            floors_BT = jnp.floor((positions_BT + 1.0) / spec.temperature_floor)
            temperature_BT = 1.0 + spec.temperature_scale * jnp.log1p(floors_BT)
            q_BTNH = (q_BTNH * temperature_BT[:, :, None, None]).astype(q_BTNH.dtype)
        return q_BTNH, k_BTKH
