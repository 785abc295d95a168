"""The parts of a step's memory, against real arrays, compiled programs and sums by hand."""

import jax
import numpy as np
import pytest
from tiny import LENGTH, TINY, VOCAB, Trainer, load

from src.aot.advice import changes
from src.aot.memory import device_bytes, memory
from src.build import build
from src.model.spec import VOCAB_MULTIPLE

EVEN = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 4, "per_device_batch_size": 2}
LAYERS, D, F = TINY["base_num_decoder_layers"], TINY["base_emb_dim"], TINY["base_mlp_dim"]
HEADS = 8 * 4  # elements of all heads of a token
ROWS = 2  # a device
MESHES = [
    {},
    {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
]


def built(devices=8, **overrides):
    config = load(**{**EVEN, **overrides})
    return config, build(config, jax.devices()[:devices])


def kept(**overrides):
    """What a layer keeps of a token, in elements of a device that has all heads."""
    _, step = built(**overrides)
    return memory(step).temporaries["kept for the backward pass"] / (LAYERS * ROWS * LENGTH * 4)


@pytest.mark.parametrize("mesh", MESHES)
def test_arguments_are_those_of_the_program_and_of_the_real_arrays_to_the_byte(mesh):
    _, step = built(**mesh, mu_dtype="bfloat16")
    predicted = memory(step).arguments
    compiled = step.traced.lower().compile()
    assert sum(predicted.values()) == compiled.memory_analysis().argument_size_in_bytes

    trainer = Trainer(rows=step.rows, devices=8, **EVEN, **mesh, mu_dtype="bfloat16")
    first = jax.devices()[0]

    def on_first(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    assert predicted["weights"] == on_first(trainer.state.trainable)
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
    # Rows a micro-batch stay, so its memory does.
    assert kept(remat_policy="full", gradient_accumulation_steps=2) == D


def test_logits_gradients_and_gathered_weights():
    _, step = built(num_vocab_tiling=2)
    parts = memory(step).temporaries
    padded = -(-VOCAB // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    assert parts["logits"] == ROWS * LENGTH // 2 * padded * 4
    assert parts["gradients"] == memory(step).arguments["weights"]
    block = D * HEADS * 4 + D * F * 3  # two norms more are not sharded, and lie there already
    assert parts["a block's weights, gathered"] == block * 4


def test_a_copy_on_every_device_counts_whole():
    assert device_bytes([np.zeros((3, 2), np.float32), jax.ShapeDtypeStruct((5,), np.int8)]) == 29


def test_changes_are_keys_that_train_takes_and_do_what_they_say():
    config, step = built(remat_policy="minimal", dtype="bfloat16")
    needed = memory(step).total + 10**6
    found = {frozenset(change.keys): change for change in changes(config, jax.devices(), step, needed)}
    assert all(change.needed < needed for change in found.values())

    halved = found[frozenset({"per_device_batch_size", "gradient_accumulation_steps"})]
    _, then = built(remat_policy="minimal", dtype="bfloat16", **halved.keys)
    assert (then.rows, then.plan.micro_batches) == (step.rows, 2)
    assert halved.needed == memory(then).total + 10**6 / 2, "what is not known is taken to go with the rows"

    rounded = found[frozenset({"mu_dtype"})]
    _, then = built(remat_policy="minimal", dtype="bfloat16", **rounded.keys)
    arguments = [each.traced.lower().compile().memory_analysis().argument_size_in_bytes for each in (step, then)]
    assert needed - rounded.needed == arguments[0] - arguments[1]

    together = next(change for change in found.values() if change.cost == "all of these")
    assert together.needed < min(change.needed for change in found.values() if change is not together)
    built(**{"dtype": "bfloat16", **together.keys})


def test_tiles_that_are_offered_divide_a_row():
    config, step = built(max_target_length=12)
    found = changes(config, jax.devices(), step, memory(step).total + 10**6)
    assert {"num_vocab_tiling": 4} in [change.keys for change in found]


def test_more_devices_share_the_weights():
    config, step = built(devices=4)
    needed = memory(step).total
    more = changes(config, jax.devices()[:4], step, needed)[-1]
    assert more.keys["compile_topology_num_slices"] == 2
    _, on_eight = built(devices=8)
    then = memory(on_eight)
    parts = then.arguments["weights"] + then.arguments["optimizer"] + then.temporaries["gradients"]
    now = memory(step)
    before = now.arguments["weights"] + now.arguments["optimizer"] + now.temporaries["gradients"]
    assert needed - more.needed == pytest.approx(before - parts, rel=0.03), (
        "norms are not sharded, and were taken to be"
    )
