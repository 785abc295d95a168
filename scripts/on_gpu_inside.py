"""Functions that scripts/on_gpu.py runs in separate processes: `python -m scripts.on_gpu_inside NAME key=value ...`.

The last line that a process prints is its result, as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import src.extras.aot.devices
from src.system.errors import UserError

BASE = str(Path(__file__).resolve().parents[1] / "configs" / "base.yml")


def facts(keys: Sequence[str]) -> dict[str, str]:
    """Returns the device, the software, and the run's CUDA version."""
    import jax

    from src.run.environment import environment

    return {**environment(), "platform": jax.default_backend(), "CUDA of the run": cuda()}


def compilers(keys: Sequence[str]) -> dict[str, str]:
    """Returns the CUDA version for ahead-of-time compilation: the run's, or that of `bash setup.sh aot`."""
    import src.extras.aot.compilers  # noqa: F401  it extends the path

    return {"CUDA ahead of time": cuda()}


def cuda() -> str:
    """Returns the versions of CUDA and of JAX's plugin for it."""
    plugin = f"jax-cuda{src.extras.aot.devices.CUDA}-plugin"
    try:
        return f"{src.extras.aot.devices.CUDA} ({plugin} {metadata.version(plugin)})"
    except metadata.PackageNotFoundError:
        return "none"


