"""cuDNN's fused attention, for NVIDIA GPUs."""

import dataclasses

import jax
from jax import Array

from src.model.attention_kernels.scores import ScoreSpec, causal_mask
from src.model.forward_context import ForwardContext


def cudnn(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Attends with q [B, T, N, H] to k, v [B, S, K, H] on each device's rows and heads.

    Packed rows pass their segments as a mask [B, 1, T, S] in the compute dtype. No devices share rows here, so the
    mask's dim of those devices (n = 1) stands where cuDNN's mask has its dim of heads.
    """
    assert sinks_N is None, "choose_kernel"
    layout = context.layout
    sharded = layout.spec(("batch", None, "heads", None))

    def on_device(q: Array, k: Array, v: Array, segments: Array) -> Array:
        local = dataclasses.replace(context, segment_ids_BT=segments)
        return jax.nn.dot_product_attention(
            *(q, k, v),
            mask=causal_mask(local, spec.window) if context.packed else None,
            is_causal=True,  # beside a mask that says it too: cuDNN then skips the blocks above the diagonal
            scale=spec.scale,
            local_window_size=(spec.window - 1, 0) if spec.window and not context.packed else None,
            implementation="cudnn",
        )

    mapped = layout.shard_map(on_device, (sharded, sharded, sharded, layout.spec(("batch", None))), sharded)
    return mapped(q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT)
