"""Attention in tiles against softmax written out in float64, on one device and on several that share rows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.attention import attend, repeat_kv
from src.model.attention_kernels import blocked as module
from src.model.attention_kernels.blocked import tile_pairs
from src.model.attention_kernels.choose import choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.forward_context import ForwardContext
from src.model.parts import attention_scores
from src.parallel.mesh import make_layout
from src.parallel.sequence import zigzag_order
from tests.tiny import Trainer, assert_close, load, make, packed_rows, spec_of

ROWS, LENGTH, HEADS = 2, 200, 4
SINKS = np.array([1.0, -2.0, 0.5, 6.0])


def inputs(kv_heads=2, value_dim=16, length=LENGTH):
    """q, k, v, and a direction in which their gradients are taken: float32 values in float64."""
    rng = np.random.default_rng(0)
    sizes = ((HEADS, 16), (kv_heads, 16), (kv_heads, value_dim), (HEADS, value_dim))
    return [rng.normal(size=(ROWS, length, *size)).astype(np.float32).astype(np.float64) for size in sizes]


def segments_of(length=LENGTH):
    """Rows of three segments and padding, which end at other places in each row."""
    ends = np.array([[length // 3, length // 2, length - 9], [5, length - 60, length - 1]])
    ids = 1 + np.sum(np.arange(length)[None, :, None] >= ends[:, None], axis=-1)
    return np.where(ids > 3, 0, ids).astype(np.int32)


def positions_of(segments):
    starts = np.concatenate([np.ones((ROWS, 1), bool), np.diff(segments, axis=1) != 0], axis=1)
    index = np.arange(segments.shape[1])
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def written_out(q, k, v, direction, sinks, segments, window=0, chunk=0, soft_cap=0.0):
    """Output and gradients by NumPy, from the formulas, in float64."""
    B, T, N, H = q.shape
    K, scale, positions = k.shape[2], 1 / math.sqrt(H), positions_of(segments)
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    products = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = soft_cap * np.tanh(products / soft_cap) if soft_cap else products
    index = np.arange(T)
    seen = (segments[:, :, None] == segments[:, None]) & (index[:, None] >= index)
    seen &= index[:, None] - index < (window or T)
    if chunk:
        seen &= (positions // chunk)[:, :, None] == (positions // chunk)[:, None]
    weights = np.where(seen[:, None], np.exp(np.where(seen[:, None], scores, 0)), 0)
    total = weights.sum(-1, keepdims=True) + (np.exp(sinks)[:, None, None] if sinks is not None else 0)
    weights /= total
    out = np.einsum("bnts,bsnh->btnh", weights, v)
    d_weights = np.einsum("btnh,bsnh->bnts", direction, v)
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean)
    if soft_cap:
        d_scores *= 1 - (scores / soft_cap) ** 2
    d_q, d_k = (np.einsum(e, d_scores * scale, x) for e, x in (("bnts,bsnh->btnh", k), ("bnts,btnh->bsnh", q)))
    d_v = np.einsum("bnts,btnh->bsnh", weights, direction)
    d_k, d_v = (x.reshape(B, T, K, N // K, -1).sum(3) for x in (d_k, d_v))
    d_sinks = None if sinks is None else -(np.exp(sinks)[:, None, None] / total * mean).sum((0, 2, 3))
    return out, (d_q, d_k, d_v, d_sinks)


def computed(kernel, q, k, v, direction, sinks, context, **facts):
    spec = ScoreSpec(q.shape[2], q.shape[3], v.shape[3], 1 / math.sqrt(q.shape[3]), **facts)
    context = dataclasses.replace(context, kernel=kernel)

    @jax.jit
    def run(q, k, v, sinks):
        def attention(q, k, v, sinks):
            k, v = (repeat_kv(x, q.shape[2], context.layout) for x in (k, v))
            return attend(q, k, v, spec, sinks, context)

        out, pull_back = jax.vjp(attention, q, k, v, sinks)
        return out, pull_back(jnp.asarray(direction, out.dtype))

    return jax.device_get(run(q, k, v, sinks))


def context_of(layout, segments):
    rows = (jnp.asarray(x[:, zigzag_order(x.shape[1], layout)]) for x in (positions_of(segments), segments))
    return ForwardContext(*rows, layout, "", packed=True)


CASES = {
    "causal": ({}, {}, None),
    "one head of keys": ({"kv_heads": 1}, {}, None),
    "window": ({}, {"window": 50}, None),
    "window of one tile": ({}, {"window": 40}, None),
    "window of one key": ({}, {"window": 1}, None),
    "chunk": ({}, {"chunk": 40}, None),
    "soft cap": ({}, {"soft_cap": 2.0}, None),
    "sinks": ({}, {}, SINKS),
    "all of it": ({"kv_heads": 4, "value_dim": 24}, {"window": 70, "soft_cap": 3.0}, SINKS),
    "narrow values": ({"value_dim": 8}, {}, None),
}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setitem(module.TILE, "cpu", 40)


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_attention_in_float64(case, small_tiles):
    """In float64 to its rounding, in float32 as near as plain attention is, both by formulas in NumPy."""
    shapes, facts, sinks = CASES[case]
    layout, segments, arrays = make()[1].layout, segments_of(), inputs(**shapes)
    expected = written_out(*arrays, sinks, segments, **facts)
    with jax.enable_x64(True):
        found = computed("blocked", *arrays, sinks, context_of(layout, segments), **facts)
    assert found[0].dtype == np.float64
    assert_close(found, expected, 1e-12)
    *arrays, direction = (x.astype(np.float32) for x in arrays)
    in_float32 = None if sinks is None else sinks.astype(np.float32)
    errors, largest = [], max(np.max(np.abs(x)) for x in (*arrays, direction))
    for kernel in ("blocked", "dot_product"):
        found = computed(kernel, *arrays, direction, in_float32, context_of(layout, segments), **facts)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        # A gradient of exactly 0, as in a window of one key, is the difference of terms as large as the inputs.
        errors.append([np.max(np.abs(x - y)) / (np.max(np.abs(y)) or largest) for x, y in pairs])
    for tiled, plain in zip(*errors, strict=True):
        assert tiled <= plain + 1e-6


@pytest.mark.parametrize("length", [3, 39, 41, 97, 127])
def test_rows_of_any_length_are_cut(length, small_tiles):
    """Tiles that lengths do not divide by are padded."""
    arrays, segments = inputs(length=length), np.ones((ROWS, length), np.int32)
    expected = written_out(*arrays, None, segments)
    *arrays, direction = (x.astype(np.float32) for x in arrays)
    assert_close(computed("blocked", *arrays, direction, None, context_of(make()[1].layout, segments)), expected, 2e-6)


HEADS_WHOLE = {f"logical_axis_rules__{axis}": "[]" for axis in ("heads", "kv_heads")}
CONTEXT = {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 2}
MESHES = {
    "data 2 x tensor 2": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2},
    "context 2 x tensor 2": {**CONTEXT, "ici_tensor_parallelism": 2},
    "context 2 x tensor 2, keys whole": {**CONTEXT, "ici_tensor_parallelism": 2, "logical_axis_rules__kv_heads": "[]"},
    "context 4 x data 2": {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 4, "ici_data_parallelism": 2},
    "rows over tensor": {
        **{"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "logical_axis_rules__length": "[tensor]"},
        **HEADS_WHOLE,
    },
}


@pytest.mark.parametrize(
    "case", ["all of it", *(pytest.param(case, marks=pytest.mark.long) for case in ("causal", "chunk"))]
)
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_compute_the_attention_of_one(mesh, case, small_tiles):
    shapes, facts, sinks = CASES[case]
    size = math.prod(size for key, size in MESHES[mesh].items() if key.endswith("_parallelism"))
    layout = make(devices=size, **MESHES[mesh])[1].layout
    arrays, segments = inputs(**shapes), segments_of()
    expected = written_out(*arrays, sinks, segments, **facts)
    order = zigzag_order(LENGTH, layout)
    axes = ("heads", "kv_heads", "kv_heads", "heads")
    placed = [
        jax.device_put(np.float32(x[:, order]), layout.sharding(("batch", "length", axis, None)))
        for x, axis in zip(arrays, axes, strict=True)
    ]
    sinks = None if sinks is None else np.float32(sinks)
    found = computed("blocked", *placed, sinks, context_of(layout, segments), **facts)
    out, (*gradients, d_sinks) = found
    back = np.argsort(order)
    out, *gradients = (x[:, back] for x in (out, *gradients))
    assert_close((out, (*gradients, d_sinks)), expected, 5e-6)


@pytest.mark.parametrize(("window", "shards"), [(0, 1), (50, 1), (0, 4), (50, 4)])
def test_pairs_are_those_that_the_mask_leaves(window, shards, small_tiles):
    """Each that has a pair of query and key to see, once, and no other; devices that share rows have as many."""
    layout = make_layout(load(ici_context_parallelism=shards).mesh, jax.devices()[:shards])
    length = 640
    queries, keys = zigzag_order(length, layout).reshape(shards, -1), np.arange(length)
    for order, pairs in zip(queries, tile_pairs(length, window, layout), strict=True):
        seen = (order[:, None] >= keys) & (order[:, None] - keys < (window or length))
        expected = {tuple(tile) for tile in np.argwhere(seen.reshape(len(order) // 40, 40, -1, 40).any((1, 3)))}
        found = [(i, j) for i, j, first in pairs if first >= 0]
        assert len(found) == len(set(found))
        assert set(found) == expected
        assert all(order[40 * i] == first for i, _, first in pairs if first >= 0)
        assert len(found) == len(pairs) or window


def test_a_long_row_takes_half_of_the_memory_of_all_scores_at_most():
    """8,192 tokens on a CPU, forward and backward, as the compiler counts."""
    layout, segments = make()[1].layout, np.ones((1, 8192), np.int32)
    context = ForwardContext(jnp.asarray(segments), jnp.asarray(segments), layout, "", packed=True)
    shape = jax.ShapeDtypeStruct((1, 8192, 2, 32), jnp.float32)

    def temporaries(kernel):
        spec = ScoreSpec(2, 32, 32, 1.0)

        def loss(q, k, v):
            return attend(q, k, v, spec, None, dataclasses.replace(context, kernel=kernel)).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("blocked") <= 0.1 * temporaries("dot_product")


LOCAL = "{attention_type: local_sliding, sliding_window_size: 5}"
MODELS = {
    "windows and sinks": {
        **{"base_num_decoder_layers": 4, "attention_sink": "true", "attn_logits_soft_cap": 2.0},
        "decoder_segments": f"[{{repeats: 2, pattern: [{LOCAL}, {{}}]}}]",
    },
    "latent": {
        **{
            "attention_type": "mla",
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "remat_policy": "full",
        },
        **{"qk_rope_head_dim": 4, "v_head_dim": 6},
    },
    "stages": {"base_num_decoder_layers": 4, "ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4},
}


@pytest.mark.parametrize(
    # Values of another size: "narrow values" and "all of it" above.
    "model",
    [pytest.param(name, marks=pytest.mark.long) if name in ("latent", "stages") else name for name in MODELS],
)
def test_models_train_in_tiles_as_with_all_scores(model, monkeypatch):
    """Losses of some steps, in several tiles: within scans, rematerialisation and pipeline stages."""
    monkeypatch.setitem(module.TILE, "cpu", 6)
    losses = []
    for kernel in ("blocked", "dot_product"):
        trainer = Trainer(devices=2, initial=False, attention=kernel, **MODELS[model])
        losses.append([trainer.step(packed_rows(number), number)["loss"] for number in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("platform", "length", "facts", "kernel"),
    [
        ("cpu", 64, {}, "dot_product"),
        ("cpu", 65, {}, "blocked"),
        ("tpu", 8192, {}, "flash"),
        ("tpu", 8200, {}, "blocked"),
        ("gpu", 8192, {}, "cudnn_flash"),
        ("gpu", 8193, {}, "blocked"),
        ("gpu", 8192, {"attn_logits_soft_cap": 30.0}, "blocked"),
        ("gpu", 1024, {"attn_logits_soft_cap": 30.0}, "blocked"),
        ("gpu", 512, {"attn_logits_soft_cap": 30.0}, "dot_product"),
        ("gpu", 8192, {"attention_sink": "true"}, "blocked"),
    ],
)
def test_scores_of_long_rows_are_never_whole(platform, length, facts, kernel):
    spec = spec_of(load(dtype="bfloat16", **facts))
    layout = make_layout(load().mesh, jax.devices()[:1])
    assert choose_kernel("autoselected", platform, attention_scores(spec), spec.dtype, length, layout).name == kernel
