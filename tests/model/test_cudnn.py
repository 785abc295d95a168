"""What cuDNN is asked for: its primitives run on GPUs only, so here their formulas stand for them.

The stand-ins return NaN where cuDNN's results are not documented: past the lengths that a call states.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.attention import with_segment_lists
from src.model.attention_kernels import cudnn as module
from src.model.attention_kernels import cudnn_segments
from src.model.attention_kernels.scores import ScoreSpec
from src.parallel.sequence import zigzag_order
from tests.model.test_blocked import computed, context_of, inputs, segments_of, written_out
from tests.tiny import assert_close, make

CALLS = []


def seen(q, k, bias, q_len, k_len, mask_type, window):
    """[b, 1, t, s]: what a call's queries see, and its lengths [b]."""
    (b, t), s = q.shape[:2], k.shape[1]
    query, key = np.arange(t)[:, None], np.arange(s)
    mask = jnp.ones((b, 1, t, s), bool)
    if "CAUSAL" in mask_type.name:
        mask &= query >= key
    if window:
        mask &= query - key < window
    if bias.size:
        mask &= bias == 0
    if "PADDING" not in mask_type.name:
        return mask, jnp.full(b, t), jnp.full(b, s)
    mask &= (query < q_len[:, None, None, None]) & (key < k_len[:, None, None, None])
    # Of no queries or keys its results are not documented.
    defined = (q_len > 0) & (k_len > 0)
    return mask, jnp.where(defined, q_len, 0), jnp.where(defined, k_len, 0)


def repeated(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def weights_of(q, k, mask, scale):
    """exp of the scores [b, n, t, s], and their sum."""
    weights = jnp.where(mask, jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, repeated(k, q)) * scale), 0)
    return weights, weights.sum(-1)


def defined(x, lengths):
    return jnp.where(np.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None], x, jnp.nan)


def tokens_of(x, lengths, offsets):
    """[S, L]: the tokens of each listed segment, one past the last where it has ended; and their number."""
    rows, L, heads, size = x.shape
    starts = offsets.reshape(-1)[: lengths.size] // (heads * size)
    inside = np.arange(L) < lengths.reshape(-1)[:, None]
    return jnp.where(inside, starts[:, None] + np.arange(L), rows * L)


def take(x, tokens):
    """[S, L, ...] from [rows, L, ...]; 0 past a segment's end."""
    return jnp.concatenate([x.reshape(-1, *x.shape[2:]), jnp.zeros((1, *x.shape[2:]))])[tokens]


def put(x, tokens, like):
    """[rows, L, ...] from [S, L, ...]; NaN outside the segments, which cuDNN does not write."""
    flat = jnp.full((like.shape[0] * like.shape[1] + 1, *x.shape[2:]), jnp.nan).at[tokens].set(x)
    return flat[:-1].reshape(*like.shape[:2], *x.shape[2:])


class Forward:
    @staticmethod
    def bind(q, k, v, bias, q_len, k_len, *others, is_training, **settings):
        assert is_training
        if others[0].size:
            CALLS.append(("SEGMENTS", q_len.shape))
            of_q, of_k = (tokens_of(x, n, o) for x, n, o in zip((q, k), (q_len, k_len), others[:2], strict=True))
            q_len, k_len = q_len.reshape(-1), k_len.reshape(-1)
            given = (take(q, of_q), take(k, of_k), take(v, of_k), bias, q_len, k_len)
            out, normaliser = Forward.compute(*given, **settings)
            return put(out, of_q, q), normaliser
        assert all(other.size == 0 for other in others)
        CALLS.append((settings["mask_type"].name, bias.shape))
        return Forward.compute(q, k, v, bias, q_len, k_len, **settings)

    @staticmethod
    def compute(q, k, v, bias, q_len, k_len, scale, mask_type, sliding_window_length, **settings):
        mask, q_len, k_len = seen(q, k, bias, q_len, k_len, mask_type, sliding_window_length)
        weights, total = weights_of(q, k, mask, scale)
        out = jnp.einsum("bnts,bsnh->btnh", weights / total[..., None], repeated(v, q))
        normaliser = jnp.where(np.arange(q.shape[1]) < q_len[:, None, None], jnp.log(total), jnp.nan)
        return defined(out, q_len), normaliser


