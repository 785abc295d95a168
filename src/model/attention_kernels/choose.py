"""Attention kernels: one plain JAX, one for NVIDIA GPUs, one for TPUs (splash.py), all of one meaning.

A token attends to the tokens of its own segment up to and including itself, within the layer's window, with weights
softmax(scale q k). Scores may be capped, and a sink may take a part of the weight. Tensor letters: src/model/spec.py.

Where devices share a row (the logical axis `length`), each has its own queries and the keys and values of `whole_rows`:
of grouped heads these are few, and gathering them takes less time than the scores of the queries do.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from src.errors import UserError
from src.model.forward_context import Context, even_order, parts_of, sharing_keys, whole_rows
from src.model.spec import AttentionSpec, ModelSpec
from src.parallel.mesh import Layout

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a row of padding alone gives numbers, not NaN
FLASH_BLOCK = 128  # the least block of the TPU kernel, which takes whole blocks only
CUDNN_HEAD_DIM = 128  # the largest that cuDNN takes on every GPU; Hopper's 256 is left out


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    context: Context,
) -> jax.Array:
    """Attention by `context.kernel`: q [B, T, N, H] on k, v [B, n S, K, H] to [B, T, N, H].

    Keys and values are of `whole_rows`: a copy of all S = T tokens for each of the n devices that share a row.
    """
    if spec.chunk:
        # Blocks of positions see each other as segments do: a segment's blocks become segments.
        blocks = -(-q_BTNH.shape[1] // spec.chunk) + 1
        segment_ids = context.segment_ids_BT * blocks + context.positions_BT // spec.chunk
        context = dataclasses.replace(context, segment_ids_BT=segment_ids, packed=True)
    if context.kernel == "flash":
        from src.model.attention_kernels.splash import (
            splash as kernel,  # here, for no other kernel needs Pallas, which is slow to import
        )
    else:
        kernel = {"dot_product": dot_product, "cudnn_flash": cudnn}[context.kernel]
    out_BTNH = kernel(q_BTNH, k_BSKH, v_BSKH, spec, sinks_N, context)
    return context.layout.constrain(out_BTNH, "batch", "length", "heads", "head_dim")


def choose_kernel(attention: str, platform: str, spec: ModelSpec, length: int, layout: Layout) -> str:
    """The kernel that the key `attention` means on this platform for this model's rows of `length` tokens.

    Raises:
        UserError: the kernel asked for does not run here, or none but plain JAX's where devices share rows.
    """
    shards = layout.shards("length")
    if attention == "autoselected":
        fused = {"tpu": "flash", "gpu": "cudnn_flash"}.get(platform, "dot_product")
        obstacle = _obstacle(fused, platform, spec, length, layout)
        if obstacle and shards > 1:
            raise UserError(
                f"{shards} devices share a row ({layout.sharded_by('length')}), and attention={fused} {obstacle}. "
                "attention=dot_product runs, but holds the scores of all pairs of tokens"
            )
        return "dot_product" if obstacle else fused
    if obstacle := _obstacle(attention, platform, spec, length, layout):
        other = "dot_product" if shards > 1 else "autoselected"
        raise UserError(f"attention={attention} {obstacle}. Use attention={other}.")
    return attention


def _obstacle(kernel: str, platform: str, spec: ModelSpec, length: int, layout: Layout) -> str:
    """Why a kernel does not run here; empty where it does."""
    home = {"flash": "tpu", "cudnn_flash": "gpu"}.get(kernel, platform)
    if platform != home:
        return f"runs on {home}, and this is {platform}"
    shards = layout.shards("length")
    whole = FLASH_BLOCK * parts_of(shards)
    if kernel == "flash" and length % whole:
        return f"needs max_target_length to be a multiple of {whole}, not {length}"
    if kernel == "cudnn_flash":
        if shards > 1:
            return (
                f"has all of a row on one device, and {layout.sharded_by('length')} share it: set "
                f"{sharing_keys(layout, 'length', 'and')} to 1"
            )
        if spec.dtype != "bfloat16":
            return f"needs dtype=bfloat16, not {spec.dtype}"
        if length % 2:
            return f"needs an even max_target_length, not {length}"
        attentions = [layer.attention for layer in spec.layers]
        sizes = sorted({size for attention in attentions for size in (attention.head_dim, attention.value_dim)})
        if any(size % 8 or size > CUDNN_HEAD_DIM for size in sizes):
            return f"needs head_dim to be a multiple of 8 up to {CUDNN_HEAD_DIM}, not {', '.join(map(str, sizes))}"
        if any(attention.head_dim != attention.value_dim for attention in attentions):
            return "needs values of the size of queries, which latent attention does not have"
        if any(attention.soft_cap or attention.sink for attention in attentions):
            return "has neither attn_logits_soft_cap nor attention_sink"
    return ""


def for_queries(x_BTKH: jax.Array, num_query_heads: int, layout: Layout) -> jax.Array:
    """Keys or values [B, T, K, H] of `whole_rows`, each device with the heads that its queries read."""
    if layout.axes("kv_heads") != layout.axes("heads"):
        # Of the queries on a device, so many next to each other read the same head.
        group = num_query_heads // x_BTKH.shape[2]
        together = math.gcd(group, num_query_heads // layout.shards("heads"))
        x_BTKH = jnp.repeat(x_BTKH, group // together, axis=2)
    return whole_rows(x_BTKH, layout, "heads", "head_dim")


def _mask_BntS(context: Context, window: int) -> jax.Array:
    """Which of a row's tokens each of t queries sees on each of n devices that share it."""
    B, S = context.segment_ids_BT.shape
    n = context.layout.shards("length")
    segments_Bnt = context.segment_ids_BT.reshape(B, n, -1)
    segments_BnS = whole_rows(context.segment_ids_BT, context.layout).reshape(B, n, S)
    index_nt = jnp.asarray(even_order(S, context.layout).reshape(n, -1), jnp.int32)
    back_ntS = index_nt[..., None] - jnp.arange(S)
    same_BntS = segments_Bnt[..., None] == segments_BnS[:, :, None]
    return same_BntS & (back_ntS >= 0) & (back_ntS < (window or S))


