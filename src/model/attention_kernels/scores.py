"""Describes what attention kernels compute (ScoreSpec), and implements the plain kernel, which holds all scores."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.forward_context import ForwardContext
from src.model.spec import LayerSpec
from src.parallel.sequence import replicate_rows, zigzag_order

FLASH_BLOCK = 128  # smallest block of the TPU kernel, which needs whole blocks
CONTEXT = "context"  # `checkpoint_name`, for remat policies, of attention's output and a kernel's other residuals
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that a sequence of only padding gives numbers, not NaN


@dataclass(frozen=True)
class ScoreSpec:
    """Scores between queries and keys: causal within a segment, optionally limited to a window or chunk."""

    num_heads: int  # N
    head_dim: int  # H of queries and keys
    value_dim: int  # H of values
    scale: float  # multiplies q k
    window: int = 0  # keys that a query sees, including its own; 0: all
    chunk: int = 0  # positions per block; tokens attend within their block; 0: one block
    soft_cap: float = 0.0  # bounds scores by tanh; 0: no cap
    sink: bool = False  # whether each head has a logit without a value in its softmax


def score_spec(layer: LayerSpec, head_dim: int) -> ScoreSpec:
    """Builds the score settings of a layer whose heads have this size."""
    return ScoreSpec(
        num_heads=layer.num_query_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=1.0 / math.sqrt(layer.query_pre_attn_scalar),
        window=layer.sliding_window_size,
        chunk=layer.chunk_attn_window_size,
        soft_cap=layer.attn_logits_soft_cap,
        sink=layer.attention_sink,
    )


def dot_product(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Attends with q [B, T, N, H] to k, v [B, n S, K, H]; holds the scores [B, N, T, S] in float32."""
    B, T, N, _ = q_BTNH.shape
    n = context.layout.shards("length")

    def by_device(x: Array) -> Array:
        return x.reshape(B, n, -1, *x.shape[2:])

    mask_BntS = causal_mask(context, spec.window)
    q, k, v = by_device(q_BTNH), by_device(k_BSKH), by_device(v_BSKH)
    out_BntNH = masked_attention(q, k, v, mask_BntS, spec, sinks_N)
    return checkpoint_name(out_BntNH.reshape(B, T, N, -1), CONTEXT)


def causal_mask(context: ForwardContext, window: int) -> Array:
    """Mask, bool [B, n, t, S]: which of a sequence's S keys each of the t queries on each of n devices sees."""
    B, S = context.segment_ids_BT.shape
    n = context.layout.shards("length")
    segments_Bnt = context.segment_ids_BT.reshape(B, n, -1)
    segments_BnS = replicate_rows(context.segment_ids_BT, context.layout).reshape(B, n, S)
    index_nt = jnp.asarray(zigzag_order(S, context.layout).reshape(n, -1), jnp.int32)
    distance_ntS = index_nt[..., None] - jnp.arange(S)
    same_BntS = segments_Bnt[..., None] == segments_BnS[:, :, None]
    return same_BntS & (distance_ntS >= 0) & (distance_ntS < (window or S))


def masked_attention(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_BTS: Array, spec: ScoreSpec, sinks_N: Array | None
) -> Array:
    """Attends with T queries to the S keys where `mask_BTS` is true; B may be several dims.

    The head size of values may differ from the head size of keys. `sinks_N` are the heads' sink logits; None: no sinks.
    """
    *B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[-2]
    q_BTKGH = q_BTNH.reshape(*B, T, K, N // K, H)
    scores = jnp.einsum("...TKGH,...SKH->...KGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(mask_BTS[..., None, None, :, :], scores, MASKED)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, N // K, 1, 1)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks)
    largest = jax.lax.stop_gradient(largest)
    # Divide by the softmax's denominator last: the output [B, T, N, H] is smaller than the scores.
    unnormalised = jnp.exp(scores - largest)
    normaliser = jnp.sum(unnormalised, axis=-1, keepdims=True)
    if sinks is not None:
        normaliser += jnp.exp(sinks - largest)
    out_BTKGH = jnp.einsum("...KGTS,...SKH->...TKGH", unnormalised.astype(v_BSKH.dtype), v_BSKH)
    out_BTKGH /= jnp.moveaxis(normaliser, -2, -4)
    return out_BTKGH.astype(v_BSKH.dtype).reshape(*B, T, N, -1)