class Backward:
    @staticmethod
    def bind(q, k, v, bias, q_len, k_len, *others, **settings):
        *others, normaliser, out, d_out = others
        if others[0].size:
            of_q, of_k = (tokens_of(x, n, o) for x, n, o in zip((q, k), (q_len, k_len), others[:2], strict=True))
            q_len, k_len = q_len.reshape(-1), k_len.reshape(-1)
            arrays = (take(q, of_q), take(k, of_k), take(v, of_k), bias, q_len, k_len)
            # It ignores the normalisers past a segment's end, if they are what its own forward pass writes there.
            inside = np.arange(q.shape[1]) < q_len[:, None, None]
            given = jnp.all(inside | (normaliser == -jnp.inf))
            normaliser = jnp.where(inside, jnp.where(given, normaliser, jnp.nan), 0)
            of_out = (normaliser, take(out, of_q), take(d_out, of_q))
            found = Backward.compute(*arrays, *of_out, **settings)
            return [put(d, tokens, x) for d, tokens, x in zip(found, (of_q, of_k, of_k), (q, k, v), strict=True)]
        assert all(other.size == 0 for other in others)
        return Backward.compute(q, k, v, bias, q_len, k_len, normaliser, out, d_out, **settings)

    @staticmethod
    def compute(
        q, k, v, bias, q_len, k_len, normaliser, out, d_out, scale, mask_type, sliding_window_length, **settings
    ):
        mask, q_len, k_len = seen(q, k, bias, q_len, k_len, mask_type, sliding_window_length)
        weights = weights_of(q, k, mask, scale)[0] * jnp.exp(-normaliser)[..., None]
        d_weights = jnp.einsum("btnh,bsnh->bnts", d_out, repeated(v, q))
        d_scores = weights * (d_weights - jnp.moveaxis((out * d_out).sum(-1), 1, 2)[..., None]) * scale
        d_q = jnp.einsum("bnts,bsnh->btnh", d_scores, repeated(k, q))
        d_k, d_v = (
            jnp.einsum("bnts,btnh->bsnh", *products).reshape(*k.shape[:3], q.shape[2] // k.shape[2], -1).sum(3)
            for products in ((d_scores, q), (weights, d_out))
        )
        return [defined(d_q, q_len), defined(d_k, k_len), defined(d_v, k_len)]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """And as if rows of these tests were long: blocks are of at most 16 tokens."""
    monkeypatch.setattr(module.fused, "_dot_product_attention_fwd_p", Forward)
    monkeypatch.setattr(module.fused, "_dot_product_attention_bwd_p", Backward)
    # The number that bfloat16's masks have, for float32 too.
    monkeypatch.setattr(module.fused, "get_large_negative_number", lambda dtype: jnp.asarray(-2 << 40, dtype))
    monkeypatch.setattr(module, "LONGEST_MASK", 60)
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(cudnn_segments, "SHORT", 16)
    monkeypatch.setattr(cudnn_segments, "MULTIPLE", 1)
    CALLS.clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(module, "compute_capability", lambda device: 9.0)


@pytest.mark.parametrize(
    ("kv_heads", "value_dim", "length"),
    [
        *((2, 16, 40), (4, 8, 200), (2, 16, 346)),
        *(pytest.param(2, 16, length, marks=pytest.mark.long) for length in (128, 200)),
        *(pytest.param(4, 8, length, marks=pytest.mark.long) for length in (40, 128, 346)),
    ],
)
def test_pieces_of_packed_rows_are_the_attention_of_whole_rows(length, kv_heads, value_dim):
    """Lengths of one piece with a mask, of halves, of blocks that divide by nothing, and values of another size."""
    arrays, segments = inputs(kv_heads, value_dim, length), segments_of(max(length, 70))[:, :length]
    *values, direction = (x.astype(np.float32) for x in arrays)
    found = computed("cudnn_flash", *values, direction, None, context_of(make()[1].layout, segments))
    assert_close(found, written_out(*arrays, None, segments), 1e-5)
    halvings = 0 if length == 40 else math.ceil(math.log2(length / 16))
    assert len(CALLS) == 1 + halvings
    assert max(math.prod(bias) for _, bias in CALLS) <= 2 * (16**2 << halvings if halvings else 40**2)


@pytest.mark.parametrize(("facts", "packed"), [({}, False), ({"window": 30}, False), ({"chunk": 40}, True)])
def test_rows_of_one_segment_and_chunks(facts, packed):
    """Unpacked rows have no mask at all, with a window neither; what padding attends to is for nobody to read."""
    arrays, segments = inputs(), np.ones((2, 200), np.int32)
    context = dataclasses.replace(context_of(make()[1].layout, segments), packed=packed)
    *values, direction = (x.astype(np.float32) for x in arrays)
    assert_close(
        computed("cudnn_flash", *values, direction, None, context, **facts),
        written_out(*arrays, None, segments, **facts),
        1e-5,
    )
    if not packed:
        assert [bias for _, bias in CALLS] == [(0,)]


@pytest.mark.parametrize(
    ("length", "window"),
    [
        (200, 2),
        (128, 17),
        (200, 33),
        (200, 60),
        *(pytest.param(128, n, marks=pytest.mark.long) for n in (7, 16, 18, 150)),
    ],
)
def test_windows_in_packed_rows_join_each_block_with_those_before_it(length, window):
    arrays, segments = inputs(length=length), segments_of(length)
    *values, direction = (x.astype(np.float32) for x in arrays)
    found = computed("cudnn_flash", *values, direction, None, context_of(make()[1].layout, segments), window=window)
    assert_close(found, written_out(*arrays, None, segments, window=window), 1e-5)
    assert max(math.prod(bias) for _, bias in CALLS) <= 2 * 256 * 16


def test_a_window_in_short_packed_rows_is_in_the_mask():
    arrays, segments = inputs(length=40), segments_of(70)[:, :40]
    *values, direction = (x.astype(np.float32) for x in arrays)
    found = computed("cudnn_flash", *values, direction, None, context_of(make()[1].layout, segments), window=7)
    assert_close(found, written_out(*arrays, None, segments, window=7), 1e-5)
    assert len(CALLS) == 1


CONTEXT = {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 4}
MESHES = {
    "context 4": CONTEXT,
    "context 2 x tensor 2": {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2},
    "context 4 x data 2": {**CONTEXT, "ici_data_parallelism": 2},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_that_share_rows_compute_the_attention_of_one(mesh, packed):
    size = math.prod(size for key, size in MESHES[mesh].items() if key.endswith("_parallelism"))
    layout = make(devices=size, **MESHES[mesh])[1].layout
    arrays, segments = inputs(), segments_of() if packed else np.ones((2, 200), np.int32)
    order = zigzag_order(200, layout)
    axes = ("heads", "kv_heads", "kv_heads", "heads")
    placed = [
        jax.device_put(np.float32(x[:, order]), layout.sharding(("batch", "length", axis, None)))
        for x, axis in zip(arrays, axes, strict=True)
    ]
    context = dataclasses.replace(context_of(layout, segments), packed=packed)
    out, (*gradients, _) = computed("cudnn_flash", *placed, None, context)
    back = np.argsort(order)
    out, *gradients = (x[:, back] for x in (out, *gradients))
    assert_close((out, (*gradients, None)), written_out(*arrays, None, segments), 1e-5)
    assert {kind for kind, _ in CALLS} == {"CAUSAL", "PADDING"}


def _nans(arrays):
    return tuple(x * jnp.nan for x in arrays)


def ids_of(*rows):
    """Segment ids [B, T] of rows given by the lengths of their segments."""
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows]).astype(np.int32)


