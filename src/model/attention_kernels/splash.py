"""JAX's Pallas attention kernel for TPUs (splash attention), for sequences that may be sharded."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as sa
from jax.sharding import NamedSharding

from src.model.attention_kernels.scores import CONTEXT, FLASH_BLOCK, ScoreSpec
from src.model.forward_context import ForwardContext
from src.parallel.sequence import replicate_rows, zigzag_order, zigzag_parts

BLOCKS = tuple(FLASH_BLOCK << power for power in range(5))  # the kernel's block sizes, up to 2048
COMPUTED = 512  # keys of a block whose scores are in vector memory at once
# The same for blocks of 2,048 keys: with 512, the compiler of JAX 0.11 exceeds 16 MiB of vector memory: all that v4
# has, and the default limit on v5p.
COMPUTED_OF_LARGE = COMPUTED if jax.__version_info__ < (0, 11) else 256


@dataclass(frozen=True)
class CausalWindow:
    """Decides which keys a query sees, by indices in the sequence: the last `window` keys (0: all) up to its own."""

    window: int

    def __call__(self, query: Array, key: Array) -> Array:
        """Compares index arrays of equal shape; the kernel calls this on its blocks."""
        return (query >= key) & (query - self.window < key) if self.window else query >= key


class ZigzagCausalMask(sa.Mask):
    """Causal mask for queries in the order `q_sequence` and keys in sequence order, computed within the kernel.

    The kernel needs to know in advance which of its blocks are partly or fully masked. JAX's own masks find out by
    computing all blocks on the host, which takes minutes at 131,072 tokens; for blocks of consecutive queries, checking
    the corners is enough.
    """

    def __init__(self, q_sequence: np.ndarray, window: int) -> None:
        self.q_sequence = q_sequence.astype(np.int32)
        self.mask_function = CausalWindow(window)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return 2 * self.q_sequence.shape

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """Gives [any, all] of a block's mask instead of the mask; its queries must be consecutive in the sequence.

        JAX reads nothing else from it: it does not load masks of blocks for which it has a `mask_function`.
        """
        queries, keys = idx
        first, last = self.q_sequence[queries.start], self.q_sequence[queries.stop - 1]
        nearest, furthest = first - (keys.stop - 1), last - keys.start  # distance in tokens from a query back to a key
        reach = self.mask_function.window or len(self.q_sequence)
        return np.array([furthest >= 0 and nearest < reach, nearest >= 0 and furthest < reach])

    def __eq__(self, other: object) -> bool:
        return hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.q_sequence.tobytes(), self.mask_function))


def block_sizes(queries: int, keys: int, window: int, head_dim: int, dtype: jnp.dtype) -> sa.BlockSizes:
    """Chooses the kernel's block sizes, which divide `keys` and `queries`, the number of consecutive queries.

    A larger block needs fewer instructions per score but computes more scores that the mask hides; docs/performance.md
    counts both for heads of 128 in bfloat16. The sizes are the same for v4, v5e, v5p and v6e. Larger heads and float32
    use the smaller blocks: in float32, larger ones do not fit in a v4's 16 MiB of vector memory. One fused kernel for
    all gradients needs fewer instructions than two, but writes the query gradients once per block of keys, memory that
    grows with sequence length: long sequences and large heads use two kernels.
    """
    large = dtype.itemsize == 2 and head_dim <= 128
    largest = max(COMPUTED, min(window or 1024, 1024)) if large else COMPUTED
    block_q = max(size for size in BLOCKS if queries % size == 0 and size <= largest)
    largest = 2048 if large and keys >= 8192 and not window else largest
    block_kv = max(size for size in BLOCKS if keys % size == 0 and size <= largest)
    computed = COMPUTED_OF_LARGE if block_kv == BLOCKS[-1] else min(block_kv, COMPUTED)
    fused = head_dim <= 128 and keys // block_kv <= 4
    return sa.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=computed,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=computed,
        block_q_dq=None if fused else min(block_q, 1024),
        block_kv_dq=None if fused else min(block_kv, 1024),
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
    """Attends with q [B, T, N, H] to k, v [B, n S, K, H]; each device handles its own sequences, heads and queries.

    Fully masked blocks are skipped. `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    layout = context.layout
    T, N = q_BTNH.shape[1:3]
    shards = layout.shards("length")
    window = spec.window or spec.chunk  # `attend` made chunks segments; a window of their size also skips blocks
    head_dim = max(spec.head_dim, spec.value_dim)
    mask = ZigzagCausalMask(zigzag_order(T, layout), window)
    kernel = sa.make_splash_mha(
        sa.MultiHeadMask([mask] * (N // layout.shards("heads"))),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=block_sizes(T // zigzag_parts(shards), T, window, head_dim, q_BTNH.dtype),
        attn_logits_soft_cap=spec.soft_cap or None,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )
    sharded, rows = layout.spec(("batch", "length", "heads", None)), layout.spec(("batch", "length"))
    # Use the physical mesh: inside an outer shard_map, JAX cannot compute a shard's shape from the abstract one.
    by_query = NamedSharding(layout.mesh, layout.spec((None, "length")))

    def on_device(kernel: Callable, q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array, *sinks: Array) -> Array:
        def of_row(q: Array, k: Array, v: Array, *ids: Array) -> Array:
            return kernel(q, k, v, sa.SegmentIds(*ids), *sinks)

        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * spec.scale, k, v))
        return jnp.swapaxes(jax.vmap(of_row)(q, k, v, q_ids, kv_ids), 1, 2)

    arrays = (q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT, replicate_rows(context.segment_ids_BT, layout))
    specs = (kernel.manual_sharding_spec(by_query), sharded, sharded, sharded, rows, rows)  # first, the kernel's masks
    if sinks_N is not None:
        arrays, specs = (*arrays, sinks_N.astype(jnp.float32)), (*specs, layout.spec(("heads",)))
    return layout.shard_map(on_device, specs, sharded)(kernel, *arrays)
