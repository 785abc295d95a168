"""JAX's Pallas attention kernel for TPUs (splash attention), on rows that devices may share."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as sa
from jax.sharding import NamedSharding

from src.model.attention_kernels.scores import FLASH_BLOCK, ScoreSpec
from src.model.forward_context import ForwardContext
from src.parallel.sequence import replicate_rows, zigzag_order, zigzag_parts

BLOCKS = tuple(FLASH_BLOCK * times for times in (1, 2, 4))  # sizes of the kernel's blocks


@dataclass(frozen=True)
class CausalWindow:
    """Tells by indices in the text which keys a query attends to: those up to itself, the last `window` (0: all)."""

    window: int

    def __call__(self, query: Array, key: Array) -> Array:
        """Compares indices of one shape; the kernel calls this on its blocks."""
        return (query >= key) & (query - self.window < key) if self.window else query >= key


class ZigzagCausalMask(sa.Mask):
    """A causal mask of queries in the order of `q_sequence` on keys in the text's, computed within the kernel.

    The kernel needs to know beforehand which of its blocks are masked in part or wholly. JAX's own masks find out by
    computing all blocks on the host, which takes minutes at 131,072 tokens; the corners of a block of neighbouring
    queries suffice.
    """

    def __init__(self, q_sequence: np.ndarray, window: int) -> None:
        self.q_sequence = q_sequence.astype(np.int32)
        self.mask_function = CausalWindow(window)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return 2 * self.q_sequence.shape

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Returns [any, all] of a block's mask in place of the mask; its queries must be neighbours in the text.

        JAX uses nothing else of it, since it loads no mask for blocks of which it has a `mask_function`.
        """
        queries, keys = block
        first, last = self.q_sequence[queries.start], self.q_sequence[queries.stop - 1]
        nearest, furthest = first - (keys.stop - 1), last - keys.start  # tokens back from a query to a key
        reach = self.mask_function.window or len(self.q_sequence)
        return np.array([furthest >= 0 and nearest < reach, nearest >= 0 and furthest < reach])

    def __eq__(self, other: object) -> bool:
        return hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.q_sequence.tobytes(), self.mask_function))


def splash(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    spec: ScoreSpec,
    sinks_N: Array | None,
    context: ForwardContext,
    interpret: bool = False,
) -> Array:
    """Attends with q [B, T, N, H] to k, v [B, n S, K, H] on each device's rows, heads and queries.

    Blocks that are masked wholly are skipped. `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    layout = context.layout
    T, N = q_BTNH.shape[1:3]
    shards = layout.shards("length")
    block_q, block_kv = (max(size for size in BLOCKS if n % size == 0) for n in (T // zigzag_parts(shards), T))
    blocks = sa.BlockSizes(
        **{f"block_q{of}": block_q for of in ("", "_dkv", "_dq")},
        **{f"block_kv{of}": block_kv for of in ("", "_compute", "_dkv", "_dkv_compute", "_dq")},
    )
    window = spec.window or spec.chunk  # `attend` made segments of chunks; as a window they spare the blocks beyond
    mask = ZigzagCausalMask(zigzag_order(T, layout), window)
    kernel = sa.make_splash_mha(
        sa.MultiHeadMask([mask] * (N // layout.shards("heads"))),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=blocks,
        attn_logits_soft_cap=spec.soft_cap or None,
        interpret=interpret,
    )
    sharded, rows = layout.spec(("batch", "length", "heads", None)), layout.spec(("batch", "length"))
    # On the mesh itself: of one that an outer shard_map maps over, JAX does not know a part's shape.
    by_query = NamedSharding(layout.mesh, layout.spec((None, "length")))

    def on_device(kernel: Callable, q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array, *sinks: Array) -> Array:
        def of_row(q: Array, k: Array, v: Array, *ids: Array) -> Array:
            return kernel(q, k, v, sa.SegmentIds(*ids), *sinks)

        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * spec.scale, k, v))
        return jnp.swapaxes(jax.vmap(of_row)(q, k, v, q_ids, kv_ids), 1, 2)

    arrays = (q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT, replicate_rows(context.segment_ids_BT, layout))
    specs = (kernel.manual_sharding_spec(by_query), sharded, sharded, sharded, rows, rows)  # first each device's mask
    if sinks_N is not None:
        arrays, specs = (*arrays, sinks_N.astype(jnp.float32)), (*specs, layout.spec(("heads",)))
    return layout.shard_map(on_device, specs, sharded)(kernel, *arrays)