SEGMENTS = {  # of 128 tokens; the last class has segments of up to 8 tokens, and room for four in 8 tokens
    "of every length": [[1, 2, 8, 9, 31, 32, 33, 12], [7, 40, 81]],
    "one in a row": [[128], [128]],
    "as many of a length as there can be": [[33, 33, 33, 29], [9] * 14 + [2]],
    "of one token": [[1] * 64 + [64], [96] + [1] * 32],
    "as many as a class of all lengths has room for": [[1, 2, 60, 33, 32], [5, 120, 3]],
}
ONE_CLASS = ("one in a row", "as many as a class of all lengths has room for")


# Every kind of row, window and heads once.
SHORT = set(zip(SEGMENTS, (2, 4, 2, 4, 2), (0, 5, 20, 0, 5), strict=True))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("rows", "kv_heads", "window"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in itertools.product(SEGMENTS, (2, 4), (0, 5, 20))
    ],
)
def test_packed_rows_are_computed_by_their_segments(monkeypatch, rows, kv_heads, window):
    arrays, segments = inputs(kv_heads, length=128), ids_of(*SEGMENTS[rows])
    run, run_lists = module._Pieces.run, cudnn_segments.Segments.run
    used = 1 if rows in ONE_CLASS else 3  # the number of classes
    monkeypatch.setattr(module._Pieces, "run", lambda *given: _nans(run(*given)))  # and nothing of these

    def run_used(self, q, k, v, classes):
        found = run_lists(self, q, k, v, classes)
        return found if len(classes) == used else _nans(found)

    monkeypatch.setattr(cudnn_segments.Segments, "run", run_used)
    *values, direction = (x.astype(np.float32) for x in arrays)
    found = computed("cudnn_flash", *values, direction, None, context_of(make()[1].layout, segments), window=window)
    assert_close(found, written_out(*arrays, None, segments, window=window), 1e-5)
    # All as segments of up to 128 tokens; and of 128, 32 and 8, which each use memory for four in so many tokens.
    assert [shape for kind, shape in CALLS if kind == "SEGMENTS"] == [(2, 4), *[(2, 4), (8, 4), (32, 4)]]