def dot_product(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    context: Context,
) -> jax.Array:
    """Plain JAX; q [B, T, N, H] on k, v [B, n S, K, H]; holds the scores [B, N, T, S] in float32."""
    B, T, N, _ = q_BTNH.shape
    by_device = (x.reshape(B, context.layout.shards("length"), -1, *x.shape[2:]) for x in (q_BTNH, k_BSKH, v_BSKH))
    out_BntNH = masked_attention(*by_device, _mask_BntS(context, spec.window), spec, sinks_N)
    return out_BntNH.reshape(B, T, N, -1)


def masked_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Attention of T queries on S keys where `mask_BTS` is true; values may have a head size of their own.

    B may be several dims.
    """
    *B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[-2]
    q_BTKGH = q_BTNH.reshape(*B, T, K, N // K, H)
    scores = jnp.einsum("...TKGH,...SKH->...KGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(mask_BTS[..., None, None, :, :], scores, MASKED)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(K, N // K, 1, 1)
        largest = jnp.maximum(largest, sinks)
    largest = jax.lax.stop_gradient(largest)
    # Softmax with its division last: on [B, T, N, H] in place of the larger scores.
    unnormalised = jnp.exp(scores - largest)
    normaliser = jnp.sum(unnormalised, axis=-1, keepdims=True)
    if sinks_N is not None:
        normaliser += jnp.exp(sinks - largest)
    out_BTKGH = jnp.einsum("...KGTS,...SKH->...TKGH", unnormalised.astype(v_BSKH.dtype), v_BSKH)
    return (out_BTKGH / jnp.moveaxis(normaliser, -2, -4)).astype(v_BSKH.dtype).reshape(*B, T, N, -1)


def cudnn(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    context: Context,
) -> jax.Array:
    """cuDNN's fused attention on each device's rows and heads.

    Packed rows pass their segments as a mask of [B, 1, T, S] in the compute dtype: no devices share rows here, and the
    mask's dim of them (n = 1) stands where cuDNN's mask has one of heads.
    """
    assert sinks_N is None, "choose_kernel"
    layout = context.layout
    placed = layout.spec(("batch", None, "heads", None))

    @functools.partial(
        layout.shard_map, in_specs=(placed, placed, placed, layout.spec(("batch", None))), out_specs=placed
    )
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        own = dataclasses.replace(context, segment_ids_BT=segments)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=_mask_BntS(own, spec.window) if context.packed else None,
            is_causal=not context.packed,
            scale=spec.scale,
            local_window_size=(spec.window - 1, 0) if spec.window and not context.packed else None,
            implementation="cudnn",
        )

    return on_device(q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT)
