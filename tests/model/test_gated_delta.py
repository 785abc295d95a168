"""The gated delta rule against transformers' token by token, document by document; its layer on meshes and cached."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from src.extras.generation.generate import cache_arrays
from src.model import params
from src.model.attention_kernels.delta_rule import CHUNK, in_chunks
from src.model.decoder import Decoder
from src.model.flops import flops_per_token
from src.model.quantization import select_at_rest
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.model.families import greedy, logits_of
from tests.tiny import Trainer, assert_close, load, make, packed_rows, random_weights, spec_of

torch.set_num_threads(1)
K, G, H, P = 2, 3, 10, 6
T = 2 * CHUNK + 22
# Lengths of the documents of two rows: some end where a chunk does, or are a single token; one is longer than a chunk.
LENGTHS = ((5, 1, CHUNK - 6, 80), (CHUNK + 9, 60))


def inputs(seed=0, alike=False):
    """q, k, v, the logarithms of decays, some of which leave nothing, and how far tokens correct, as float32."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(2, T, K, H)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g = rng.normal(size=(2, T, K, G, P)), -np.exp(3 * rng.normal(size=(2, T, K, G)))
    beta = 1 / (1 + np.exp(-rng.normal(size=(2, T, K, G))))
    if alike:
        k, g, beta = np.broadcast_to(k[:, :1], k.shape), 0 * g, np.ones_like(beta)
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def documents():
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in LENGTHS]
    return np.stack([np.pad(row, (0, T - len(row)), mode="edge") for row in rows])


def expected(tensors, numbers):
    """transformers' outputs [2, T, K, G, P], of each document by itself, and the states after each row's last."""
    q, k, *of_values = tensors
    v, g, beta = (x.flatten(2, 3) for x in of_values)
    rows, states = [], []
    for row in range(2):
        outs = []
        for number in np.unique(numbers[row]):
            at = np.flatnonzero(numbers[row] == number)
            q_1, k_1, v_1, g_1, beta_1 = (x[row : row + 1, at] for x in (q, k, v, g, beta))
            out, state = torch_recurrent_gated_delta_rule(q_1, k_1, v_1, g_1, beta_1, output_final_state=True)
            outs.append(out)
        rows.append(torch.cat(outs, dim=1))
        states.append(state)
    return torch.cat(rows).unflatten(2, (K, G)), torch.cat(states).unflatten(1, (K, G))


def ours(arrays, numbers):
    q, *others = arrays
    return in_chunks(q * H**-0.5, *others, jnp.asarray(numbers), jnp.zeros((2, K, G, H, P)))


@pytest.mark.parametrize("alike", [False, True], ids=["strong decays", "keys alike and no decay"])
def test_documents_in_chunks_are_each_document_token_by_token(alike):
    """Where a token's decay is -300, others' are still right; and keys that are alike make no sum of large numbers."""
    arrays, numbers = inputs(alike=alike), documents()
    out, states = jax.jit(ours)(arrays, numbers)
    expected_out, expected_states = expected([torch.tensor(x) for x in arrays], numbers)
    for actual, theirs in ((out, expected_out), (states, expected_states)):
        assert np.max(np.abs(actual - theirs.numpy())) < 2e-5 * theirs.std().item()


def test_gradients_of_the_rule_are_those_token_by_token():
    arrays, numbers = inputs(seed=1), documents()
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    direction = np.random.default_rng(2).normal(size=(2, T, K, G, P)).astype(np.float32)
    (expected(tensors, numbers)[0] * torch.tensor(direction)).sum().backward()
    gradients = jax.jit(jax.grad(lambda arrays: jnp.sum(ours(arrays, numbers)[0] * direction)))(arrays)
    assert_close(gradients, [x.grad.numpy() for x in tensors], 2e-5)


