"""Chooses an attention kernel: cuDNN's on NVIDIA GPUs, Pallas's (splash) on TPUs, or plain JAX, tiled or not."""

from collections.abc import Sequence
from typing import NamedTuple

from src.model.attention_kernels.scores import FLASH_BLOCK, ScoreSpec
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import zigzag_parts
from src.system.errors import Unsupported

PLATFORMS = {"flash": "tpu", "cudnn_flash": "gpu"}  # where each fused kernel runs
LONGEST_WHOLE = {"cpu": 64, "gpu": 512, "tpu": 4096}  # most keys for which dot_product, holding all scores, is chosen


class Kernel(NamedTuple):
    """An attention kernel, and why it is not the platform's fused kernel; "" if it is, or if no fused one exists."""

    name: str
    why_not_fused: str = ""


def choose_kernel(
    attention: str, platform: str, scores: Sequence[ScoreSpec], dtype: str, length: int, layout: MeshLayout
) -> Kernel:
    """Resolves the key `attention` to a kernel for this platform and the layers' score settings.

    `autoselected` takes the platform's fused kernel if that can run; otherwise `blocked` for long sequences, and on
    accelerators for sharded ones; else `dot_product`. Raises Unsupported if the requested kernel cannot run.
    """
    given = (platform, scores, dtype, length, layout)
    if attention != "autoselected" and (problem := kernel_obstacle(attention, *given)):
        raise Unsupported(f"attention={attention} {problem}. Use attention=autoselected.")
    fused = next((kernel for kernel, home in PLATFORMS.items() if home == platform), "")
    problem = kernel_obstacle(fused, *given)
    if fused and not problem and attention in (fused, "autoselected"):
        return Kernel(fused)
    if attention == "autoselected":
        in_tiles = length > LONGEST_WHOLE[platform] or (fused and layout.shards("length") > 1)
        attention = "blocked" if in_tiles else "dot_product"
    return Kernel(attention, f"{fused} {problem}" if problem else f"attention={fused} would run too" * bool(fused))


def kernel_obstacle(
    kernel: str, platform: str, scores: Sequence[ScoreSpec], dtype: str, length: int, layout: MeshLayout
) -> str:
    """Explains why a kernel cannot run on this platform, or with these scores, dtype and length; "" if it can."""
    home = PLATFORMS.get(kernel, platform)
    if platform != home:
        return f"runs on {home}, and this is {platform}"
    whole = FLASH_BLOCK * zigzag_parts(layout.shards("length"))
    if kernel == "flash" and length % whole:
        return f"needs max_target_length to be a multiple of {whole}, not {length}"
    if kernel == "cudnn_flash":
        from src.model.attention_kernels.cudnn_limits import cudnn_obstacle

        return cudnn_obstacle(scores, dtype, length, layout)
    return ""
