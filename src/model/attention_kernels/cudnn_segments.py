"""cuDNN's attention of packed sequences, called with a list of segments: scores between two segments cost nothing.

A call takes the first token and the length of each segment in the batch, up to a fixed number of segments. In the
backward pass, cuDNN uses memory for this number of segments of the greatest length, whatever their real lengths. The
segments are therefore divided by length into classes, each four times shorter than the one before, with a call for
each. A class whose greatest length is L lists four segments for every L tokens of the batch: all that the batch can
hold, except in the last class. If all of a batch's segments have room in the first class, a single call takes them,
which is faster than one per class. A batch with too many segments for the last class, which are then shorter than a
quarter of L on average, is left to another kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused

from src.model.attention_kernels.scores import ScoreSpec

RATIO = 4  # of the greatest lengths L of consecutive classes; also the segments listed for every L tokens
SHORT = 256  # the last class's greatest length, at most
MULTIPLE = 64  # every class's greatest length must be a multiple of this: others were not tried on a GPU


# JAX 0.12's primitives take a function of the scores too.
_NO_SCORE_MOD = {"score_mod_name": None, "score_mod_jaxpr": None} if jax.__version_info__ >= (0, 12) else {}


def operands(
    arrays: tuple[Array, ...],
    scale: float,
    mask_type: fused.MaskType,
    *,
    window: int = 0,
    bias_b1ts: Array | None = None,
    lengths: tuple[Array, ...] | None = None,
    offsets: tuple[Array, ...] | None = None,
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Builds the operands and settings of a call of cuDNN's attention with q, k, v [b, t, n, h].

    `lengths`, in tokens, and `offsets`, in array elements, are pairs: of queries and of keys. An empty array stands for
    an operand that is None.
    """
    none = jnp.zeros(0, arrays[0].dtype)
    settings = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias_b1ts is not None, False),  # the bias needs no gradient
        "mask_type": mask_type,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
        **_NO_SCORE_MOD,
    }
    bias = none if bias_b1ts is None else bias_b1ts
    return (*arrays, bias, *(lengths or (none, none)), *(offsets or (none, none)), none, none), settings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentClass:
    """A batch's segments whose lengths are in one range.

    F is the number of the batch's tokens, S the number of segments that the class has room for.
    """

    longest: int = field(metadata={"static": True})  # L, their greatest length
    count_1: Array  # number of its segments
    starts_S: Array  # first token of each segment; F if there are fewer segments
    lengths_S: Array  # tokens of each segment; 0 if there are fewer segments
    member_F: Array  # whether a token's segment is of this class
    slot_F: Array  # the number of that segment in the class
    position_F: Array  # a token's index in its segment


@dataclass(frozen=True)
class Segments:
    """Causal attention with q, k, v [B, T, N or K, H] within each segment, a run of equal ids [B, T]."""

    scale: float
    window: int

    def run(self, q: Array, k: Array, v: Array, classes: Sequence[SegmentClass]) -> tuple[Array, ...]:
        """Returns the output [B, T, N, H] and log-sum-exp [B, T, N]; arbitrary for segments that no class lists."""
        B, T, N, _ = q.shape
        results: list[tuple[SegmentClass, tuple[Array, ...]]] = []
        for each in classes:
            given, settings = self._call((q, k, v), each)
            out, normaliser_SNL = fused._dot_product_attention_fwd_p.bind(*given, is_training=True, **settings)
            slot_F, position_F = jnp.maximum(each.slot_F, 0), jnp.minimum(each.position_F, each.longest - 1)
            normaliser_FN = normaliser_SNL[jnp.minimum(slot_F, each.starts_S.size - 1), :, position_F]
            results.append((each, (out.reshape(q.shape), normaliser_FN.reshape(B, T, N))))
        return _of_own_class(results, (B, T))

    def gradients(
        self,
        q: Array,
        k: Array,
        v: Array,
        classes: Sequence[SegmentClass],
        out: Array,
        normaliser_BTN: Array,
        d_out: Array,
    ) -> tuple[Array, ...]:
        """Returns the gradients of q, k and v, from the results of `run` and the gradient of the output."""
        B, T, N, _ = q.shape
        normaliser_FN = normaliser_BTN.reshape(B * T, N)
        results: list[tuple[SegmentClass, tuple[Array, ...]]] = []
        for each in classes:
            given, settings = self._call((q, k, v), each)
            token_SL = each.starts_S[:, None] + jnp.arange(each.longest)
            inside_SL = jnp.arange(each.longest) < each.lengths_S[:, None]
            found_SLN = normaliser_FN[jnp.where(inside_SL, token_SL, 0)]
            # cuDNN's forward pass writes -inf after a segment's end.
            found_SNL = jnp.swapaxes(jnp.where(inside_SL[..., None], found_SLN, -jnp.inf), 1, 2)
            of_out = (x.reshape(-1, each.longest, *x.shape[2:]) for x in (out, d_out))
            found = fused._dot_product_attention_bwd_p.bind(*given, found_SNL, *of_out, **settings)
            results.append((each, tuple(new.reshape(x.shape) for new, x in zip(found, (q, k, v), strict=True))))
        return _of_own_class(results, (B, T))

    def _call(self, arrays: tuple[Array, ...], each: SegmentClass) -> tuple[tuple[Array, ...], dict[str, Any]]:
        # Offsets count array elements, not tokens, so the segments need not be inside the rows that cuDNN sees.
        q, k, v = (x.reshape(-1, each.longest, *x.shape[2:]) for x in arrays)
        rows, tokens = q.shape[0], q.shape[0] * each.longest
        lengths = each.lengths_S.reshape(rows, -1)
        starts = jnp.append(each.starts_S, jnp.full(rows, tokens, jnp.int32)).reshape(rows, -1)
        offsets = tuple(starts * (x.shape[2] * x.shape[3]) for x in (q, k))
        kind = fused.MaskType.PADDING_CAUSAL
        return operands((q, k, v), self.scale, kind, window=self.window, lengths=(lengths, lengths), offsets=offsets)


