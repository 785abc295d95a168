"""Tiled attention in plain JAX, for any device: no array holds an entry for every query-key pair.

Each tile of queries visits the tiles of keys one by one, and its softmax is rescaled as larger scores appear (Milakov
and Gimelshein 2018, arXiv:1805.02867). The backward pass recomputes a tile's scores from the saved log-sum-exp of each
query's scores, here called `normaliser` (FlashAttention-2, Dao 2023, arXiv:2307.08691). Fully masked pairs of tiles are
skipped.

Letters in addition to those in src/model/spec.py: i tiles of t queries, j tiles of s keys, G query heads that read one
head of keys, R = G t, V size of values, n devices that share a sequence, P pairs of tiles.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.attention_kernels.scores import CONTEXT, MASKED, ScoreSpec
from src.model.forward_context import ForwardContext
from src.model.matmul import with_gradient
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import replicate_rows, zigzag_order, zigzag_parts

# Largest number of queries or keys in a tile. Small tiles stay in a CPU's caches; on accelerators, large ones launch
# fewer kernels.
TILE = {"cpu": 128, "gpu": 1024, "tpu": 1024}


def blocked(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, spec: ScoreSpec, sinks_N: Array | None, context: ForwardContext
) -> Array:
    """Attends with q [B, T, N, H] to k, v [B, n S, K, H]; each device handles its own sequences, heads and queries."""
    layout = context.layout
    # `attend` has already made each chunk a segment; a window of the chunk's length skips the tiles outside it.
    pairs_nP3 = tile_pairs(q_BTNH.shape[1], spec.window or spec.chunk, layout)
    sharded, rows = layout.spec(("batch", "length", "heads", None)), layout.spec(("batch", "length"))
    arrays = (q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT, replicate_rows(context.segment_ids_BT, layout))
    arrays, specs = (*arrays, pairs_nP3), (*(sharded,) * 3, rows, rows, layout.spec(("length", None, None)))
    if sinks_N is not None:
        sinks_N = sinks_N.astype(jnp.promote_types(sinks_N.dtype, jnp.float32))
        arrays, specs = (*arrays, sinks_N), (*specs, layout.spec(("heads",)))
    shards, tile = layout.shards("length"), TILE[layout.platform]
    return layout.shard_map(_on_device(spec, zigzag_parts(shards) // shards, tile), specs, sharded)(*arrays)


def tile_size(length: int, tile: int) -> int:
    """Size of the fewest equal tiles, of at most `tile`, that cover `length` tokens; the last may be partial."""
    return -(-length // -(-length // tile))


def tile_pairs(length: int, window: int, layout: MeshLayout) -> np.ndarray:
    """Lists each device's pairs of tiles: [n, P, (query tile, key tile, sequence index of the tile's first query)].

    A pair is listed if some query may see some key in it: a key at or before the query and within its window (0: no
    window). Devices with fewer pairs are padded with pairs whose queries come before all keys.
    """
    n, parts = layout.shards("length"), zigzag_parts(layout.shards("length"))
    part = length // parts
    t, s = (tile_size(size, TILE[layout.platform]) for size in (part, length))
    first_ni = zigzag_order(length, layout).reshape(n, parts // n, part)[:, :, ::t].reshape(n, -1)
    distance_nij = first_ni[..., None] - np.arange(0, length, s)  # tokens from a tile's first key to its first query
    seen_nij = (distance_nij + t > 0) & (distance_nij - s + 1 < (window or length))
    pairs_nP3 = np.full((n, seen_nij.sum((1, 2)).max(), 3), (0, 0, -length), np.int32)
    for pairs_P3, seen_ij, first_i in zip(pairs_nP3, seen_nij, first_ni, strict=True):
        found = np.argwhere(seen_ij)
        pairs_P3[: len(found)] = np.column_stack([found, first_i[found[:, 0]]])
    return pairs_nP3


def _on_device(spec: ScoreSpec, parts: int, tile: int) -> Callable[..., Array]:
    """Builds attention for one device, whose queries are `parts` runs of consecutive tokens.

    The function takes q [B, T, N, H], k, v [B, S, K, H], their segments [B, T] and [B, S], pairs [1, P, 3], and
    optionally sinks [N].
    """

    def cut(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> tuple[Array, ...]:
        K = k.shape[2]
        heads = (_heads(x, K, of, tile) for x, of in ((q, parts), (k, 1), (v, 1)))
        # Padding of the last tiles has segment id 0; shifting the real ids by 1 keeps it a separate segment.
        return *heads, _cut(q_ids + 1, parts, tile), _cut(k_ids + 1, 1, tile)

    def score(q_BKRH: Array, k_BKsH: Array, q_ids_Bt: Array, k_ids_Bs: Array, pair: Array) -> tuple[Array, Array]:
        """Masked scores of a tile [B, K, R, s], and their derivatives with respect to the products q k."""
        B, K, R, _ = q_BKRH.shape
        t, s = q_ids_Bt.shape[1], k_ids_Bs.shape[1]
        scores = _sum("BKRH,BKsH->BKRs", q_BKRH, k_BKsH) * spec.scale
        slope = jnp.full((), spec.scale, scores.dtype)
        if spec.soft_cap:
            capped = jnp.tanh(scores / spec.soft_cap)
            scores, slope = spec.soft_cap * capped, spec.scale * (1 - capped * capped)
        distance_ts = (pair[2] + jnp.arange(t))[:, None] - (pair[1] * s + jnp.arange(s))
        seen_Bts = (distance_ts >= 0) & (q_ids_Bt[..., None] == k_ids_Bs[:, None])
        if spec.window:
            seen_Bts &= distance_ts < spec.window
        seen_BKGts = jnp.broadcast_to(seen_Bts[:, None, None], (B, K, R // t, t, s))
        return jnp.where(seen_BKGts.reshape(scores.shape), scores, MASKED), slope

    def run(*given: Array) -> tuple[Array, tuple]:
        *arrays, pairs = given[:6]
        sinks, (q, k, v, q_ids, k_ids) = given[6:], cut(*arrays)
        by_query, dtype = q.shape[:-1], jnp.promote_types(q.dtype, jnp.float32)

        def add(sums: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
            sums, pair = jax.lax.optimization_barrier((sums, pair))  # else XLA makes the masks of all pairs beforehand
            i, j = pair[0], pair[1]
            largest, total, out = (x[i] for x in sums)
            scores, _ = score(q[i], k[j], q_ids[i], k_ids[j], pair)
            larger = jnp.maximum(largest, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - larger[..., None]), jnp.exp(largest - larger)
            added = _sum("BKRs,BKsV->BKRV", weights.astype(v.dtype), v[j])
            new = (larger, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + added)
            return tuple(x.at[i].set(value) for x, value in zip(sums, new, strict=True)), None

        sums = (
            jnp.full(by_query, MASKED, dtype),
            jnp.zeros(by_query, dtype),
            jnp.zeros((*by_query, v.shape[-1]), dtype),
        )
        (largest, total, out), _ = jax.lax.scan(add, sums, pairs[0])
        normaliser = largest + jnp.log(total)
        out_BTNV, normaliser_BTN1 = (
            _rows(x, arrays[0], parts) for x in (out / total[..., None], normaliser[..., None])
        )
        for sinks_N in sinks:  # each sink acts as a key without a value
            of_keys_BTN1, normaliser_BTN1 = normaliser_BTN1, jnp.logaddexp(normaliser_BTN1, sinks_N[:, None])
            out_BTNV *= jnp.exp(of_keys_BTN1 - normaliser_BTN1)
        out_BTNV, normaliser_BTN1 = (checkpoint_name(x, CONTEXT) for x in (out_BTNV.astype(v.dtype), normaliser_BTN1))
        return out_BTNV, (*arrays, pairs, sinks, out_BTNV, normaliser_BTN1)

    def gradients(kept: tuple, d_out_BTNV: Array) -> tuple[Array | None, ...]:
        *arrays, pairs, sinks, out_BTNV, normaliser_BTN1 = kept
        (q, k, v, q_ids, k_ids), dtype = cut(*arrays), normaliser_BTN1.dtype
        # This sum equals the mean of the softmax weights' gradients, weighted by the softmax weights themselves.
        mean_BTN1 = jnp.sum(d_out_BTNV.astype(dtype) * out_BTNV.astype(dtype), axis=-1, keepdims=True)
        d_out, mean, normaliser = (_heads(x, k.shape[2], parts, tile) for x in (d_out_BTNV, mean_BTN1, normaliser_BTN1))

        def add(sums: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
            sums, pair = jax.lax.optimization_barrier((sums, pair))  # else XLA makes the masks of all pairs beforehand
            i, j = pair[0], pair[1]
            d_q, d_k, d_v = sums
            scores, slope = score(q[i], k[j], q_ids[i], k_ids[j], pair)
            weights = jnp.exp(scores - normaliser[i])
            d_weights = _sum("BKRV,BKsV->BKRs", d_out[i], v[j])
            d_scores = (weights * (d_weights - mean[i]) * slope).astype(q.dtype)
            d_q = d_q.at[i].add(_sum("BKRs,BKsH->BKRH", d_scores, k[j]))
            d_k = d_k.at[j].add(_sum("BKRs,BKRH->BKsH", d_scores, q[i]))
            d_v = d_v.at[j].add(_sum("BKRs,BKRV->BKsV", weights.astype(v.dtype), d_out[i]))
            return (d_q, d_k, d_v), None

        sums, _ = jax.lax.scan(add, tuple(jnp.zeros(x.shape, dtype) for x in (q, k, v)), pairs[0])
        of_rows = zip(sums, arrays, (parts, 1, 1), strict=False)
        d_q, d_k, d_v = (_rows(d_x.astype(x.dtype), x, cut_in) for d_x, x, cut_in in of_rows)
        shares = (jnp.exp(sinks_N[:, None] - normaliser_BTN1) for sinks_N in sinks)
        d_sinks = [-jnp.sum(share * mean_BTN1, axis=(0, 1))[:, 0] for share in shares]
        return d_q, d_k, d_v, None, None, None, *d_sinks

    return with_gradient(run, gradients)


def _sum(einsum: str, x: Array, y: Array) -> Array:
    return jnp.einsum(einsum, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _cut(x_BT: Array, parts: int, tile: int) -> Array:
    """Cuts each part of the sequences [B, T, ...] into tiles, padding the last one: [i, B, t, ...]."""
    B, T, *rest = x_BT.shape
    size = tile_size(T // parts, tile)
    x_BT = x_BT.reshape(B * parts, T // parts, *rest)
    x_BT = jnp.pad(x_BT, ((0, 0), (0, -(T // parts) % size), *[(0, 0)] * len(rest)))
    return jnp.moveaxis(x_BT.reshape(B, -1, size, *rest), 1, 0)


def _heads(x_BTNH: Array, K: int, parts: int, tile: int) -> Array:
    """Cuts sequences into tiles and groups query heads by the key head they read: [i, B, K, R, H]."""
    x_iBtNH = _cut(x_BTNH, parts, tile)
    i, B, t, N, H = x_iBtNH.shape
    return jnp.moveaxis(x_iBtNH, 2, 3).reshape(i, B, K, N // K * t, H)


def _rows(x_iBKRH: Array, like_BTNH: Array, parts: int) -> Array:
    """Joins tiles back into sequences of the length of `like_BTNH`: the inverse of `_heads`."""
    B, T, N, _ = like_BTNH.shape
    x_iBNtH = x_iBKRH.reshape(x_iBKRH.shape[0], B, N, -1, x_iBKRH.shape[-1])
    x_BitNH = jnp.moveaxis(x_iBNtH, (0, 3), (1, 2))
    return x_BitNH.reshape(B * parts, -1, N, x_iBKRH.shape[-1])[:, : T // parts].reshape(B, T, N, -1)
