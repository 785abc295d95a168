"""Attention kernels: one plain JAX, one for TPUs, one for NVIDIA GPUs, all of one meaning.

A token attends to the tokens of its own segment up to and including itself, with weights softmax(q k / sqrt(H)).
Tensor letters: src/model/spec.py.
"""

import functools
import math

import jax
import jax.numpy as jnp

from src.errors import UserError
from src.model.context import Context

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a row of padding alone gives numbers, not NaN
FLASH_BLOCK = 128  # the least block of the TPU kernel, which takes whole blocks only


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, context: Context) -> jax.Array:
    """Attention by `context.kernel`: q [B, T, N, H] on k, v [B, S, K, H] to [B, T, N, H]."""
    kernels = {"dot_product": dot_product, "flash": splash, "cudnn_flash": cudnn}
    out_BTNH = kernels[context.kernel](q_BTNH, k_BSKH, v_BSKH, context)
    return context.layout.constrain(out_BTNH, "batch", "length", "heads", "head_dim")


def choose_kernel(attention: str, platform: str, length: int) -> str:
    """The kernel that the key `attention` means on this platform for rows of `length` tokens.

    Raises:
        UserError: the kernel asked for does not run here.
    """
    blocked = length % FLASH_BLOCK == 0
    if attention == "autoselected":
        best = {"tpu": "flash" if blocked else "dot_product", "gpu": "cudnn_flash"}
        return best.get(platform, "dot_product")
    needs = {"flash": "tpu", "cudnn_flash": "gpu"}.get(attention, platform)
    if needs != platform:
        raise UserError(f"attention={attention} runs on {needs}, and this is {platform}. Use attention=autoselected.")
    if attention == "flash" and not blocked:
        raise UserError(f"attention=flash needs max_target_length to be a multiple of {FLASH_BLOCK}, not {length}.")
    return attention


def _mask_BTS(context: Context) -> jax.Array:
    segments = context.segment_ids_BT
    same_BTS = segments[:, :, None] == segments[:, None, :]
    return same_BTS & jnp.tri(segments.shape[1], dtype=bool)


def dot_product(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, context: Context) -> jax.Array:
    """Plain JAX; holds the scores [B, N, T, S] in float32."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) / math.sqrt(H)
    scores = jnp.where(_mask_BTS(context)[:, None, None], scores, MASKED)
    # Softmax with its division last: on [B, T, N, H] in place of the larger scores.
    unnormalised = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    normaliser_BTKG1 = jnp.moveaxis(jnp.sum(unnormalised, axis=-1, keepdims=True), 3, 1)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", unnormalised.astype(v_BSKH.dtype), v_BSKH)
    return (out_BTKGH / normaliser_BTKG1).astype(v_BSKH.dtype).reshape(B, T, N, H)


def cudnn(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, context: Context) -> jax.Array:
    """cuDNN's fused attention. Packed rows pass their segments as a mask of [B, 1, T, S] in the compute dtype."""
    mask = _mask_BTS(context)[:, None] if context.packed else None
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask, is_causal=not context.packed, implementation="cudnn"
    )


def splash(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, context: Context, interpret: bool = False
) -> jax.Array:
    """JAX's Pallas kernel for TPUs, which skips the blocks above the diagonal, on each device's rows and heads.

    `interpret` runs it without a TPU, slowly, for tests.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    layout = context.layout
    T, N, H = q_BTNH.shape[1:]
    heads = N // layout.shards("heads")
    block = max(size for size in (128, 256, 512) if T % size == 0)
    blocks = sa.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = sa.MultiHeadMask([sa.CausalMask((T, T))] * heads)
    kernel = sa.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, interpret=interpret)
    q_spec = layout.spec(("batch", "length", "heads", "head_dim"))
    kv_spec = layout.spec(("batch", "length", "kv_heads", "head_dim"))

    @functools.partial(
        jax.shard_map,
        mesh=layout.mesh,
        in_specs=(q_spec, kv_spec, kv_spec, layout.spec(("batch", "length"))),
        out_specs=q_spec,
        check_vma=False,
    )
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / math.sqrt(H), k, v))
        out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, sa.SegmentIds(ids, ids)))(q, k, v, segments)
        return jnp.swapaxes(out, 1, 2)

    return on_device(q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT)
