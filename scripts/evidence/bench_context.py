"""Compares two ways to attend along sequences that devices share, compiled for TPUs.

`gather` is MinText's way: each device gathers the keys and values of its sequences (`repeat_kv` of
src/model/attention.py). `ring` exists only here: devices pass keys and values around, and attend to their current block
while it travels to the next device (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). Both use JAX's
Pallas kernel, on sequences in `zigzag_order`. The program is one layer's attention, in Llama 3 8B's sizes, with its
gradient. Needs libtpu (bash setup.sh aot).
"""

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as sa
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.topology import parse_topology
from src.model.attention import repeat_kv
from src.model.attention_kernels.scores import score_spec
from src.model.attention_kernels.splash import ZigzagCausalMask, block_sizes, splash
from src.model.forward_context import ForwardContext
from src.model.spec import LayerSpec, model_spec
from src.parallel.mesh import MeshLayout, make_layout
from src.run import resolve_config
from src.step.compiler_flags import compiler_options
from src.system.exit_codes import run_command

NEVER = -1e30  # log-sum-exp over no keys
BASE = Path(__file__).resolve().parents[2] / "configs" / "base.yml"


def ring(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, layout: MeshLayout, scale: float, interpret: bool = False
) -> jax.Array:
    """Causal ring attention on sequences in `zigzag_order`, one segment each; the result has the shape of q."""
    placed = layout.spec(("batch", "length", "heads", None))
    (axis,), n = layout.axes("length"), layout.shards("length")
    length, heads = q_BTNH.shape[1] // n, q_BTNH.shape[2] // layout.shards("heads")
    attend = _ring(axis, n, length, heads, interpret)

    @functools.partial(layout.shard_map, in_specs=(placed, placed, placed), out_specs=placed)
    def on_device(*arrays: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in arrays)
        return jnp.swapaxes(jax.vmap(attend)(q * scale, k, v), 1, 2)

    return on_device(q_BTNH, k_BTKH, v_BTKH)


