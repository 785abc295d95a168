"""Which tokens are drawn, against transformers' logits processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from src.config.command_keys import Decoding
from src.extras.generation.generate import Generator, Sampling, filter_logits, sample_tokens, sampling
from src.extras.generation.inference_weights import in_activation_dtype, unrolled
from src.parallel.mesh import MeshLayout
from tests import tiny

V = 50


def logits(seed, rows=3, spread=3.0):
    return np.random.default_rng(seed).normal(scale=spread, size=(rows, V)).astype(np.float32)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, V - 1, V, 10 * V]),
    nucleus_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
)
def test_limits_leave_out_what_transformers_leaves_out(seed, temperature, top_k, nucleus_p, spread):
    logits_BV = logits(seed, spread=spread)
    expected = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits_BV))
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if nucleus_p < 1.0:
        expected = TopPLogitsWarper(nucleus_p)(None, expected)
    left = filter_logits(jnp.asarray(logits_BV), Sampling(temperature, top_k, nucleus_p))
    np.testing.assert_allclose(left, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "nucleus_p", "kept"),
    [(1, 1.0, [[1], [0]]), (3, 1.0, [[1, 3, 0], [0, 1, 2]]), (0, 0.5, [[1, 3], [0, 1]]), (3, 0.6, [[1, 3], [0, 1]])],
)
def test_of_equally_likely_tokens_the_first_are_taken(top_k, nucleus_p, kept):
    """As many as the limits say: transformers' top k takes all that are as likely as the last."""
    logits_BV = jnp.array([[1.0, 4.0, 1.0, 4.0], [2.0, 2.0, 2.0, 2.0]])
    left = np.isfinite(filter_logits(logits_BV, Sampling(1.0, top_k, nucleus_p)))
    np.testing.assert_array_equal(left, [[token in row for token in range(4)] for row in kept])


def test_draws_have_the_probabilities_of_the_logits_at_the_temperature():
    draws = 20_000
    logits_V = logits(0, rows=1)[0]
    wanted = Sampling(temperature=0.5, top_k=5, nucleus_p=0.9)
    logits_BV = jnp.broadcast_to(logits_V, (draws, V))
    drawn = sample_tokens(logits_BV, wanted, 3, jnp.arange(draws), jnp.zeros(draws, jnp.int32))
    probabilities = np.asarray(jax.nn.softmax(filter_logits(logits_V[None], wanted)[0]))
    assert np.sum(probabilities > 0) > 1
    counts = np.bincount(drawn, minlength=V)
    deviations = np.sqrt(draws * probabilities * (1 - probabilities))
    assert np.all(np.abs(counts - draws * probabilities) <= 5 * deviations)


def test_a_draw_depends_on_seed_number_and_position_alone():
    logits_BV = jnp.zeros((64, V))
    rows = jnp.arange(64)
    wanted = Sampling(1.0, 0, 1.0)
    drawn = np.asarray(sample_tokens(logits_BV, wanted, 3, rows, rows + 7))
    mixed = np.random.default_rng(0).permutation(64)[:20]
    assert np.array_equal(sample_tokens(logits_BV[:20], wanted, 3, rows[mixed], rows[mixed] + 7), drawn[mixed])
    for other in ((4, rows, rows + 7), (3, rows + 1, rows + 7), (3, rows, rows + 8)):
        assert np.mean(drawn == sample_tokens(logits_BV, wanted, *other)) < 0.2


@pytest.mark.parametrize("keys", [{"decode_sampling_strategy": "greedy"}, {"decode_sampling_temperature": 0.0}])
def test_greedy_takes_the_likeliest(keys):
    config = {"decode_sampling_strategy": "weighted", "decode_sampling_temperature": 1.0, **keys}
    logits_BV = logits(1)
    numbers = jnp.arange(3)
    assert np.array_equal(
        sample_tokens(jnp.asarray(logits_BV), sampling(Decoding(**config)), 0, numbers, numbers), logits_BV.argmax(-1)
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("weighted", (0, 1.0)), ("topk", (4, 1.0)), ("nucleus", (0, 0.5)), ("composite", (4, 0.5))],
)
def test_a_strategy_has_its_limits(strategy, expected):
    keys = {"decode_sampling_temperature": 0.7, "decode_sampling_top_k": 4, "decode_sampling_nucleus_p": 0.5}
    found = sampling(Decoding(decode_sampling_strategy=strategy, **keys))
    assert (found.temperature, (found.top_k, found.nucleus_p)) == (0.7, expected)