SIZES = {"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 6, "gdn_value_head_dim": 5}
HYBRID = {
    **SIZES,
    "decoder_segments": "[{repeats: -1, pattern: [{attention_type: gated_delta}, {attention_gate: true}]}]",
}
LONG = {**HYBRID, "max_target_length": 2 * CHUNK}


def test_cached_decoding_over_chunks_is_the_whole_row():
    """After prompts of a chunk or more, of one token and of less than the convolution sees."""
    _, plan = make(**LONG)
    weights, rng, steps = random_weights(plan), np.random.default_rng(0), 5
    prompts = [rng.integers(0, plan.spec.vocab_size, length) for length in (CHUNK + 7, 1, 2, CHUNK)]
    tokens, logits = greedy(plan, weights, prompts, steps)
    whole = jax.jit(functools.partial(logits_of, plan))
    for prompt, row_tokens, row_logits in zip(prompts, tokens, logits, strict=True):
        text = np.concatenate([prompt, row_tokens[:-1]])
        row = np.pad(text, (0, 2 * CHUNK - len(text)))[None]
        place = np.arange(2 * CHUNK)[None]
        all_logits = np.asarray(whole(weights, row, (place < len(text)).astype(np.int32), place))[0]
        assert_close(row_logits, all_logits[len(prompt) - 1 : len(text)], 2e-5)


def test_a_cache_does_not_grow_with_the_text():
    spec = spec_of(load(**HYBRID))
    short, long = (cache_arrays(spec, 3, length)[0] for length in (8, 4096))
    assert short[0] == long[0]
    assert {name: (array.shape, array.dtype) for name, array in long[0].items()} == {
        "state": ((1, 3, 2, 2, 6, 5), "float32"),
        "tail": ((1, 3, 3, 2, 22), ""),
    }


MESHES = {
    "fsdp and tensor": {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "data and sequence": {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 1,
        "ici_tensor_parallelism": 2,
        "logical_axis_rules__norm_length": "[context,tensor]",
    },
    "stages": {"base_num_decoder_layers": 4, "ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
}


@functools.cache
def run(devices=1, **keys):
    """The losses of two steps of plain descent in packed rows, and what they added to the weights."""
    descent = {"opt_type": "sgd", "learning_rate": 0.1, "warmup_steps_fraction": 0, "gradient_clipping_threshold": 0}
    trainer = Trainer(devices, initial=False, adam_weight_decay=0, remat_policy="full", **descent, **LONG, **keys)
    before = jax.device_get(trainer.state)
    losses = [trainer.step(packed_rows(number, 8, 2 * CHUNK), number)["loss"] for number in range(2)]
    return losses, jax.tree.map(np.subtract, jax.device_get(trainer.state).weights, before.weights)


@pytest.mark.parametrize(
    "mesh", ["fsdp and tensor", *(pytest.param(name, marks=pytest.mark.long) for name in [*MESHES][1:])]
)
def test_a_mesh_trains_as_one_device(mesh):
    losses, added = run(4, **MESHES[mesh])
    expected_losses, expected_added = run(base_num_decoder_layers=MESHES[mesh].get("base_num_decoder_layers", 2))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_close(added, expected_added, 1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ici_context_parallelism": 2}, "passes a state from token to token: set ici_context_parallelism=1"),
        ({"ici_tensor_parallelism": 2, "gdn_num_key_heads": 1}, r"heads = 1 \(.* or gdn_num_key_heads\) is not"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        trace_train_step(load(**{**HYBRID, **keys, "per_device_batch_size": 4}), jax.devices()[:2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gdn_num_value_heads": 3}, "gdn_num_value_heads=3 is not a multiple of gdn_num_key_heads=2"),
        ({"gdn_num_key_heads": 0}, "gdn_num_key_heads=0 must be 1 or more"),
        ({"attention_gate": "true"}, "attention_gate=true .* has no effect: it needs attention_type=global"),
        ({"sliding_window_size": 4}, "sliding_window_size=4 .* has no effect"),
    ],
)
def test_facts_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load(attention_type="gated_delta", **{**SIZES, **keys})


def test_operations_are_those_of_the_weights_the_state_and_the_convolution():
    spec = spec_of(load(base_num_decoder_layers=1, attention_type="gated_delta", **SIZES))
    feed_forward, head = 3 * 32 * 64, 32 * 97
    projections = 32 * 2 * (22 + 10 + 2 + 2) + 20 * 32
    state, convolution = 4 * (6 * 5) * 4, 4 * 2 * 22  # a value head decays, reads, writes and asks its state
    count = 6 * (feed_forward + head + projections + state + convolution)
    assert (flops_per_token(spec, 16).causal, flops_per_token(spec, 4096).palm) == (count, count)


def test_gates_stay_out_of_products_in_8_bits():
    config = load(**HYBRID)
    _, declarations = params.abstract(functools.partial(Decoder, spec_of(config)))
    places = select_at_rest(config.step, declarations).matmuls
    assert {path[-1] for path in places} == {"qkv", "gate", "query", "key", "value", "out", "wi", "wo"}
