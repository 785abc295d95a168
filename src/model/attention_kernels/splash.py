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

BLOCKS = tuple(FLASH_BLOCK << power for power in range(5))  # sizes of the kernel's blocks, up to 2048
COMPUTED = 512  # keys of a block whose scores are in vector memory at once
# In blocks of 2,048 keys: with 512 the compiler of JAX 0.11 finds no room in the 16 MiB of v4 and v5p.
COMPUTED_OF_LARGE = COMPUTED if jax.__version_info__ < (0, 11) else 256


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


def block_sizes(queries: int, keys: int, window: int, head_dim: int, dtype: jnp.dtype) -> sa.BlockSizes:
    """Returns the kernel's blocks, for numbers of neighbouring queries and of keys that they divide.

    A larger block takes fewer instructions a score and computes more that the mask hides; docs/performance.md counts
    both for heads of 128 in bfloat16, alike for v4, v5e, v5p and v6e. Others have blocks as before: in float32, larger
    ones don't fit in a v4's 16 MiB of vector memory. One kernel for all gradients takes fewer than two, and writes
    those of queries once for each block of keys, memory that grows with a row's length: long rows and large heads have
    two.
    """
    large = dtype.itemsize == 2 and head_dim <= 128
    largest = max(COMPUTED, min(window or 1024, 1024)) if large else COMPUTED
    block_q = max(size for size in BLOCKS if queries % size == 0 and size <= largest)
    largest = 2048 if large and keys >= 8192 and not window else largest
    block_kv = max(size for size in BLOCKS if keys % size == 0 and size <= largest)
    computed = COMPUTED_OF_LARGE if block_kv == BLOCKS[-1] else min(block_kv, COMPUTED)
    fused = head_dim <= 128 and keys // block_kv <= 4
    return sa.BlockSizes(
        **{f"block_q{of}": block_q for of in ("", "_dkv")},
        **{f"block_kv{of}": block_kv for of in ("", "_dkv")},
        **{f"block_kv{of}_compute": computed for of in ("", "_dkv")},
        **({} if fused else {f"block_{of}_dq": min(block, 1024) for of, block in (("q", block_q), ("kv", block_kv))}),
        use_fused_bwd_kernel=fused,
    )


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
    window = spec.window or spec.chunk  # `attend` made segments of chunks; as a window they spare the blocks beyond
    head_dim = max(spec.head_dim, spec.value_dim)
    mask = ZigzagCausalMask(zigzag_order(T, layout), window)
    kernel = sa.make_splash_mha(
        sa.MultiHeadMask([mask] * (N // layout.shards("heads"))),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=block_sizes(T // zigzag_parts(shards), T, window, head_dim, q_BTNH.dtype),
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
