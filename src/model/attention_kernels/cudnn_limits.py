"""The requirements of cuDNN's attention kernel, as in the checks of JAX's own function (cuDNN 9.10 and newer)."""

from collections.abc import Sequence

from src.model.attention_kernels.scores import ScoreSpec
from src.parallel.chips import compute_capability
from src.parallel.mesh import MeshLayout


def cudnn_obstacle(scores: Sequence[ScoreSpec], dtype: str, length: int, layout: MeshLayout) -> str:
    """Explains why the kernel cannot run on a GPU of this layout; "" if it can."""
    if dtype != "bfloat16":
        return f"needs dtype=bfloat16, not {dtype}"
    if length % 2:
        return f"needs an even max_target_length, not {length}"
    hopper = compute_capability(layout.device) >= 9.0
    largest, on_these = (256, "") if hopper else (128, " on GPUs older than Hopper (H100)")
    sizes = sorted({size for spec in scores for size in (spec.head_dim, spec.value_dim)})
    if any(size % 8 or size > largest for size in sizes):
        of_256 = on_these if max(sizes) <= 256 else ""
        return f"needs head_dim to be a multiple of 8 up to {largest}, not {', '.join(map(str, sizes))}{of_256}"
    if not hopper and any(spec.head_dim != spec.value_dim for spec in scores):
        return f"needs values of the size of queries{on_these}, which latent attention does not have"
    lacks = {
        "attn_logits_soft_cap": any(spec.soft_cap for spec in scores),
        "attention_sink": any(spec.sink for spec in scores),
    }
    if missing := [key for key, asked in lacks.items() if asked]:
        return f"does not have {' or '.join(missing)}"
    return ""
