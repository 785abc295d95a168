"""Chooses an attention kernel: plain JAX (dot_product), cuDNN on NVIDIA GPUs, Pallas (splash) on TPUs."""

from collections.abc import Sequence

from src.errors import UserError
from src.model.attention_kernels.scores import FLASH_BLOCK, ScoreSpec
from src.parallel.mesh import Layout
from src.parallel.sequence import sharing_keys, zigzag_parts

PLATFORMS = {"flash": "tpu", "cudnn_flash": "gpu"}  # of the fused kernels
CUDNN_HEAD_DIM = 128  # largest that cuDNN takes on every GPU; Hopper's 256 is left out


def choose_kernel(
    attention: str, platform: str, scores: Sequence[ScoreSpec], dtype: str, length: int, layout: Layout
) -> str:
    """Returns the kernel that the key `attention` means on this platform, for layers of these scores.

    Raises UserError if the kernel asked for does not run here, or only plain JAX's does and devices share rows.
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
