"""The parts of a step's memory, against real arrays, compiled programs and sums by hand."""

import functools
import math
import re

import jax
import numpy as np
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.memory import attention_workspace, device_bytes, memory, scores_bytes
from src.extras.aot.topology import parse_topology
from src.model.spec import VOCAB_MULTIPLE
from src.step.trace import trace_train_step
from tests.compilers import needs_cuda, needs_libtpu
from tests.runs import build_once
from tests.tiny import LENGTH, TINY, VOCAB, Trainer, load

EVEN = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 4, "per_device_batch_size": 2}
LAYERS, D, F = TINY["base_num_decoder_layers"], TINY["base_emb_dim"], TINY["base_mlp_dim"]
HEADS = 8 * 4  # elements of all heads of a token
ROWS = 2  # a device
LATENT = {
    **{"attention_type": "mla", "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
MESHES = [
    {},
    {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
]


@functools.cache
def traced(devices=8, **overrides):
    config = load(**{**EVEN, **overrides})
    return config, build_once(config, jax.devices()[:devices], {})


def kept(**overrides):
    """What a layer keeps of a token, in elements of a device that has all heads."""
    _, step = traced(**overrides)
    return memory(step).temporaries["kept for the backward pass"] / (LAYERS * ROWS * LENGTH * 4)


def test_what_the_program_does_not_take_is_no_argument():
    """No second moments, no positions and segments, no threshold."""
    _, step = traced(opt_type="sgd", position_type="none", packing=False, gradient_clipping_threshold=0.0)
    assert sum(memory(step).arguments.values()) == (
        step.jax_traced.lower().compile().memory_analysis().argument_size_in_bytes
    )


@pytest.mark.parametrize("mesh", [pytest.param(MESHES[1], marks=pytest.mark.long), MESHES[2]], ids=str)
def test_arguments_are_those_of_the_program_and_of_the_real_arrays_to_the_byte(mesh):
    _, step = traced(**mesh, mu_dtype="bfloat16")
    predicted = memory(step).arguments
    compiled = step.jax_traced.lower().compile()
    assert sum(predicted.values()) == compiled.memory_analysis().argument_size_in_bytes

    trainer = Trainer(devices=8, initial=False, **EVEN, **mesh, mu_dtype="bfloat16")
    first = jax.devices()[0]

    def on_first(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    assert predicted["weights"] == on_first(trainer.state.weights.trainable)
    assert predicted["optimizer"] == on_first(trainer.state.opt)


@pytest.mark.parametrize(
    ("policy", "elements"),
    [
        ("full", D),
        ("save_out_proj", 2 * D),
        ("save_qkv_proj", D + 3 * HEADS),
        ("minimal", D + 3 * HEADS + D + 2 * F),
        ("qkv_proj_offloaded", D),
    ],
)
def test_what_a_policy_keeps(policy, elements):
    assert kept(remat_policy=policy) == elements


def test_an_offloaded_block_input_is_not_on_the_device():
    assert kept(remat_policy="custom", remat_custom__decoder_layer_input="offload") == 0


def test_what_is_kept_follows_the_mesh_and_the_micro_batches():
    # Four devices share the rows' shards, two the heads: each has twice the rows and half of the heads.
    assert kept(remat_policy="save_qkv_proj", **MESHES[1]) == 2 * D + 3 * HEADS
    # Devices that share rows have fewer tokens each: between blocks those that share heads may, too.
    assert kept(remat_policy="save_qkv_proj", ici_context_parallelism=2, ici_fsdp_parallelism=4) == D + 3 * HEADS
    split = {"logical_axis_rules__norm_length": "[context, tensor]"}
    assert kept(remat_policy="save_qkv_proj", **MESHES[1], **split) == D + 3 * HEADS
    # Rows a micro-batch stay, so its memory does, and where devices add up gradients of their own rows, too.
    for mesh in MESHES[::2]:
        keys = {**mesh, "per_device_batch_size": 3}  # so that no other dim has as many entries as there are rows
        once, twice = (memory(traced(**keys, gradient_accumulation_steps=steps)[1]).temporaries for steps in (1, 2))
        for part in ("kept for the backward pass", "what a block computes", "logits and their gradient"):
            assert twice[part] == once[part] > 0


def test_sums_over_heads_are_whole_before_they_are_scattered():
    split = {"logical_axis_rules__norm_length": "[context, tensor]"}
    whole, scattered = (memory(traced(**MESHES[1], **keys)[1]).temporaries for keys in ({}, split))
    assert scattered["kept for the backward pass"] < whole["kept for the backward pass"]
    assert scattered["what a block computes"] == whole["what a block computes"] > 0


def test_devices_that_share_rows_have_fewer_logits_each():
    """Four devices share the rows' shards, each of twice as many rows, and two each row."""
    logits = [
        memory(traced(**keys)[1]).temporaries["logits and their gradient"]
        for keys in ({}, {"ici_fsdp_parallelism": 4, "ici_context_parallelism": 2})
    ]
    assert logits[0] == logits[1]


def test_a_devices_own_experts_are_not_gathered():
    """A block's weights but for its experts are gathered over all devices: those over none, or of all experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}
    by_mesh = [
        memory(traced(**experts, **mesh)[1]).temporaries["a block's weights, gathered"]
        for mesh in ({"ici_fsdp_parallelism": 8}, {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 8})
    ]
    assert by_mesh[0] - by_mesh[1] == 8 * 3 * D * 16 * 4


@pytest.mark.parametrize("sharing", ["", "shared: true, "])
def test_layers_that_share_weights_gather_a_whole_block(sharing):
    _, step = traced(decoder_segments=f"[{{repeats: {LAYERS}, {sharing}pattern: [{{}}]}}]")
    assert memory(step).temporaries["a block's weights, gathered"] == (D * HEADS * 4 + D * F * 3) * 4


def test_logits_gradients_and_gathered_weights():
    _, step = traced(num_vocab_tiling=2)
    parts = memory(step).temporaries
    padded = -(-VOCAB // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    assert parts["logits and their gradient"] == 2 * ROWS * LENGTH // 2 * padded * 4
    assert parts["gradients"] == memory(step).arguments["weights"]
    block = D * HEADS * 4 + D * F * 3  # two norms more are not sharded, and lie there already
    assert parts["a block's weights, gathered"] == block * 4


def test_a_copy_on_every_device_counts_whole():
    assert device_bytes([np.zeros((3, 2), np.float32), jax.ShapeDtypeStruct((5,), np.int8)]) == 29


def test_what_is_there_when_memory_is_fullest_is_what_counts():
    """Kept in both phases; then logits and their gradient, or gradients, a block's weights and what it computes."""
    _, step = traced(num_vocab_tiling=1)
    found = memory(step)
    parts = found.temporaries
    block = parts["gradients"] + parts["a block's weights, gathered"] + parts["what a block computes"]
    fullest = parts["kept for the backward pass"] + max(parts["logits and their gradient"], block)
    assert found.total == sum(found.arguments.values()) + fullest


def test_what_a_block_computes_is_its_products_again_and_their_gradients():
    """Each product of the forward pass is made again, and backwards the gradient of what it is made from."""
    _, step = traced(remat_policy="full", attention="dot_product")
    scores = LENGTH * 8  # keys times heads
    forward = 3 * HEADS + scores + HEADS + D + 2 * F
    # The last product's result is no gradient's; the gradients are those of F, D, the context, scores, q, k, v and x.
    backward = F + D + HEADS + scores + 3 * HEADS + 3 * D
    assert memory(step).temporaries["what a block computes"] == ROWS * LENGTH * 4 * (forward + backward)


@pytest.mark.parametrize(
    "mesh", [{}, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_context_parallelism": 2}]
)
def test_scores_of_plain_attention_are_the_programs_largest_arrays(mesh):
    _, step = traced(**mesh, attention="dot_product", max_target_length=128, remat_policy="full")
    arrays = re.findall(r"f32\[([\d,]+)\]", step.jax_traced.lower().compile().as_text())
    assert scores_bytes(step) == 4 * max(math.prod(map(int, dims.split(","))) for dims in arrays)


def test_micro_batches_hold_the_sum_of_gradients_too():
    _, one = traced()
    _, two = traced(gradient_accumulation_steps=2)
    assert memory(two).temporaries["gradients"] == 2 * memory(one).temporaries["gradients"]


@needs_libtpu
def test_on_a_tpu_nothing_is_kept_beyond_these_parts(little_effort):
    """No logits, and no factor of a feed-forward layer, beside what the layers' backward pass is said to hold."""
    sizes = {"base_num_decoder_layers": 2, "base_emb_dim": 512, "base_mlp_dim": 2048, "vocab_size": 8192}
    heads = {"base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 128}
    numbers = {"dtype": "bfloat16", "matmul_precision": "default", "remat_policy": "full"}
    config = load(**sizes, **heads, **numbers, max_target_length=512, per_device_batch_size=2)
    step = trace_train_step(config, abstract_devices(parse_topology("v5e-8", 1)))
    assert step.jax_traced.lower().compile().memory_analysis().peak_memory_in_bytes <= memory(step).total


NO_HEADS = dict.fromkeys(("base_num_query_heads", "base_num_kv_heads", "head_dim"))  # what the layer does not have


@needs_cuda
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 4 * 2 * 4),  # two heads of 128, in float32, four segments listed
        ({"base_num_query_heads": 4}, 4 * 4 * 4 * 2),  # grouped: keys and values too
        ({"packing": "false"}, 2 * 4),
        ({"packing": "false", "attention_type": "chunk", "chunk_attn_window_size": 64}, 4 * 2 * 4),
        ({"attention": "blocked"}, 0),
        ({"attention_type": "gated_delta", "gdn_num_key_heads": 2, "gdn_num_value_heads": 2, **NO_HEADS}, 0),
    ],
)
def test_the_workspace_of_a_gpus_attention_counts_what_its_layers_have(keys, expected):
    """In bytes per token and number of a head."""
    sizes = {"base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 128, "max_target_length": 256}
    given = {key: value for key, value in {**sizes, "dtype": "bfloat16", **keys}.items() if value is not None}
    step = trace_train_step(load(**given), abstract_devices(parse_topology("a3:1", 1)))
    plan, (rows, length) = step.plan, step.batch["tokens"].shape
    found = attention_workspace(plan.spec, plan.execution, plan.kernel, plan.layout, rows, length, plan.packed)
    assert found == expected * step.tokens * 128