def with_lists(context):
    """The context with its segments' lists, compiled: operation by operation they are a hundred small programs."""

    def lists(ids_BT):
        given = dataclasses.replace(context, kernel="cudnn_flash", segment_ids_BT=ids_BT)
        return with_segment_lists(given).segment_lists

    found = jax.jit(lists)(context.segment_ids_BT)._replace(ids_BT=context.segment_ids_BT)
    return dataclasses.replace(context, segment_lists=found)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("for_all_layers", [True, False])
def test_each_device_lists_its_own_segments(for_all_layers):
    """The first row's eight segments are listed by length, the second's three in one class."""
    arrays, segments = inputs(2, length=128), ids_of(*SEGMENTS["of every length"])
    layout = make(devices=2)[1].layout
    rows = layout.sharding(("batch", "length", None, None))
    *placed, direction = (jax.device_put(np.float32(x), rows) for x in arrays)
    context = context_of(layout, jnp.asarray(segments))
    if for_all_layers:
        context = with_lists(context)
        assert context.segment_lists.choice_1.tolist() == [1, 0]
    found = computed("cudnn_flash", *placed, direction, None, context)
    assert_close(found, written_out(*arrays, None, segments), 1e-5)


@pytest.mark.usefixtures("hopper")
def test_lists_of_other_segments_are_not_used():
    """As when attention in chunks makes each chunk a segment."""
    arrays, segments = inputs(2, length=128), ids_of(*SEGMENTS["of every length"])
    context = context_of(make()[1].layout, jnp.ones_like(jnp.asarray(segments)))
    context = with_lists(context)
    context = dataclasses.replace(context, segment_ids_BT=jnp.asarray(segments))
    *values, direction = (x.astype(np.float32) for x in arrays)
    assert_close(computed("cudnn_flash", *values, direction, None, context), written_out(*arrays, None, segments), 1e-5)