KINDS = {
    "dense": {},
    "tied, learned positions": {**tiny.GPT3, "logits_via_embedding": "true"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1},
    "latent attention": {"attention_type": "mla", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8}
    | {"qk_rope_head_dim": 8, "v_head_dim": 8},
    "gated delta rule": {"attention_type": "gated_delta", "gdn_num_value_heads": 4, "gdn_num_key_heads": 2}
    | {"gdn_value_head_dim": 8, "gdn_key_head_dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_cast_once_generate_what_weights_cast_for_each_token_do(kind):
    _, plan = tiny.make(**KINDS[kind], dtype="bfloat16", scan_layers="false")
    tree = tiny.random_weights(plan)

    def generated(cast):
        of_plan, weights = unrolled(plan, plan.split(jax.device_put(tree, plan.shardings)))
        weights = in_activation_dtype(of_plan, weights) if cast else weights
        generator = Generator(of_plan, weights, Sampling(0.0, 0, 1.0), 0, 16)
        tokens_BT, lengths_B = generator.padded([np.array([5, 11, 7], np.int32), np.array([2], np.int32)], 2)
        steps = generator.tokens(tokens_BT, lengths_B, np.arange(2, dtype=np.int32))
        return [(*next(steps), *np.asarray(generator.log_probs_B)) for _ in range(8)], weights

    (cast, narrow), (uncast, wide) = generated(True), generated(False)
    np.testing.assert_array_equal(cast, uncast)
    bytes_of = [sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) for weights in (narrow, wide)]
    assert bytes_of[0] < 0.6 * bytes_of[1], "little but norms is still in float32"


@pytest.mark.parametrize(("length", "rows"), [(1024, 8), (2048, 4)])
def test_on_gpus_each_device_has_two_rows_of_short_prompts(monkeypatch, length, rows):
    _, plan = tiny.make(4, max_target_length=2048)
    monkeypatch.setattr(MeshLayout, "platform", "gpu")
    generator = Generator(plan, {}, Sampling(0.0, 0, 1.0), 0, 2048, prefill_length=length)
    assert generator.padded([np.arange(3)], 1)[0].shape == (rows, length)


def test_weights_narrower_than_activations_stay_so():
    _, plan = tiny.make(weight_dtype="bfloat16")
    of_plan, weights = unrolled(plan, plan.split(jax.device_put(tiny.random_weights(plan), plan.shardings)))
    assert {leaf.dtype for leaf in jax.tree.leaves(in_activation_dtype(of_plan, weights))} == {jnp.dtype("bfloat16")}


def test_a_text_does_not_depend_on_a_longer_prompt_beside_it_where_experts_have_a_capacity():
    """An expert's capacity is a share of its row, so that rows may not be as long as the longest prompt."""
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "capacity_factor": 0.25}
    _, plan = tiny.make(**keys, max_target_length=128)
    weights = plan.split(jax.device_put(tiny.random_weights(plan), plan.shardings))
    short, long = (np.random.default_rng(0).integers(0, tiny.VOCAB, size) for size in (12, 100))

    def first_log_probs(prompts):
        generator = Generator(plan, weights, Sampling(0.0, 1, 1.0), 0, 128)
        tokens_BT, lengths_B = generator.padded(prompts, 2)
        steps = generator.tokens(tokens_BT, lengths_B, np.arange(2, dtype=np.int32))
        return [(next(steps)[0], generator.log_probs_B[0]) for _ in range(6)]

    np.testing.assert_allclose(first_log_probs([short, long]), first_log_probs([short]), atol=1e-5)
