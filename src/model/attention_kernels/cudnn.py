"""cuDNN's fused attention, for NVIDIA GPUs.

On Hopper and later GPUs, a packed sequence that one device holds is computed by its segments, if cudnn_segments.py
supports its length and heads and has room for all segments. Otherwise, a long sequence of several segments, or a
sharded one, is computed in pieces, and no mask is as large as T x T. At most one segment spans the border of two
neighbouring blocks, so only the first queries of the later block see the last keys of the earlier one: with the keys
reversed, two lengths describe this mask. Blocks are joined pairwise, doubling in size each time; with a window, each
block is joined with the few before it. The pieces' outputs are averaged, weighted by the exponentials of their
log-sum-exps (`normaliser`). In the backward pass each piece receives the log-sum-exp and output of the whole sequence,
so that its gradients equal full attention's (as in Ring Attention, Liu et al. 2023, arXiv:2310.01889).

JAX's own function queries the local device for its abilities, requires values of the queries' size, and accepts no
log-sum-exp in the backward pass. This module therefore calls its primitives, in the versions that requirements/ pins.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.ad_checkpoint import checkpoint_name

from src.model.attention_kernels.blocked import blocked
from src.model.attention_kernels.cudnn_segments import (
    RATIO,
    SegmentClass,
    SegmentLists,
    Segments,
    can_compute,
    can_divide,
    list_segments,
    operands,
)
from src.model.attention_kernels.scores import CONTEXT, MASKED, ScoreSpec
from src.model.forward_context import ForwardContext
from src.model.matmul import with_gradient
from src.parallel.chips import compute_capability
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import replicate_rows, zigzag_order, zigzag_parts

LONGEST_MASK = 4096  # longest sequence whose mask [T, T] is built
BLOCK = 1024  # most tokens in a block of a longer sequence
NO_WEIGHT = 1e30  # a log-sum-exp so large that any score's weight becomes 0


def cudnn(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Attends with q [B, T, N, H] to k, v [B, n S, K, H]; each device handles its own sequences, heads and queries.

    Sharded sequences with a window are left to the kernel `blocked`.
    """
    assert sinks_N is None, "choose_kernel"
    layout, T = context.layout, q_BTNH.shape[1]
    shards, window = layout.shards("length"), spec.window if spec.window < T else 0
    if window and shards > 1:
        return blocked(q_BTNH, k_BSKH, v_BSKH, spec, sinks_N, context)
    pieces = _Pieces(spec.scale, window, context.packed, shards, T // zigzag_parts(shards))
    sharded, rows = layout.spec(("batch", "length", "heads", None)), layout.spec(("batch", "length"))
    starts_np = zigzag_order(T, layout).reshape(shards, zigzag_parts(shards) // shards, -1)[:, :, 0]
    ids = (context.segment_ids_BT, replicate_rows(context.segment_ids_BT, layout))
    specs = (sharded, sharded, sharded, rows, rows, layout.spec(("length", None)))
    given = (q_BTNH, k_BSKH, v_BSKH, *ids, jnp.asarray(starts_np, jnp.int32))
    if not by_segments(q_BTNH.shape[0], T, spec, context.packed, layout):
        return layout.shard_map(_differentiable(pieces.run, pieces.gradients), specs, sharded)(*given)
    lists = context.segment_lists
    if (
        lists is None or lists.ids_BT is not context.segment_ids_BT
    ):  # chunks, or a pipeline's micro-batch, replaced the ids
        lists = segment_lists(context)
    mapped = layout.shard_map(_listed(pieces, Segments(spec.scale, window)), (*specs, layout.spec(("batch",))), sharded)
    return mapped(*given, lists)


def segment_lists(context: ForwardContext) -> SegmentLists | None:
    """Lists the segments of each device's sequences, for all layers; None if no layer can compute by segments."""
    if not _lists(context.segment_ids_BT.shape[1], context.packed, context.layout):
        return None
    rows, by_device = context.layout.spec(("batch", None)), context.layout.spec(("batch",))
    lists = context.layout.shard_map(list_segments, (rows,), by_device)(context.segment_ids_BT)
    return lists._replace(ids_BT=context.segment_ids_BT)


def _lists(T: int, packed: bool, layout: MeshLayout) -> bool:
    hopper = compute_capability(layout.device) >= 9.0
    return packed and layout.shards("length") == 1 and hopper and can_divide(T)


def by_segments(B: int, T: int, spec: ScoreSpec, packed: bool, layout: MeshLayout) -> bool:
    """Whether sequences [B, T] are computed by their segments, if the lists have room for these."""
    heads = spec.num_heads // layout.shards("heads")
    return _lists(T, packed, layout) and can_compute(B // layout.shards("batch") * T, spec, heads)


def masked_block(B: int, T: int, spec: ScoreSpec, packed: bool, layout: MeshLayout) -> int:
    """Tokens in a block of sequences [B, T], for which a mask is built; 0 if no mask is needed, or if `by_segments`."""
    packed = packed or spec.chunk > 0  # `attend` makes each chunk a segment
    if not packed or by_segments(B, T, spec, packed, layout):
        return 0
    shards = layout.shards("length")
    return _Pieces(spec.scale, spec.window, packed, shards, T // zigzag_parts(shards)).block


def workspace_bytes(B: int, T: int, spec: ScoreSpec, kv_heads: int, packed: bool, layout: MeshLayout) -> int:
    """Bytes of the memory in which cuDNN computes the gradients of sequences [B, T] on a device.

    XLA counts this memory only if it compiles on a machine with a GPU. Measured with cuDNN 9.19 on an H200: the
    queries' gradients in float32 and, if `kv_heads` are fewer than the query heads, the keys' and values' in bfloat16,
    per query head; by segments, all of these for each segment that a list has room for.
    """
    packed = packed or spec.chunk > 0  # `attend` makes each chunk a segment
    tokens = B // layout.shards("batch") * (T // layout.shards("length"))
    gradients = 4 * tokens * spec.num_heads // layout.shards("heads") * spec.head_dim
    grouped = 2 if kv_heads < spec.num_heads else 1
    return gradients * grouped * (RATIO if by_segments(B, T, spec, packed, layout) else 1)


def _differentiable(run: Callable, gradients: Callable) -> Callable[..., Array]:
    """Builds attention on one device from `run`, which returns the output and log-sum-exp, and its `gradients`.

    The built function takes q, k, v, the segment ids of queries and keys, the index in the sequence of the first token
    of each of the device's zigzag parts, [1, parts], and any further arguments of `run`.
    """

    def saving(*given: Any) -> tuple[Array, tuple[Any, ...]]:
        out, normaliser = (checkpoint_name(x, CONTEXT) for x in run(*given))
        return out, (*given, out, normaliser)

    def differentiated(saved: tuple[Any, ...], d_out: Array) -> tuple[Array | None, ...]:
        *given, _, _ = saved
        return *gradients(*saved, d_out), *[None] * (len(given) - len("qkv"))

    return with_gradient(saving, differentiated)


def _listed(pieces: "_Pieces", segments: Segments) -> Callable[..., Array]:
    """Builds attention on one device, with its gradient: by segments if the lists have room, otherwise in pieces.

    The built function takes `SegmentLists` after `_differentiable`'s arguments.
    """

    def choose(
        by_segments: Callable,
        in_pieces: Callable,
        q: Array,
        k: Array,
        v: Array,
        q_ids: Array,
        k_ids: Array,
        starts_1p: Array,
        lists: SegmentLists,
        *of_out: Array,
    ) -> tuple[Array, ...]:
        def attend(classes: Sequence[SegmentClass], q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, ...]:
            return by_segments(q, k, v, classes, *others[3:])

        # Without the barrier JAX would make the masks before the loop over layers, whether they are used or not.
        arrays = (q, k, v, q_ids, k_ids, starts_1p, *of_out)
        lists, arrays = jax.lax.optimization_barrier((lists, arrays))
        branches = [functools.partial(attend, classes) for classes in lists.divisions]
        return jax.lax.switch(lists.choice_1[0], [*branches, in_pieces], *arrays)

    return _differentiable(
        functools.partial(choose, segments.run, pieces.run),
        functools.partial(choose, segments.gradients, pieces.gradients),
    )


class _Mask(NamedTuple):
    """Mask of a piece: causal with an optional bias, only a bias, or one by which the first queries see the first keys.

    cuDNN does not document its results for a query that sees nothing or a key that no query sees: they are not used.
    """

    bias_b1ts: Array | None = None
    lengths: tuple[Array, ...] | None = None  # (n, m), [b] each: in each row, the first n queries see the first m keys
    used: tuple[Array, ...] | None = None  # [b, t] and [b, s]: queries seeing a key, and keys seen; None: all

    def of_queries(self, x_bt: Array, otherwise: float = 0.0) -> Array:
        """Replaces the entries of queries that see no key."""
        return x_bt if self.used is None else _where(self.used[0], x_bt, otherwise)

    def of_keys(self, x_bs: Array) -> Array:
        """Zeroes the entries of keys that no query sees."""
        return x_bs if self.used is None else _where(self.used[1], x_bs, 0.0)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Attention on one device, in pieces of b rows of t queries and s keys.

    A piece's queries and keys are from the same block, or its queries are from a later block or part than its keys.
    """

    scale: float
    window: int
    packed: bool
    shards: int  # of a sequence; if there are several, each has two zigzag parts
    length: int  # tokens of a sequence, or of such a part

    @property
    def levels(self) -> int:
        """How many times a sequence or part is halved to make blocks."""
        in_blocks = self.packed and (self.shards > 1 or self.length > LONGEST_MASK)
        return (-(-self.length // BLOCK) - 1).bit_length() if in_blocks else 0

    @property
    def block(self) -> int:
        """Tokens in a block, rounded up to a multiple of 8 if a device has several blocks or parts.

        A sequence or part is padded to `block << levels` tokens.
        """
        size = -(-self.length >> self.levels)
        return size if self.levels == 0 and self.shards == 1 else -(-size // 8) * 8

    @property
    def joins(self) -> list[tuple[str, int]]:
        """Joins of blocks: ("halves", blocks per half), or with a window ("before" or "biased", distance in blocks).

        If the window ends inside the earlier block, the join is "biased": a bias masks the keys beyond.
        """
        if not self.window:
            return [("halves", 1 << level) for level in range(self.levels)]
        furthest = min(-(-(self.window - 1) // self.block), (1 << self.levels) - 1)
        return [
            ("before" if (number + 1) * self.block <= self.window else "biased", number)
            for number in range(1, furthest + 1)
        ]

    def queries(self, x_BT: Array, fill: int = 0) -> list[Array]:
        """Selects each piece's queries [b, t, ...] from an array by query [B, T, ...]."""
        blocks, sizes = self._blocks(x_BT, fill), x_BT.shape[2:]
        pieces = [blocks.reshape(-1, self.block, *sizes)]
        for kind, number in self.joins:
            halves = blocks.reshape(-1, 2, number * self.block, *sizes) if kind == "halves" else None
            pieces.append(pieces[0] if halves is None else halves[:, 1])
        parts = x_BT.reshape(x_BT.shape[0], -1, self.length, *sizes)
        return pieces if self.shards == 1 else [*pieces, parts[:, 0], parts[:, 1]]

    def keys(self, x_BS: Array, starts_1p: Array, fill: int = 0) -> list[Array]:
        """Selects each piece's keys [b, s, ...] from an array by key [B, S, ...]; parts begin at `starts_1p`.

        The keys of joined blocks and of parts are reversed, except in "biased" joins.
        """
        own, sizes = x_BS, x_BS.shape[2:]
        if self.shards > 1:
            parts = [jax.lax.dynamic_slice_in_dim(x_BS, start, self.length, axis=1) for start in starts_1p[0]]
            own = jnp.concatenate(parts, axis=1)
        blocks = self._blocks(own, fill)
        pieces = [blocks.reshape(-1, self.block, *sizes)]
        for kind, number in self.joins:
            if kind == "halves":
                earlier = blocks.reshape(-1, 2, number * self.block, *sizes)[:, 0]
            else:
                earlier = _pad(blocks[:, :-number], (number, 0), fill).reshape(-1, self.block, *sizes)
            pieces.append(earlier if kind == "biased" else jnp.flip(earlier, axis=1))
        if self.shards > 1:
            # Reversed, the keys before a part are consecutive, nearest first, from index S - start on.
            back = _pad(jnp.flip(x_BS, axis=1), (0, x_BS.shape[1]), fill)
            for start, most in zip(starts_1p[0], (self.shards - 1, 2 * self.shards - 1), strict=True):
                first = x_BS.shape[1] - start
                pieces.append(jax.lax.dynamic_slice_in_dim(back, first, most * self.length, axis=1))
        return pieces

    def _blocks(self, x_BT: Array, fill: int) -> Array:
        """Cuts a device's sequences to [sequences or their parts, blocks, tokens of a block, ...]."""
        x_rt = x_BT.reshape(-1, self.length, *x_BT.shape[2:])
        x_rt = _pad(x_rt, (0, (self.block << self.levels) - self.length), fill)
        return x_rt.reshape(x_rt.shape[0], -1, self.block, *x_BT.shape[2:])

    def masks(self, q_ids_BT: Array, k_ids_BS: Array, starts_1p: Array, dtype: jnp.dtype) -> list[_Mask]:
        """Builds each piece's mask from the segments of queries and keys."""
        if not self.packed:  # one segment; the padding after it needs no mask
            q_ids_BT, k_ids_BS = jnp.ones_like(q_ids_BT), jnp.ones_like(k_ids_BS)
        ids = list(zip(self.queries(q_ids_BT, -1), self.keys(k_ids_BS, starts_1p, -1), strict=True))

        def seen_bts(q_bt: Array, k_bs: Array, distance: int) -> Array:
            index = jnp.arange(self.block)
            near_ts = index[:, None] - index + distance < (self.window or self.length)
            return (q_bt[:, :, None] == k_bs[:, None]) & near_ts

        def bias_b1ts(seen_bts: Array) -> Array:
            return fused.combine_bias_and_mask(None, seen_bts[:, None], dtype)

        masks = [_Mask(bias_b1ts(seen_bts(*ids[0], 0)) if self.packed else None)]
        for (q_bt, k_bs), (kind, number) in zip(ids[1:], [*self.joins, *[("parts", 0)] * 2], strict=False):
            if kind == "biased":
                seen = seen_bts(q_bt, k_bs, number * self.block)
                masks.append(_Mask(bias_b1ts(seen), None, (seen.any(axis=2), seen.any(axis=1))))
            else:  # only a row's first queries see its first keys, if both are in the same segment
                shared_b1 = q_bt[:, :1] == k_bs[:, :1]
                used = tuple(jnp.cumprod((x == x[:, :1]) & shared_b1, axis=1) > 0 for x in (q_bt, k_bs))
                masks.append(_Mask(None, tuple(jnp.sum(x, axis=1, dtype=jnp.int32) for x in used), used))
        return masks

    def run(self, q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, starts_1p: Array) -> tuple[Array, Array]:
        """Returns the output [B, T, N, V] and the log-sum-exp of the scores [B, T, N]."""
        masks = self.masks(q_ids, k_ids, starts_1p, q.dtype)
        outs, normalisers = [], []
        for *arrays, mask in zip(self.queries(q), self.keys(k, starts_1p), self.keys(v, starts_1p), masks, strict=True):
            operands, settings = self._call(arrays, mask)
            out, normaliser = fused._dot_product_attention_fwd_p.bind(*operands, is_training=True, **settings)
            outs.append(mask.of_queries(out))
            normalisers.append(mask.of_queries(jnp.swapaxes(normaliser, 1, 2), MASKED))
        normaliser_BTN = self._rows(0, normalisers[0], q.shape[:3])
        for p, normaliser in enumerate(normalisers[1:], start=1):
            before = self.queries(normaliser_BTN)[p]
            normaliser_BTN += self._rows(p, jnp.logaddexp(before, normaliser) - before, q.shape[:3])
        if len(outs) > 1:
            shares = [jnp.exp(x - y) for x, y in zip(normalisers, self.queries(normaliser_BTN), strict=True)]
            outs = [share[..., None] * out for share, out in zip(shares, outs, strict=True)]
        out_BTNV = sum(self._rows(p, out, (*q.shape[:3], v.shape[3])) for p, out in enumerate(outs))
        return jnp.asarray(out_BTNV, q.dtype), normaliser_BTN

    def gradients(
        self, q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, starts_1p: Array, *of_out: Array
    ) -> tuple[Array, ...]:
        """Returns the gradients of q, k and v, from the results of `run` and the gradient of the output."""
        masks, of_keys = self.masks(q_ids, k_ids, starts_1p, q.dtype), functools.partial(self.keys, starts_1p=starts_1p)
        found = []
        for q_p, out, normaliser, d_out, k_p, v_p, mask in zip(
            *map(self.queries, (q, *of_out)), of_keys(k), of_keys(v), masks, strict=True
        ):
            operands, settings = self._call((q_p, k_p, v_p), mask)
            normaliser = jnp.swapaxes(mask.of_queries(normaliser, NO_WEIGHT), 1, 2)
            operands = (*operands, normaliser, mask.of_queries(out), mask.of_queries(d_out))
            d_q, d_k, d_v = fused._dot_product_attention_bwd_p.bind(*operands, **settings)
            found.append((mask.of_queries(d_q), mask.of_keys(d_k), mask.of_keys(d_v)))

        def whole(d: Sequence[Array], x: Array, cut: Callable[[Array], list[Array]]) -> Array:
            in_float32 = [piece.astype(jnp.float32) for piece in d]
            return jax.linear_transpose(cut, x.astype(jnp.float32))(in_float32)[0].astype(x.dtype)

        d_q, d_k, d_v = zip(*found, strict=True)
        return whole(d_q, q, self.queries), whole(d_k, k, of_keys), whole(d_v, v, of_keys)

    def _rows(self, p: int, x_bt: Array, shape: Sequence[int]) -> Array:
        """Scatters the values of a piece's queries into zeros [B, T, ...] of this shape."""
        zeros = jax.ShapeDtypeStruct(shape, x_bt.dtype)
        return jax.linear_transpose(lambda x: self.queries(x)[p], zeros)(x_bt)[0]

    def _call(self, arrays: Sequence[Array], mask: _Mask) -> tuple[tuple[Array, ...], dict[str, Any]]:
        kind = fused.MaskType.CAUSAL if mask.used is None else fused.MaskType.NO_MASK
        lengths = None
        if mask.lengths is not None:
            kind, lengths = fused.MaskType.PADDING, tuple(jnp.maximum(number, 1) for number in mask.lengths)
        window = 0 if self.packed else self.window
        return operands(tuple(arrays), self.scale, kind, window=window, bias_b1ts=mask.bias_b1ts, lengths=lengths)


def _pad(x_bt: Array, count: tuple[int, int], fill: int) -> Array:
    return jnp.pad(x_bt, ((0, 0), count, *[(0, 0)] * (x_bt.ndim - 2)), constant_values=fill)


def _where(used_bt: Array, x_bt: Array, otherwise: float) -> Array:
    return jnp.where(used_bt.reshape(*x_bt.shape[:2], *[1] * (x_bt.ndim - 2)), x_bt, otherwise)
