"""Chooses and calls an attention kernel: plain JAX (reference), cuDNN on NVIDIA GPUs, Pallas (splash) on TPUs.

All compute the same: a token attends to the tokens of its own segment up to and including itself, within the layer's
window, with weights softmax(scale q k). Scores may be capped, and a sink may take a part of the weight.

Where devices share a row (the logical axis `length`), each has its own queries and replicated keys and values: with
grouped heads these are small, and gathering them takes less time than the queries' scores do.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from src.errors import UserError
from src.model.attention_kernels.scores import FLASH_BLOCK, ScoreSpec, cudnn, dot_product
from src.model.forward_context import ForwardContext
from src.parallel.mesh import Layout
from src.parallel.sequence import replicate_rows, sharing_keys, zigzag_parts

PLATFORMS = {"flash": "tpu", "cudnn_flash": "gpu"}  # of the fused kernels
CUDNN_HEAD_DIM = 128  # largest that cuDNN takes on every GPU; Hopper's 256 is left out


def attend(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Computes attention by `context.kernel`: q [B, T, N, H] on k, v [B, n S, K, H] to [B, T, N, H].

    Keys and values come from `replicate_rows`: all S = T tokens for each of the n devices that share a row.
    """
    if spec.chunk:
        # Blocks of positions are separate as segments are, so each segment's blocks become segments.
        blocks = -(-q_BTNH.shape[1] // spec.chunk) + 1
        segment_ids = context.segment_ids_BT * blocks + context.positions_BT // spec.chunk
        context = dataclasses.replace(context, segment_ids_BT=segment_ids, packed=True)
    if context.kernel == "flash":  # imported where it runs: Pallas takes a second
        from src.model.attention_kernels.splash import splash as kernel
    else:
        kernel = cudnn if context.kernel == "cudnn_flash" else dot_product
    out_BTNH = kernel(q_BTNH, k_BSKH, v_BSKH, spec, sinks_N, context)
    return context.layout.constrain(out_BTNH, "batch", "length", "heads", "head_dim")


def repeat_kv(x_BTKH: Array, num_query_heads: int, layout: Layout) -> Array:
    """Replicates the rows of keys or values [B, T, K, H], with the heads that each device's queries read."""
    if layout.axes("kv_heads") != layout.axes("heads"):
        # So many neighbouring queries of a device read the same head.
        group = num_query_heads // x_BTKH.shape[2]
        together = math.gcd(group, num_query_heads // layout.shards("heads"))
        x_BTKH = jnp.repeat(x_BTKH, group // together, axis=2)
    return replicate_rows(x_BTKH, layout, "heads", "head_dim")


def choose_kernel(
    attention: str, platform: str, scores: Sequence[ScoreSpec], dtype: str, length: int, layout: Layout
) -> str:
    """Returns the kernel that the key `attention` means on this platform, for layers of these scores.

    Raises:
        UserError: the kernel asked for does not run here, or only plain JAX's does and devices share rows.
    """
    shards = layout.shards("length")
    if attention != "autoselected":
        if obstacle := _obstacle(attention, platform, scores, dtype, length, layout):
            other = "dot_product" if shards > 1 else "autoselected"
            raise UserError(f"attention={attention} {obstacle}. Use attention={other}.")
        return attention
    fused = next((kernel for kernel, home in PLATFORMS.items() if home == platform), "dot_product")
    obstacle = _obstacle(fused, platform, scores, dtype, length, layout)
    if obstacle and shards > 1:
        raise UserError(
            f"{shards} devices share a row ({layout.sharded_by('length')}), and attention={fused} {obstacle}. "
            "attention=dot_product runs, but holds the scores of all pairs of tokens"
        )
    return "dot_product" if obstacle else fused


def _obstacle(kernel: str, platform: str, scores: Sequence[ScoreSpec], dtype: str, length: int, layout: Layout) -> str:
    """Says why a kernel does not run here; "" where it does."""
    home = PLATFORMS.get(kernel, platform)
    if platform != home:
        return f"runs on {home}, and this is {platform}"
    shards = layout.shards("length")
    whole = FLASH_BLOCK * zigzag_parts(shards)
    if kernel == "flash" and length % whole:
        return f"needs max_target_length to be a multiple of {whole}, not {length}"
    if kernel == "cudnn_flash":
        if shards > 1:
            return (
                f"has all of a row on one device, and {layout.sharded_by('length')} share it: set "
                f"{sharing_keys(layout, 'length', 'and')} to 1"
            )
        if dtype != "bfloat16":
            return f"needs dtype=bfloat16, not {dtype}"
        if length % 2:
            return f"needs an even max_target_length, not {length}"
        sizes = sorted({size for spec in scores for size in (spec.head_dim, spec.value_dim)})
        if any(size % 8 or size > CUDNN_HEAD_DIM for size in sizes):
            return f"needs head_dim to be a multiple of 8 up to {CUDNN_HEAD_DIM}, not {', '.join(map(str, sizes))}"
        if any(spec.head_dim != spec.value_dim for spec in scores):
            return "needs values of the size of queries, which latent attention does not have"
        if any(spec.soft_cap or spec.sink for spec in scores):
            return "has neither attn_logits_soft_cap nor attention_sink"
    return ""
