"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values come from one latent."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model.cache import Cache, in_order, update, visible_BTS
from src.model.context import Context
from src.model.embeddings import rope
from src.model.kernels import attend, masked_attention
from src.model.norms import Norm
from src.model.spec import AttentionSpec, NormSpec
from src.model.weights import matmul, weight


class LatentAttention(nnx.Module):
    """Causal self-attention within a segment whose N heads expand one latent of R numbers a token.

    A head is a part without positions and a rotary part, whose key all heads share. The cache holds the latent and
    that key, and a token that reads it never expands it: the expansion moves over to its query and to its result
    (section 2.1.2 of the paper).
    """

    def __init__(
        self, spec: AttentionSpec, norm: NormSpec, emb_dim: int, out_scale: float, dtype: str, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        sizes = spec.latent
        N, H, Q, R = spec.num_query_heads, spec.head_dim, sizes.query_rank, sizes.kv_rank
        if Q:
            self.query_down = weight(rngs, (emb_dim, Q), ("embed", None), dtype, fan_in=(0,))
            self.query_down_norm = Norm(norm, (Q,), dtype, rngs)
        query_axes = ("latent" if Q else "embed", "heads", "head_dim")
        self.query = weight(rngs, (Q or emb_dim, N, H), query_axes, dtype, fan_in=(0,))
        self.kv_down = weight(rngs, (emb_dim, R + sizes.rope_dim), ("embed", None), dtype, fan_in=(0,))
        self.kv_down_norm = Norm(norm, (R,), dtype, rngs)
        expanded = sizes.nope_dim + sizes.value_dim
        self.kv_up = weight(rngs, (R, N, expanded), ("latent", "heads", "head_dim"), dtype, fan_in=(0,))
        out_axes = ("heads", "head_dim", "embed")
        self.out = weight(rngs, (N, sizes.value_dim, emb_dim), out_axes, dtype, fan_in=(0, 1), scale=out_scale)

    def __call__(self, x_BTD: jax.Array, context: Context, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """[B, T, D] to [B, T, D], and the cache with these tokens, which training leaves None."""
        constrain = context.layout.constrain
        query_BTQ = x_BTD
        if self.spec.latent.query_rank:
            query_BTQ = self.query_down_norm(matmul(x_BTD, self.query_down[...], "BTD,DQ->BTQ"))
        q_BTNH = matmul(query_BTQ, self.query[...], "BTQ,QNH->BTNH")
        nope_BTNH, rope_BTNH = jnp.split(q_BTNH, [self.spec.latent.nope_dim], axis=-1)
        rope_BTNH = self._rotated(rope_BTNH, context)
        latent_BT1R, shared_BT1H = self._compressed(x_BTD, context)
        if cache is not None:
            cache = update(cache, {"latent": jnp.concatenate([latent_BT1R, shared_BT1H], axis=-1)}, context)
        if context.decoding:
            out_BTNH = self._attend_to_latents(nope_BTNH, rope_BTNH, in_order(cache["latent"]), context)
        else:
            q_BTNH = constrain(jnp.concatenate([nope_BTNH, rope_BTNH], axis=-1), "batch", "length", "heads", "head_dim")
            k_BTNH, v_BTNH = self._expanded(latent_BT1R, shared_BT1H)
            k_BTNH = constrain(k_BTNH, "batch", "length", "heads", "head_dim")
            v_BTNH = constrain(v_BTNH, "batch", "length", "heads", "head_dim")
            out_BTNH = attend(
                checkpoint_name(q_BTNH, "query_proj"),
                checkpoint_name(k_BTNH, "key_proj"),
                checkpoint_name(v_BTNH, "value_proj"),
                self.spec,
                None,
                context,
            )
        out_BTNH = checkpoint_name(out_BTNH, "context")
        out_BTD = context.scattered(matmul(out_BTNH, self.out[...], "BTNH,NHD->BTD"))
        return checkpoint_name(out_BTD, "out_proj"), cache

    def _rotated(self, x_BTNH: jax.Array, context: Context) -> jax.Array:
        return rope(x_BTNH, context.positions_BT, self.spec.rope) if self.spec.rope else x_BTNH

    def _compressed(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """The normalised latent [B, T, 1, R] and the rotary key that all heads share, [B, T, 1, H]."""
        down_BT1R = matmul(x_BTD, self.kv_down[...], "BTD,DR->BTR")[:, :, None]
        latent_BT1R, shared_BT1H = jnp.split(down_BT1R, [self.spec.latent.kv_rank], axis=-1)
        return self.kv_down_norm(latent_BT1R), self._rotated(shared_BT1H, context)

    def _expanded(self, latent_BT1R: jax.Array, shared_BT1H: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of every head, [B, T, N, H] each."""
        expanded_BTNH = matmul(latent_BT1R[:, :, 0], self.kv_up[...], "BTR,RNH->BTNH")
        nope_BTNH, v_BTNH = jnp.split(expanded_BTNH, [self.spec.latent.nope_dim], axis=-1)
        shared_BTNH = jnp.broadcast_to(shared_BT1H, (*nope_BTNH.shape[:-1], shared_BT1H.shape[-1]))
        return jnp.concatenate([nope_BTNH, shared_BTNH], axis=-1), v_BTNH

    def _attend_to_latents(
        self, nope_BTNH: jax.Array, rope_BTNH: jax.Array, cache_BS1R: jax.Array, context: Context
    ) -> jax.Array:
        """Attention on cached latents, which serve as one head's keys and, without their rotary part, its values."""
        R, nope_dim = self.spec.latent.kv_rank, self.spec.latent.nope_dim
        kv_up = self.kv_up[...]
        q_BTNR = jnp.concatenate([matmul(nope_BTNH, kv_up[..., :nope_dim], "BTNH,RNH->BTNR"), rope_BTNH], axis=-1)
        mask_BTS = visible_BTS(self.spec, context.positions_BT, cache_BS1R.shape[1])
        seen_BTNR = masked_attention(q_BTNR, cache_BS1R, cache_BS1R[..., :R], mask_BTS, self.spec, None)
        return matmul(seen_BTNR, kv_up[..., nope_dim:], "BTNR,RNH->BTNH")
