"""Adapters against the sum they stand for, and what a run with frozen weights leaves as it was."""

import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from src.extras.generation.generate import Generator, Sampling, in_training
from src.model import lora, params
from src.model.forward_context import ForwardContext
from src.step.loss import next_token_loss
from src.system.errors import UserError
from tests.tiny import LENGTH, Trainer, assert_close, make, packed_rows, random_weights, tree_bits

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1, "base_moe_mlp_dim": 24}
LATENT = {
    "attention_type": "mla",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
ADAPTED = {"lora_rank": 3, "lora_alpha": 5.0, "load_parameters_path": "elsewhere"}


def adapters_of(plan):
    """Adapters of a plan's weights, none of them zero."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(leaf.dtype), plan.shapes["lora"])


@pytest.mark.parametrize("facts", [{}, EXPERTS, LATENT, {"attention_bias": "true", "scan_layers": "false"}])
def test_an_adapted_model_is_the_model_with_the_products_added(facts):
    _, plan = make(lora_parameters="['*']", **ADAPTED, **facts)
    batch, adapters = packed_rows(0), adapters_of(plan)
    added = params.by_path(weights_of(plan))
    pairs = params.by_path(adapters)
    for *path, name in pairs:
        if name == "down":
            # One weight at a time, as the paper has it: W + alpha / rank * A B.
            down, up = pairs[*path, "down"], pairs[*path, "up"]
            weight = added[tuple(path)]
            stacked = up.ndim - 1 - (weight.ndim - down.ndim + 1)
            for index in np.ndindex(weight.shape[:stacked]):
                weight[index] += 5.0 / 3 * np.tensordot(down[index], up[index], axes=1)
    summed = params.nested(added)

    def loss(tree, adapted):
        decoder = plan.decoder(params.Weights({"lora": adapted}, tree)) if adapted else nnx.merge(plan.graphdef, tree)
        return next_token_loss(decoder, batch, plan).loss

    value = jax.jit(functools.partial(loss, adapted=adapters))(weights_of(plan))
    assert_close(value, jax.jit(functools.partial(loss, adapted=None))(summed), 1e-5)
    assert_close(lora.merge(jax.device_put(weights_of(plan)), adapters, plan.step.lora_alpha), summed, 1e-6)


def test_an_adapted_latent_attention_decodes_from_its_cache_as_the_merged_model_reads_the_whole_text():
    # Reading a cached latent takes the parts of kv_up, and one of them transposed.
    _, plan = make(lora_parameters="[attention.query, attention.kv_up]", **ADAPTED, **LATENT)
    adapters = adapters_of(plan)
    adapted = plan.split(jax.device_put(weights_of(plan) | {"lora": adapters}, jax.devices()[0]))
    generator = Generator(*in_training(plan, adapted), Sampling(0.0, 0, 1.0), 0, LENGTH)
    prompt = np.array([5, 11, 7], np.int32)
    drawn = itertools.islice(generator.tokens(*generator.padded([prompt], 1), np.zeros(1, np.int32)), 8)

    text = np.array([[*prompt, *(tokens[0] for tokens in drawn)]])

    @jax.jit
    def logits(weights):
        merged = nnx.merge(plan.graphdef, weights)
        positions = np.arange(text.size)[None]
        context = ForwardContext(positions, np.ones_like(text), plan.layout, plan.kernel, packed=False)
        hidden_BTD, _, _ = merged(text, context, plan.execution)
        return merged.logits(hidden_BTD, context)

    likeliest = np.argmax(logits(lora.merge(jax.device_put(weights_of(plan)), adapters, plan.step.lora_alpha)), axis=-1)
    # What follows each token from the prompt's last one on: of greedy drawing, the next token of the text.
    np.testing.assert_array_equal(likeliest[0, len(prompt) - 1 : -1], text[0, len(prompt) :])
    assert text.shape == (1, len(prompt) + 8)


def weights_of(plan):
    tree = random_weights(plan)
    del tree["lora"]
    return tree


def test_adapters_train_and_the_weights_beneath_do_not():
    trainer = Trainer(lora_parameters="[attention.*, feed_forward.wi]", **ADAPTED)
    frozen, adapters = jax.device_get((trainer.state.weights.frozen, trainer.state.weights.trainable))
    assert set(adapters) == {"lora"}
    moments = {leaf.shape for leaf in jax.tree.leaves(trainer.state.opt) if leaf.ndim}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(adapters)}
    losses = [trainer.step(packed_rows(0), step)["loss"] for step in range(10)]
    assert losses[-1] < losses[0] - 0.5
    assert tree_bits(trainer.state.weights.frozen) == tree_bits(frozen)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(trainer.state.weights.trainable))


def test_a_fresh_adapter_changes_nothing():
    adapted = Trainer(lora_parameters="[attention.*]", **ADAPTED)
    plain = Trainer()
    assert tree_bits(adapted.state.weights.frozen) == tree_bits(plain.state.weights.trainable)
    assert adapted.step(packed_rows(0), 0)["loss"] == plain.step(packed_rows(0), 0)["loss"]


def test_what_trainable_parameters_leaves_out_stays_and_has_no_optimizer_state():
    trainer = Trainer(trainable_parameters="[attention.query, segments.0.0.feed_forward.*]")
    assert {params.dotted(path[3:]) for path in params.by_path(trainer.state.weights.trainable)} == {
        "attention.query",
        "feed_forward.wi",
        "feed_forward.wo",
    }
    moments = {leaf.shape for leaf in jax.tree.leaves(trainer.state.opt) if leaf.ndim}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(trainer.state.weights.trainable)}
    before = jax.device_get((trainer.state.weights.frozen, trainer.state.weights.trainable))
    trainer.step(packed_rows(0), 5)
    assert tree_bits(trainer.state.weights.frozen) == tree_bits(before[0])
    assert tree_bits(trainer.state.weights.trainable) != tree_bits(before[1])


def test_a_layers_scalar_is_frozen_whatever_is_trained():
    trainer = Trainer(layer_scalar="true", adam_weight_decay=0.1)
    before = jax.device_get(trainer.state.weights)
    ones = [[1.0]] * trainer.config.model.base_num_decoder_layers
    assert [leaf.tolist() for leaf in jax.tree.leaves(before.frozen)] == [ones]
    trainer.step(packed_rows(0), 5)
    assert tree_bits(trainer.state.weights.frozen) == tree_bits(before.frozen)
    assert tree_bits(trainer.state.weights.trainable) != tree_bits(before.trainable)
    _, plan = make(layer_scalar="true", **ADAPTED)
    assert "layer_scalar" in str(plan.split(plan.shapes).frozen)


def test_adapters_shard_as_their_weights_do():
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    keys = {"lora_parameters": "[attention.*, feed_forward.*]", "initial": False, **ADAPTED}
    sharded, single = Trainer(devices=4, **keys, **mesh), Trainer(**keys)
    losses = [[trainer.step(packed_rows(step), step)["loss"] for step in range(4)] for trainer in (single, sharded)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    query = sharded.state.weights.trainable["lora"]["segments"][0][0]["attention"]["query"]
    assert query["down"].sharding.shard_shape(query["down"].shape)[1] == query["down"].shape[1] // 2
    assert query["up"].sharding.shard_shape(query["up"].shape)[2] == query["up"].shape[2] // 2


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({**ADAPTED, "lora_parameters": "[attention.qurey]"}, "lora_parameters: attention.qurey matches no weight"),
        ({**ADAPTED, "lora_parameters": "[embedding]"}, "matches no weight used in matmuls"),
        ({"trainable_parameters": "[nothing]"}, "trainable_parameters: nothing matches no weight"),
        ({"trainable_parameters": "[layer_scalar]", "layer_scalar": "true"}, "layer_scalar matches no weight"),
        ({"lora_rank": 4}, "lora_rank needs load_parameters_path"),
        ({**ADAPTED, "lora_parameters": "[]"}, "lora_rank needs lora_parameters"),
    ],
)
def test_bad_input(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**keys)
