"""Logits and gradients equal those of transformers' Llama and GPT-2 of the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from references import LENGTH, gpt2, gpt2_tree, llama, llama_tree, random_sizes
from tiny import assert_close, make

from src.model.context import Context

ROWS = 2


@pytest.mark.parametrize(("seed", "tied"), [(0, False), (1, True), (2, False)])
def test_llama(seed, tied):
    sizes = random_sizes(seed)
    reference = llama(sizes, tied)
    _, plan = make(logits_via_embedding=str(tied).lower(), **sizes)
    assert_parity(plan, reference, lambda get: llama_tree(get, plan))


@pytest.mark.parametrize("seed", [3, 4])
def test_gpt2(seed):
    sizes = random_sizes(seed)
    heads, width = sizes["base_num_query_heads"], sizes["base_num_query_heads"] * sizes["head_dim"]
    sizes |= {"base_num_kv_heads": heads, "base_emb_dim": width}  # GPT-2's heads share out its width
    del sizes["rope_max_timescale"]
    reference = gpt2(sizes)
    _, plan = make(
        mlp_activations="[gelu]",
        mlp_bias="true",
        attention_bias="true",
        normalization="layer",
        position_type="learned",
        trainable_position_size=LENGTH + 3,
        logits_via_embedding="true",
        **sizes,
    )
    assert_parity(plan, reference, lambda get: gpt2_tree(get, plan))


def assert_parity(plan, reference, tree_of):
    """Both models' logits, and the gradients of a random linear function of them."""
    rng = np.random.default_rng(0)
    vocab = plan.spec.vocab_size
    tokens = rng.integers(0, vocab, (ROWS, LENGTH))
    direction = rng.normal(size=(ROWS, LENGTH, vocab)).astype(np.float32)
    expected = reference(torch.tensor(tokens)).logits
    (expected * torch.tensor(direction)).sum().backward()
    parameters = dict(reference.named_parameters())

    def value_and_logits(weights):
        logits = our_logits(plan, weights, tokens)
        return jnp.sum(logits[..., :vocab] * direction), logits

    weights = tree_of(lambda name: parameters[name].detach().numpy())
    (_, logits), gradients = jax.jit(jax.value_and_grad(value_and_logits, has_aux=True))(weights)
    assert_close(logits[..., :vocab], expected.detach().numpy(), 1e-5)
    assert_close(gradients, tree_of(lambda name: parameters[name].grad.numpy()), 1e-4)


def our_logits(plan, weights, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = Context(positions, jnp.ones_like(positions), plan.layout, plan.kernel, packed=True)
    decoder = nnx.merge(plan.graphdef, weights)
    hidden, _, _ = decoder(jnp.asarray(tokens), context, plan.execution)
    return decoder.logits(hidden, context)