def train(keys: Sequence[str]) -> dict[str, int | None]:
    """Trains as the command does; returns the device's peak bytes, None if it does not count them."""
    import jax

    from src import train

    train.main([BASE, *keys])
    return {"peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}


def kernels(keys: Sequence[str]) -> dict[str, Any]:
    """Compares cuDNN's attention and Triton's grouped matmul with plain versions; CPUs use substitutes."""
    import jax.numpy as jnp

    from src.model.moe.grouped_matmul import grouped_matmul

    on_gpu = is_gpu()
    B, T, N, H = (4, 1024, 8, 128) if on_gpu else (1, 64, 4, 16)
    found = {}
    for name, segments, window in (("packed", 0, 0), ("unpacked", 1, 0), ("window", 1, T // 4), ("both", 0, T // 16)):
        found[f"attention_{name}"] = attention_differs(B, T, N, N, H, segments, window)
        # Sequences as long as the trained model's, with fewer key heads than query heads.
        found[f"attention_{name}_grouped"] = attention_differs(1, 4 * T, N, N // 4, H, segments, window)
    # With a mask and in pieces, as cuDNN's list of segments has no room for these; then latent attention's sizes.
    found["attention_mask"] = attention_differs(1, 4 * T, N, N // 4, H, T, 0)
    found["attention_pieces"] = attention_differs(1, 8 * T, N, N // 4, H, 2 * T, 0)
    found["attention_latent"] = attention_differs(B, T, N, N, 3 * H // 2, 0, 0, value_dim=H)
    sizes = jnp.asarray([T // 2, 3, 0, T // 2 - 3], jnp.int32)
    found["grouped_products"] = differs(
        lambda x, kernel: grouped_matmul(x, kernel, sizes, "gpu", interpret=not on_gpu),
        lambda x, kernel: grouped_matmul(x, kernel, sizes, "cpu", interpret=True),
        *((T, 8 * H), (4, 8 * H, 2 * H)),
    )
    compared = "cuDNN's and Triton's" if on_gpu else "plain attention in bfloat16, Triton's interpreted"
    return {"greatest_difference": max(found.values()), "compared": compared, **found}


def kernel_of_256(keys: Sequence[str]) -> dict[str, float]:
    """Compares cuDNN's attention with plain attention for heads of 256, packed and unpacked."""
    B, T, N = (4, 1024, 8) if is_gpu() else (1, 64, 2)
    return {
        name: attention_differs(B, T, N, N, 256, segments, 0) for name, segments in (("packed", 0), ("unpacked", 1))
    }


def is_gpu() -> bool:
    """Tells whether JAX computes on a GPU."""
    import jax

    return jax.default_backend() == "gpu"


def attention_differs(
    B: int, T: int, N: int, K: int, H: int, segments: int, window: int, value_dim: int | None = None
) -> float:
    """Compares cuDNN's with plain attention on B sequences of T, with N query heads and K key heads of size H.

    Sequences of more than one segment are packed, in segments of equal length but for the last; 0: of all lengths, so
    that every class of them has some (src/model/attention_kernels/cudnn_segments.py).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from src.model.attention_kernels.cudnn import cudnn
    from src.model.attention_kernels.scores import ScoreSpec, dot_product
    from src.model.forward_context import ForwardContext
    from src.parallel.mesh import make_layout
    from src.run import resolve_config

    layout = make_layout(resolve_config.load([BASE]).mesh, jax.devices()[:1])
    ends = (
        np.cumsum([40, T // 2 + 1, 3, 1, T // 5, T // 16]) if segments == 0 else T * np.arange(1, segments) / segments
    )
    ids_T = 1 + np.searchsorted(ends, np.arange(T), side="right")
    segment_ids = jnp.asarray(np.tile(ids_T, (B, 1)), jnp.int32)
    context = ForwardContext(jnp.tile(jnp.arange(T), (B, 1)), segment_ids, layout, "", segments != 1)
    V = value_dim or H
    facts = (ScoreSpec(N, H, V, H**-0.5, window=window), None, context)
    kernel = cudnn if is_gpu() else dot_product
    return differs(
        lambda q, k, v: kernel(q, k, v, *facts),
        lambda q, k, v: dot_product(q, k, v, *facts),
        *((B, T, N, H), (B, T, K, H), (B, T, K, V)),
    )


def differs(kernel: Callable, plain: Callable, *shapes: tuple[int, ...]) -> float:
    """Returns the largest difference of `kernel` in bfloat16 from `plain` in float32, relative to the largest value.

    It compares the outputs, and the gradients of all input arrays, whose values are random.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    def run(function: Callable, dtype: type) -> list[np.ndarray]:
        out, pull_back = jax.vjp(jax.jit(function), *(array.astype(dtype) for array in arrays))
        return [np.asarray(each, np.float64) for each in (out, *pull_back(jnp.ones_like(out)))]

    pairs = zip(run(kernel, jnp.bfloat16), run(plain, jnp.float32), strict=True)
    return max(float(np.max(np.abs(found - expected)) / np.max(np.abs(expected))) for found, expected in pairs)


def decoding(keys: Sequence[str]) -> dict[str, Any]:
    """Times greedy decoding with random weights, for one prompt, two and eight."""
    import jax
    import numpy as np

    from src.extras.generation.generate import Generator, sampling
    from src.extras.generation.inference_weights import in_activation_dtype, unrolled
    from src.parallel.mesh import make_layout
    from src.run import resolve_config
    from src.step.trace import plan_step

    prompt, new = (128, 256) if is_gpu() else (8, 8)
    sizes = (f"max_target_length={prompt + new}", "decode_sampling_strategy=greedy")
    config = resolve_config.load([BASE, *keys, *sizes])
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:1]))
    weights = jax.jit(plan.init_weights, out_shardings=plan.split(plan.shardings))()
    plan, weights = unrolled(plan, weights)
    weights = in_activation_dtype(plan, weights)
    rates = {}
    for rows in (1, 2, 8):
        generator = Generator(
            plan, weights, sampling(config.decoding), seed=0, length=prompt + new, prefill_length=prompt
        )
        prompts = np.random.default_rng(0).integers(3, 200, (rows, prompt), np.int32)
        tokens_BT, lengths_B = generator.padded(list(prompts), rows)
        generator.compile(*tokens_BT.shape)
        for _ in range(2):  # the first to warm up
            start = time.perf_counter()
            sampled = generator.tokens(tokens_BT, lengths_B, np.arange(len(tokens_BT), dtype=np.int32))
            for _ in range(new):
                next(sampled)
            rates[f"prompts_{rows}"] = rows * new / (time.perf_counter() - start)
    return {"tokens_per_second": rates, "prompt": prompt, "new": new}


def main(name: str, *keys: str) -> int:
    """Prints the result of the function of this name; after a user's mistake, prints it in a line and returns 2."""
    functions = (facts, compilers, train, kernels, kernel_of_256, decoding)
    try:
        result = {function.__name__: function for function in functions}[name](keys)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
