"""Attention kernels against PyTorch's attention and each other."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from src.model import attention
from src.model.attention import attend, repeat_kv
from src.model.attention_kernels.choose import choose_kernel
from src.model.attention_kernels.scores import ScoreSpec, dot_product
from src.model.attention_kernels.splash import ZigzagCausalMask, block_sizes, splash
from src.model.forward_context import ForwardContext
from src.model.parts import layer_costs
from src.parallel.mesh import make_layout
from src.parallel.sequence import zigzag_order
from src.system.errors import UserError
from tests.tiny import assert_close, load, make, spec_of

ROWS, LENGTH = 4, 256
CUBE = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def inputs(heads=4, kv_heads=2, head_dim=16, length=LENGTH):
    """q, k, v, and a direction in which their gradients are taken."""
    rng = np.random.default_rng(0)
    return [
        np.asarray(rng.normal(size=(ROWS, length, n, head_dim)), np.float32) for n in (heads, kv_heads, kv_heads, heads)
    ]


def context_of(plan, cuts, length=LENGTH, packed=True):
    """Rows of segments that end at `cuts`, the rest padding; each further row one token later."""
    positions = np.arange(length)
    segment_ids = np.stack([np.searchsorted(np.add(cuts, row), positions, side="right") + 1 for row in range(ROWS)])
    segment_ids[segment_ids > len(cuts)] = 0
    return ForwardContext(
        jnp.asarray(np.tile(positions, (ROWS, 1))), jnp.asarray(segment_ids, jnp.int32), plan.layout, "", packed
    )


def scores_of(q, **facts):
    return ScoreSpec(q.shape[2], q.shape[3], q.shape[3], 1 / math.sqrt(q.shape[3]), **facts)


def model_of(**overrides):
    """What choosing a kernel needs to know of a model."""
    spec = spec_of(load(**overrides))
    scores = (layer_costs(layer)["attention"].scores for layer in dict.fromkeys(spec.layers))
    return list(filter(None, scores)), spec.dtype


def output_and_gradients(kernel, q, k, v, direction, context, sinks=None, **facts):
    @jax.jit
    def run(q, k, v, sinks):
        spec = scores_of(q, **facts)

        def attention(q, k, v, sinks):
            k, v = (repeat_kv(x, q.shape[2], context.layout) for x in (k, v))
            return kernel(q, k, v, spec, sinks, context)

        out, pull_back = jax.vjp(attention, q, k, v, sinks)
        return out, pull_back(direction)

    return run(q, k, v, None if sinks is None else jnp.float32(sinks))


def attend_by(kernel):
    """`attend` with this kernel."""

    def run(q, k, v, spec, sinks, context):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "dot_product", kernel)
            return attend(q, k, v, spec, sinks, dataclasses.replace(context, kernel="dot_product"))

    return run


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_dot_product_is_causal_attention_within_each_segment(kv_heads):
    plan = make()[1]
    q, k, v, _ = inputs(kv_heads=kv_heads, length=12)
    context = context_of(plan, cuts=(3, 7), length=12)
    out = np.asarray(jax.jit(lambda q, k, v: dot_product(q, k, v, scores_of(q), None, context))(q, k, v))
    for row in range(ROWS):
        for start, end in ((0, 3 + row), (3 + row, 7 + row)):
            alone = [torch.tensor(np.asarray(x[row, start:end])).transpose(0, 1) for x in (q, k, v)]
            expected = scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True).transpose(0, 1)
            np.testing.assert_allclose(out[row, start:end], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "overrides"),
    [
        (4, {}),
        pytest.param(1, {}, marks=pytest.mark.long),
        pytest.param(2, CUBE, marks=pytest.mark.long),
        (2, {**CUBE, "logical_axis_rules__kv_heads": "[]"}),  # a device has all of them, but some of q's
    ],
)
def test_splash_equals_dot_product(kv_heads, overrides):
    plan = make(devices=8 if overrides else 1, **overrides)[1]
    arrays, context = inputs(kv_heads=kv_heads), context_of(plan, cuts=(70, 140, 250))
    computed = output_and_gradients(functools.partial(splash, interpret=True), *arrays, context)
    assert_close(computed, output_and_gradients(dot_product, *arrays, context), 1e-5)


@pytest.mark.parametrize("length", [384, pytest.param(640, marks=pytest.mark.long)])
def test_splash_equals_dot_product_at_lengths_that_larger_blocks_do_not_divide(length):
    """Of three blocks of keys, with one kernel for all gradients; of five, with two."""
    *arrays, context, expected = on_one_device(length)
    assert_close(output_and_gradients(functools.partial(splash, interpret=True), *arrays[0], context), expected, 1e-5)


@pytest.mark.parametrize(
    ("length", "dtype", "queries", "keys", "one_kernel"),
    [
        (512, "bfloat16", 512, 512, True),
        (4096, "bfloat16", 1024, 1024, True),
        (8192, "bfloat16", 1024, 2048, True),
        (16384, "bfloat16", 1024, 2048, False),
        (8192, "float32", 512, 512, False),
    ],
)
def test_blocks_are_those_of_the_fewest_bundles(length, dtype, queries, keys, one_kernel):
    """docs/performance.md, "Attention's blocks on TPUs": one kernel for all gradients up to four blocks of keys."""
    blocks = block_sizes(length, length, 0, 128, jnp.dtype(dtype))
    assert (blocks.block_q, blocks.block_kv, blocks.use_fused_bwd_kernel) == (queries, keys, one_kernel)
    assert (blocks.block_q_dkv, blocks.block_kv_dkv) == (queries, keys)


def test_splash_in_its_larger_blocks_of_bfloat16_is_attention_but_for_rounding():
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs(heads=2, kv_heads=1, length=1024)]
    context = context_of(make()[1], cuts=(70, 140, 600), length=1024)
    expected = output_and_gradients(dot_product, *(x.astype(jnp.float32) for x in arrays), context)
    assert_close(output_and_gradients(functools.partial(splash, interpret=True), *arrays, context), expected, 2e-2)


@pytest.mark.parametrize("facts", [{"window": 50}, {"soft_cap": 3.0}, {"sinks": (1.0, -2.0, 0.5, 6.0)}, {"chunk": 40}])
def test_splash_equals_dot_product_in_what_a_layer_sees(facts):
    plan = make()[1]
    arrays, context = inputs(), context_of(plan, cuts=(70, 140, 250))
    computed = output_and_gradients(attend_by(functools.partial(splash, interpret=True)), *arrays, context, **facts)
    expected = output_and_gradients(attend_by(dot_product), *arrays, context, **facts)
    assert_close(computed, expected, 1e-5)
    assert not np.allclose(expected[0], output_and_gradients(dot_product, *arrays, context)[0], atol=1e-2)


@functools.cache
def on_one_device(length, **facts):
    """Inputs, their context, and what dot_product computes of them."""
    arrays, context = inputs(length=length), context_of(make()[1], cuts=(70, 140, length - 9), length=length)
    return arrays, context, output_and_gradients(attend_by(dot_product), *arrays, context, **facts)


CONTEXT = {"ici_data_parallelism": 2, "ici_context_parallelism": 2, "ici_tensor_parallelism": 2}


def kept_and_spread(plan, x, axes):
    """An array in the text's order, placed as the step has it over the mesh."""
    order = zigzag_order(x.shape[1], plan.layout)
    return jax.device_put(x[:, order], plan.layout.sharding(axes))