@pytest.mark.usefixtures("hopper")
def test_rows_of_more_short_segments_than_are_listed_are_computed_in_pieces(monkeypatch):
    """Two rows of 40 tokens have classes of 40 and 10 tokens; 32 segments of up to 10 tokens fit."""
    arrays = inputs(2, length=40)
    *values, direction = (x.astype(np.float32) for x in arrays)
    layout, run = make()[1].layout, cudnn_segments.Segments.run
    for fits, rows in (
        (True, [[30, 10], [11, 29]]),
        (True, [[1] * 16 + [24], [2] * 15 + [10]]),
        (False, [[1] * 17 + [23], [2] * 15 + [10]]),
    ):
        monkeypatch.setattr(cudnn_segments.Segments, "run", run if fits else lambda *given: _nans(run(*given)))
        segments = ids_of(*rows)
        lists = jax.jit(cudnn_segments.list_segments)(jnp.asarray(segments))
        assert int(lists.choice_1[0] < 2) == fits
        found = computed("cudnn_flash", *values, direction, None, context_of(layout, segments))
        assert_close(found, written_out(*arrays, None, segments), 1e-5)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "packed", "measured"),
    [(16, 16, False, 134.2e6), (32, 8, False, 538.9e6), (16, 16, True, 541.1e6)],
)
def test_the_workspace_is_what_a_gpu_measured(heads, kv_heads, packed, measured):
    """cuDNN 9.19's on an H200, four rows of 4,096 tokens and heads of 128, packed ones as four segments each."""
    found = module.workspace_bytes(4, 4096, ScoreSpec(heads, 128, 128, 1.0), kv_heads, packed, make()[1].layout)
    assert found == pytest.approx(measured, rel=0.01)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("length", "facts"), [(122, {}), (128, {"value_dim": 8}), (128, {"mesh": CONTEXT})])
def test_what_lists_cannot_say_is_computed_in_pieces(length, facts):
    """Lengths that classes do not divide, values of another size, and rows that devices share."""
    mesh = facts.pop("mesh", {})
    arrays, segments = inputs(length=length, **facts), segments_of(128)[:, :length]
    layout = make(devices=4 if mesh else 1, **mesh)[1].layout
    order = zigzag_order(length, layout)
    *values, direction = (x[:, order].astype(np.float32) for x in arrays)
    out, (*gradients, _) = computed("cudnn_flash", *values, direction, None, context_of(layout, segments))
    back = np.argsort(order)
    found = (out[:, back], (*(x[:, back] for x in gradients), None))
    assert_close(found, written_out(*arrays, None, segments), 1e-5)
    assert "SEGMENTS" not in {kind for kind, _ in CALLS}


@pytest.mark.parametrize(("length", "listed"), [(4096, True), (64, True), (1280, False), (5000, False), (4094, False)])
def test_lengths_whose_classes_are_whole_tiles_are_listed(monkeypatch, length, listed):
    """At 1,280 tokens classes would have up to 1,280, 320 and 80."""
    monkeypatch.undo()
    assert cudnn_segments.can_divide(length) == listed


def test_heads_and_batches_that_offsets_cannot_say_are_not_listed():
    fitting = ScoreSpec(4, 128, 128, 1.0)
    assert cudnn_segments.can_compute(2**20, fitting, 8)
    assert not cudnn_segments.can_compute(2**21, fitting, 8), "2^31 numbers"
    assert not cudnn_segments.can_compute(4096, ScoreSpec(4, 256, 256, 1.0), 4)
    assert not cudnn_segments.can_compute(4096, ScoreSpec(4, 128, 64, 1.0), 4)