def _ring(axis: str, n: int, length: int, heads: int, interpret: bool) -> Callable:
    """Builds attention for one device's part of a sequence: q [N, length, H], k and v [K, length, H].

    Device i has parts i and 2n - 1 - i of 2n. For keys from an earlier device in the ring, all its queries attend to
    the early part only; for keys from a later device, only its late queries attend, but to both parts. So each step
    takes equally long.
    """
    half = length // 2
    own = _kernel(ZigzagCausalMask(np.arange(length), 0), heads, interpret)
    early = _kernel(sa.FullMask((length, half)), heads, interpret)  # all queries, the first half of keys
    late = _kernel(sa.FullMask((half, length)), heads, interpret)  # the second half of queries, all keys
    onward = [(i, (i + 1) % n) for i in range(n)]

    def passed_on(*arrays: jax.Array) -> list[jax.Array]:
        return [jax.lax.ppermute(x, axis, onward) for x in arrays]

    def seen_early(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (total,) = early(q, k[:, :half], v[:, :half])
        return out.astype(jnp.float32), total

    def seen_late(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (total,) = late(q[:, half:], k, v)
        return _behind(out.astype(jnp.float32), 0.0), _behind(total, NEVER)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, (total,) = own(q, k, v)
        out, device = out.astype(jnp.float32), jax.lax.axis_index(axis)
        for step in range(1, n):
            k, v = passed_on(k, v)
            part, of_part = jax.lax.cond(device >= step, seen_early, seen_late, q, k, v)
            both = jnp.logaddexp(total, of_part)
            out = out * jnp.exp(total - both)[..., None] + part * jnp.exp(of_part - both)[..., None]
            total = both
        return out.astype(q.dtype), total

    def gradients(kernel: kernels.SplashAttentionKernel, *known: jax.Array) -> tuple[jax.Array, ...]:
        """Gradients of q, k and v, given these, the sequence's output, log-sum-exp, and output gradient."""
        *arrays, out, total, cotangent = known
        residuals = (*arrays, None, None, out, total, kernel.dq_mask_info, kernel.dkv_mask_info)
        return kernels._splash_attention_bwd(res=residuals, do=cotangent, **kernel.kwargs)[3:6]

    def early_gradients(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        dq, dk, dv = gradients(early, q, k[:, :half], v[:, :half], *rest)
        return dq, _before(dk), _before(dv)

    def late_gradients(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        dq, dk, dv = gradients(late, q[:, half:], k, v, *(x[:, half:] for x in rest))
        return _behind(dq, 0.0), dk, dv

    def backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, *rest = saved
        rest.append(cotangent)
        dq, dk, dv = gradients(own, q, k, v, *rest)
        device = jax.lax.axis_index(axis)
        for step in range(1, n):
            k, v, dk, dv = passed_on(k, v, dk, dv)
            parts = jax.lax.cond(device >= step, early_gradients, late_gradients, q, k, v, *rest)
            dq, dk, dv = (x + part for x, part in zip((dq, dk, dv), parts, strict=True))
        return dq, *passed_on(dk, dv)  # back to their own device

    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward_saving(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, total = forward(q, k, v)
        return out, (q, k, v, out, total)

    attend.defvjp(forward_saving, backward)
    return attend


def _kernel(mask: sa.Mask, heads: int, interpret: bool) -> kernels.SplashAttentionKernel:
    """Builds JAX's kernel, which also returns the scores' log-sum-exp."""
    queries, keys = mask.shape
    masks, blocks = sa.MultiHeadMask([mask] * heads), block_sizes(queries, keys, 0, 128, jnp.dtype(jnp.bfloat16))
    return sa.make_splash_mha_single_device(masks, block_sizes=blocks, save_residuals=True, interpret=interpret)


def _behind(late: jax.Array, fill: float) -> jax.Array:
    """Pads [heads, length / 2, ...] to the second half of [heads, length, ...]."""
    return jnp.concatenate([jnp.full_like(late, fill), late], axis=1)


def _before(early: jax.Array) -> jax.Array:
    return jnp.concatenate([early, jnp.zeros_like(early)], axis=1)


def gather(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, layout: MeshLayout, spec: LayerSpec) -> jax.Array:
    """Attends as the model's blocks do."""
    segments = jnp.ones(q_BTNH.shape[:2], jnp.int32)
    context = ForwardContext(
        positions_BT=segments, segment_ids_BT=segments, layout=layout, kernel="flash", packed=False
    )
    k, v = (repeat_kv(x, spec.num_query_heads, layout) for x in (k_BTKH, v_BTKH))
    return splash(q_BTNH, k, v, score_spec(spec, spec.head_dim), None, context)


def main(argv: Sequence[str]) -> None:
    """Prints each program's memory and communication."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p-64")
    parser.add_argument("--context", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--length", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--flags", default="auto", help="compile_xla_flags")
    options = parser.parse_args(argv)
    topology = parse_topology(options.topology, 1)
    devices = abstract_devices(topology)
    flags = compiler_options(options.flags, devices[0], topology.slices)
    for length in options.length:
        for n in options.context:
            keys = ["model_name=llama3-8b", f"max_target_length={length}", f"ici_context_parallelism={n}"]
            config = resolve_config.load([str(BASE), *keys])
            layout = make_layout(config.mesh, devices)
            spec = model_spec(config.model, config.step, config.batch.max_target_length).layers[0]
            ways = {
                "gather": functools.partial(gather, layout=layout, spec=spec),
                "ring": functools.partial(ring, layout=layout, scale=score_spec(spec, spec.head_dim).scale),
            }
            for name, attend in ways.items():
                compiled = _compile(attend, layout, spec, length, flags)
                print(f"{length:,} tokens over {n}: {name:6} {_described(compiled, layout)}", flush=True)


def _compile(
    attend: Callable, layout: MeshLayout, spec: LayerSpec, length: int, flags: Mapping[str, Any]
) -> jax.stages.Compiled:
    """Compiles attention with the gradients of q, k and v, for one sequence per group of sharing devices."""
    rows = layout.shards("batch")

    def array(heads: int, axis: str) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding(("batch", "length", axis, None))
        return jax.ShapeDtypeStruct((rows, length, heads, spec.head_dim), jnp.bfloat16, sharding=sharding)

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(attend, q, k, v)
        return out, back(cotangent)

    q, kv = array(spec.num_query_heads, "heads"), array(spec.num_kv_heads, "kv_heads")
    return jax.jit(gradient).lower(q, kv, kv, q).compile(dict(flags))


def _described(compiled: jax.stages.Compiled, layout: MeshLayout) -> str:
    stats: Any = compiled.memory_analysis()
    sent, times = Counter[str](), Counter[str]()
    for each in collectives(compiled.as_text(), layout.mesh):
        sent[each.kind] += each.times * each.sent_bytes
        times[each.kind] += each.times
    moved = ", ".join(f"{times[kind]} {kind} {sent[kind] / 1e6:.0f} MB" for kind in sent)
    through = compiled.cost_analysis()["bytes accessed"] / 1e9  # without the kernels' own reads and writes
    memory = f"{stats.temp_size_in_bytes / 2**20:5.0f} MiB of temporaries, {through:.1f} GB read and written"
    return f"{memory}; a device sends {moved}"


if __name__ == "__main__":
    run_command(main, may_exit=True)