HEADS_WHOLE = {f"logical_axis_rules__{axis}": "[]" for axis in ("heads", "kv_heads")}
SHARED_ROWS = [
    (CONTEXT, {}, 512),
    (CONTEXT, {"window": 50}, 512),
    (CONTEXT, {"window": 300, "soft_cap": 3.0}, 512),
    (CONTEXT, {"sinks": (1.0, -2.0, 0.5, 6.0)}, 512),
    (CONTEXT, {"chunk": 40}, 512),
    ({**CONTEXT, "logical_axis_rules__kv_heads": "[]"}, {}, 512),
    # Rows over the axis of the heads, which then are whole.
    ({**CUBE, **HEADS_WHOLE, "logical_axis_rules__length": "[tensor]"}, {}, 512),
    # As tests/model/test_bench_context.py has it.
    ({"ici_context_parallelism": 4, "ici_data_parallelism": 2}, {}, 1024),
]
# Of dot_product, what a layer sees but chunks is in models on a mesh: test_context_axis.py.
LONG_SHARED_ROWS = [
    *(("splash", SHARED_ROWS[n]) for n in (1, 3, 7)),
    *(("dot_product", SHARED_ROWS[n]) for n in (1, 2, 3, 5, 6, 7)),
]


@pytest.mark.parametrize(
    ("kernel", "overrides", "facts", "length"),
    [
        pytest.param(kernel, *case, marks=pytest.mark.long if (kernel, case) in LONG_SHARED_ROWS else ())
        for kernel in ("splash", "dot_product")
        for case in SHARED_ROWS
    ],
)
def test_devices_that_share_a_row_compute_the_attention_of_one(kernel, overrides, facts, length):
    """Output and gradients, of segments whose ends are none of the parts'."""
    _, plan = make(devices=8, **overrides)
    arrays, context, expected = on_one_device(length, **facts)
    axes = ("batch", "length", "heads", None), ("batch", "length", "kv_heads", None)
    q, k, v, direction = (
        kept_and_spread(plan, x, each) for x, each in zip(arrays, (axes[0], axes[1], axes[1], axes[0]), strict=True)
    )
    rows = (kept_and_spread(plan, x, ("batch", "length")) for x in (context.positions_BT, context.segment_ids_BT))
    context = ForwardContext(*rows, plan.layout, "", packed=True)
    run = functools.partial(splash, interpret=True) if kernel == "splash" else dot_product
    out, (q, k, v, sinks) = output_and_gradients(attend_by(run), q, k, v, direction, context, **facts)
    back = np.argsort(zigzag_order(length, plan.layout))
    out, q, k, v = (np.asarray(x)[:, back] for x in (out, q, k, v))
    assert_close((out, (q, k, v, sinks)), expected, 1e-5)


