"""JAX's Pallas attention kernel for TPUs, on rows that devices may share. Tensor letters: src/model/spec.py."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as sa
from jax.sharding import NamedSharding

from src.model.attention_kernels.choose import FLASH_BLOCK
from src.model.forward_context import Context, even_order, parts_of, whole_rows
from src.model.spec import AttentionSpec

BLOCKS = tuple(FLASH_BLOCK * times for times in (1, 2, 4))  # sizes of the kernel's blocks


@dataclass(frozen=True)
class Reach:
    """Whether queries see keys, by their indices in the text: those up to themselves, of the last `window` (0: all)."""

    window: int

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Of indices of one shape, as the kernel computes it of its blocks."""
        return (query >= key) & (query - self.window < key) if self.window else query >= key


class Sight(sa.Mask):
    """The mask of queries in the order of `q_sequence` on keys in the text's, for the kernel to compute by itself.

    What the kernel is told beforehand is which of its blocks are seen in part or wholly. JAX's own masks find that by
    computing all blocks on the host, which at 131,072 tokens takes minutes; a block of neighbours' corners say it.
    """

    def __init__(self, q_sequence: np.ndarray, window: int) -> None:
        self.q_sequence = q_sequence.astype(np.int32)
        self.mask_function = Reach(window)

    @property
    def shape(self) -> tuple[int, int]:
        """Of queries and keys."""
        return 2 * self.q_sequence.shape

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """Of a block whose queries are neighbours in the text, in place of its mask: whether any and all of it is seen.

        JAX asks it no more, as it does not load the mask of a block whose `mask_function` it has.
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
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    spec: AttentionSpec,
    sinks_N: jax.Array | None,
    context: Context,
    interpret: bool = False,
) -> jax.Array:
    """JAX's Pallas kernel for TPUs, which skips the blocks out of sight, on each device's rows, heads and queries.

    `interpret` runs it without a TPU, slowly, for tests.
    """
    layout = context.layout
    T, N = q_BTNH.shape[1:3]
    shards = layout.shards("length")
    block_q, block_kv = (max(size for size in BLOCKS if length % size == 0) for length in (T // parts_of(shards), T))
    blocks = sa.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    window = spec.window or spec.chunk  # `attend` made segments of the blocks; as a window it spares what is further
    sight = Sight(even_order(T, layout), window)
    kernel = sa.make_splash_mha(
        sa.MultiHeadMask([sight] * (N // layout.shards("heads"))),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=blocks,
        attn_logits_soft_cap=spec.soft_cap or None,
        interpret=interpret,
    )
    placed, rows = layout.spec(("batch", "length", "heads", None)), layout.spec(("batch", "length"))
    # Of the mesh itself: of one that an outer shard_map maps over, JAX does not know a part's shape.
    by_query = NamedSharding(layout.mesh, layout.spec((None, "length")))
    sinks = () if sinks_N is None else (sinks_N.astype(jnp.float32),)

    @functools.partial(
        layout.shard_map,
        in_specs=(
            kernel.manual_sharding_spec(by_query),  # what each device's queries see
            *(placed, placed, placed, rows, rows),
            *(layout.spec(("heads",)) for _ in sinks),
        ),
        out_specs=placed,
    )
    def on_device(
        kernel: Callable,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        ids: jax.Array,
        row_ids: jax.Array,
        *sinks: jax.Array,
    ) -> jax.Array:
        def of_row(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
            return kernel(q, k, v, sa.SegmentIds(*ids), *sinks)

        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * spec.scale, k, v))
        return jnp.swapaxes(jax.vmap(of_row)(q, k, v, ids, row_ids), 1, 2)

    segments_BT = context.segment_ids_BT
    return on_device(kernel, q_BTNH, k_BSKH, v_BSKH, segments_BT, whole_rows(segments_BT, layout), *sinks)