def can_divide(T: int) -> bool:
    """Whether `list_segments` can divide sequences of T tokens."""
    return all(T % L == 0 and L % MULTIPLE == 0 for L in _longest(T))


def can_compute(tokens: int, spec: ScoreSpec, heads: int) -> bool:
    """Whether `Segments` can compute attention of these `tokens` and query `heads` on a device."""
    # cuDNN uses the keys' offsets, which are 32-bit numbers, for the values too. Larger heads were not tried on a GPU.
    return spec.head_dim == spec.value_dim <= 128 and tokens * heads * spec.head_dim < 2**31


def _of_own_class(results: list[tuple[SegmentClass, tuple[Array, ...]]], rows: tuple[int, ...]) -> tuple[Array, ...]:
    """Takes each token's entries of arrays [B, T, ...] from the results of its segment's class."""
    (_, chosen), *others = results
    for each, arrays in others:
        member = each.member_F.reshape(rows)
        of_dims = [member.reshape(*rows, *[1] * (x.ndim - 2)) for x in arrays]
        chosen = tuple(map(jnp.where, of_dims, arrays, chosen))
    return chosen


def _longest(T: int) -> list[int]:
    """Lists the greatest lengths of the classes of segments in sequences of T tokens."""
    longest = [T]
    while longest[-1] > SHORT:
        longest.append(-(-longest[-1] // RATIO))
    return longest


def _bounds(ids_BT: Array) -> tuple[Array, Array]:
    """For each of the batch's F tokens, the first token of its segment, and the first one after it: [F] each."""
    B, T = ids_BT.shape
    begins_F = jnp.concatenate([jnp.ones((B, 1), bool), ids_BT[:, 1:] != ids_BT[:, :-1]], axis=1).reshape(-1)
    index_F = jnp.arange(B * T, dtype=jnp.int32)
    ends_F = jnp.append(begins_F[1:], True)
    starts_F = jax.lax.cummax(jnp.where(begins_F, index_F, 0))
    return starts_F, jax.lax.cummin(jnp.where(ends_F, index_F + 1, B * T), reverse=True)


class SegmentLists(NamedTuple):
    """A batch's segments, divided into classes in one or two ways, and the choice between these."""

    ids_BT: Array  # the segment ids that they were made from
    choice_1: Array  # index of the first division in which all segments fit; len(divisions) if there is none
    divisions: list[list[SegmentClass]]  # the fastest first


def list_segments(ids_BT: Array) -> SegmentLists:
    """Divides a batch's segments, runs of equal ids, into one class, which needs a single call, and by length."""
    longest = _longest(ids_BT.shape[1])
    divisions = [classes_of(ids_BT, longest[:count]) for count in sorted({1, len(longest)})]
    # Only the last class may lack room.
    fits = [classes[-1].count_1 <= classes[-1].starts_S.size for classes in divisions]
    choice_1 = jnp.argmax(jnp.stack([*fits, jnp.ones(1, bool)]), axis=0).astype(jnp.int32)
    return SegmentLists(ids_BT, choice_1, divisions)


def classes_of(ids_BT: Array, longest: Sequence[int]) -> list[SegmentClass]:
    """Divides a batch's segments into classes by length; `longest`: the greatest of each, in falling order."""
    starts_F, ends_F = _bounds(ids_BT)
    (B, T), lengths_F = ids_BT.shape, ends_F - starts_F
    found, index_F = [], jnp.arange(B * T, dtype=jnp.int32)
    for L, below in zip(longest, [*longest[1:], 0], strict=True):
        slots = B * T // L * RATIO
        member_F = (lengths_F > below) & (lengths_F <= L)
        first_F = member_F & (starts_F == index_F)
        (starts_S,) = jnp.nonzero(first_F, size=slots, fill_value=B * T)
        lengths_S = jnp.where(starts_S < B * T, lengths_F[jnp.minimum(starts_S, B * T - 1)], 0)
        slot_F = jnp.cumsum(first_F, dtype=jnp.int32) - 1
        listed = jnp.sum(first_F)[None], starts_S.astype(jnp.int32), lengths_S
        found.append(SegmentClass(L, *listed, member_F, slot_F, index_F - starts_F))
    return found