@pytest.mark.parametrize(("window", "parts"), [(0, 1), (0, 4), (1, 4), (100, 4), (300, 2), (2000, 4)])
def test_blocks_are_seen_as_the_mask_in_full_says(window, parts):
    layout = make(devices=parts, ici_context_parallelism=parts)[1].layout
    queries, keys, block = zigzag_order(1024, layout), np.arange(1024), 64
    sight = ZigzagCausalMask(queries, window)
    mask = sight.mask_function(queries[:, None], keys[None])
    np.testing.assert_array_equal(
        mask, [[query - (window or 1024) < key <= query for key in keys] for query in queries]
    )
    for first, second in np.ndindex(1024 // block, 1024 // block):
        part = slice(first * block, (first + 1) * block), slice(second * block, (second + 1) * block)
        assert (sight[part].any(), sight[part].all()) == (mask[part].any(), mask[part].all())


BFLOAT16 = {"dtype": "bfloat16"}
ALONE = make_layout(load().mesh, jax.devices()[:1])
FOUR_SHARE = make_layout(load(ici_context_parallelism=4).mesh, jax.devices()[:4])


@pytest.mark.parametrize(
    ("attention", "platform", "length", "overrides", "kernel"),
    [
        ("autoselected", "cpu", 64, BFLOAT16, "dot_product"),
        ("autoselected", "cpu", 256, BFLOAT16, "blocked"),
        ("autoselected", "gpu", 256, BFLOAT16, "cudnn_flash"),
        ("autoselected", "gpu", 256, {}, "dot_product"),  # cuDNN has no float32
        ("autoselected", "gpu", 256, {**BFLOAT16, "head_dim": 12}, "dot_product"),
        ("autoselected", "tpu", 256, {}, "flash"),
        ("autoselected", "tpu", 100, {}, "dot_product"),
        ("dot_product", "tpu", 256, {}, "dot_product"),
        ("flash", "tpu", 128, {}, "flash"),
        ("cudnn_flash", "gpu", 100, BFLOAT16, "cudnn_flash"),
    ],
)
def test_the_kernel_of_a_platform(attention, platform, length, overrides, kernel):
    assert choose_kernel(attention, platform, *model_of(**overrides), length, ALONE).name == kernel


@pytest.mark.parametrize(
    ("attention", "platform", "length", "kernel"),
    [
        ("autoselected", "cpu", 1024, "blocked"),
        ("autoselected", "tpu", 1024, "flash"),
        ("dot_product", "gpu", 1024, "dot_product"),
        ("dot_product", "tpu", 1024 + 512, "dot_product"),
        ("autoselected", "tpu", 1024 + 512, "blocked"),  # not dot_product: it holds the scores of whole rows
        ("autoselected", "gpu", 1024 + 512, "cudnn_flash"),
        ("blocked", "gpu", 1024, "blocked"),
    ],
)
def test_the_kernel_where_four_devices_share_a_row(attention, platform, length, kernel):
    assert choose_kernel(attention, platform, *model_of(**BFLOAT16), length, FOUR_SHARE).name == kernel


def test_a_kernel_that_devices_cannot_share_a_row_by_is_an_error():
    with pytest.raises(UserError, match="max_target_length to be a multiple of 1024, not 1536"):
        choose_kernel("flash", "tpu", *model_of(**BFLOAT16), 1536, FOUR_SHARE)


@pytest.mark.parametrize(
    ("attention", "platform", "length", "overrides", "sentence"),
    [
        ("flash", "gpu", 256, {}, "attention=flash runs on tpu, and this is gpu"),
        ("cudnn_flash", "cpu", 256, BFLOAT16, "attention=cudnn_flash runs on gpu, and this is cpu"),
        ("flash", "tpu", 100, {}, "max_target_length to be a multiple of 128, not 100"),
        ("cudnn_flash", "gpu", 256, {}, "dtype=bfloat16, not float32"),
        ("cudnn_flash", "gpu", 255, BFLOAT16, "an even max_target_length, not 255"),
        ("cudnn_flash", "gpu", 256, {**BFLOAT16, "head_dim": 136}, "head_dim to be a multiple of 8 up to 128, not 136"),
    ],
)
def test_a_kernel_that_does_not_run_here_is_an_error(attention, platform, length, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        choose_kernel(attention, platform, *model_of(**overrides), length, ALONE)
