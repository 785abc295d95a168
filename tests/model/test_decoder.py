"""Packed documents, positions, scanned and shared layers, dropout and logits of the decoder."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from src.model.attention import Attention
from src.model.forward_context import ForwardContext
from src.model.parts import MIXERS
from src.model.sinusoidal import sinusoidal
from tests.tiny import LENGTH, VOCAB, assert_close, loss_and_gradients, make, packed_rows, random_weights


def run(plan, weights, tokens, segment_ids, positions, dropout_keys=None):
    """Hidden states [B, T, D] and logits [B, T, V]."""

    @jax.jit
    def apply(weights, tokens, segment_ids, positions):
        decoder = nnx.merge(plan.graphdef, weights)
        context = ForwardContext(positions, segment_ids, plan.layout, plan.kernel, True, dropout_keys)
        hidden, _, _ = decoder(tokens, context, plan.execution)
        return hidden, decoder.logits(hidden, context)

    return apply(weights, tokens, segment_ids, positions)


@pytest.mark.parametrize("position_type", ["rope", "learned", "sinusoidal", "none"])
def test_a_packed_document_is_computed_as_if_alone(position_type):
    rng = np.random.default_rng(0)
    _, plan = make(position_type=position_type)
    lengths = (5, 7, 3)  # one token of the row is padding
    documents = [rng.integers(0, VOCAB, length) for length in lengths]
    # Row 0 packs the documents; each further row has one alone, the rest padded with other tokens.
    tokens = rng.integers(0, VOCAB, (4, LENGTH))
    segment_ids, positions = np.zeros((2, 4, LENGTH), np.int32)
    starts = np.cumsum([0, *lengths])
    for index, document in enumerate(documents):
        for row, start in ((0, starts[index]), (index + 1, 0)):
            place = slice(start, start + len(document))
            tokens[row, place], segment_ids[row, place] = document, index + 1
            positions[row, place] = np.arange(len(document))
    hidden, logits = run(plan, random_weights(plan), tokens, segment_ids, positions)
    for index, length in enumerate(lengths):
        packed = slice(starts[index], starts[index] + length)
        assert_close(hidden[0, packed], hidden[index + 1, :length], 1e-5)
        assert_close(logits[0, packed, :VOCAB], logits[index + 1, :length, :VOCAB], 1e-5)


def test_sinusoidal_positions_are_those_of_their_formula():
    expected = np.empty((4, 6))
    for position in range(4):
        for pair, wavelength in enumerate((1.0, 100.0, 10_000.0)):
            expected[position, pair] = np.sin(position / wavelength)
            expected[position, 3 + pair] = np.cos(position / wavelength)
    np.testing.assert_allclose(sinusoidal(jnp.arange(4)[None], 6)[0], expected, atol=1e-6)


def test_scanned_and_unrolled_layers_compute_the_same():
    pattern = "{base_mlp_dim: 48}, {normalization: layer, mlp_activations: [relu], mlp_bias: true}"
    settings = {"base_num_decoder_layers": 4, "decoder_segments": f"[{{repeats: 2, pattern: [{pattern}]}}]"}
    batch = packed_rows(0, rows=2)
    _, scanned = make(**settings)
    _, unrolled = make(scan_layers="false", **settings)
    weights = random_weights(scanned)
    assert_close(loss_and_gradients(scanned, weights, batch), loss_and_gradients(unrolled, weights, batch), 1e-5)


def test_shared_layers_are_equal_layers_whose_gradients_add_up():
    def model(sharing="", **overrides):
        last = f"{{repeats: 2, {sharing}pattern: [{{base_num_kv_heads: 1, position_type: none}}]}}"
        return make(base_num_decoder_layers=3, decoder_segments=f"[{{pattern: [{{}}]}}, {last}]", **overrides)[1]

    shared = model("shared: true, ")
    batch, weights = packed_rows(0, rows=2), random_weights(shared)
    copies = {**weights, "segments": {**weights["segments"]}}
    copies["segments"][1] = jax.tree.map(lambda weight: np.stack([weight, weight]), weights["segments"][1])
    expected_loss, expected = loss_and_gradients(model(), copies, batch)
    expected["segments"][1] = jax.tree.map(lambda gradient: np.sum(gradient, axis=0), expected["segments"][1])
    for plan in (shared, model("shared: true, ", scan_layers="false")):
        loss, gradients = loss_and_gradients(plan, weights, batch)
        assert_close(loss, expected_loss, 1e-6)
        assert_close(gradients, expected, 1e-5)


def test_dropout_draws_each_place_its_own_mask():
    """Each of four branches adds dropout(1) to a stream of zeros: k / 0.75, with k binomial if the masks are apart."""
    epsilon, counts = 1e8, {}
    for scan_layers in ("true", "false"):
        _, plan = make(
            dropout_rate=0.25,
            scan_layers=scan_layers,
            base_emb_dim=64,
            attention_bias="true",
            mlp_bias="true",
            normalization_layer_epsilon=epsilon,
        )
        weights = jax.tree.map(lambda weight: np.zeros(weight.shape, weight.dtype), plan.shapes)
        block = weights["segments"][0][0]
        block["attention"]["out_bias"][:] = block["feed_forward"]["wo_bias"][:] = 1.0
        weights["final_norm"]["scale"][:] = epsilon**0.5  # undoes the final norm
        zeros = np.zeros((64, LENGTH), np.int32)
        keys = jax.random.key_data(jax.random.split(jax.random.key(0), zeros.shape))
        hidden, _ = run(plan, weights, zeros, zeros + 1, zeros, keys)
        counts[scan_layers] = 0.75 * np.asarray(hidden)
    np.testing.assert_allclose(counts["true"], counts["false"], atol=1e-4)
    for kept in range(5):
        share = np.mean(np.abs(counts["true"] - kept) < 1e-3)
        assert abs(share - math.comb(4, kept) * 0.75**kept * 0.25 ** (4 - kept)) < 0.01  # five standard deviations


def test_soft_cap_bounds_logits_and_padded_vocabulary_gets_no_probability():
    cap = 5.0
    _, plain = make()
    _, capped = make(final_logits_soft_cap=cap)
    weights = jax.tree.map(lambda weight: 3 * weight, random_weights(plain))
    batch = packed_rows(0, rows=2)
    arrays = [batch[name] for name in ("tokens", "segment_ids", "positions")]
    _, logits = run(plain, weights, *arrays)
    _, capped_logits = run(capped, weights, *arrays)
    assert np.max(np.abs(logits[..., :VOCAB])) > 2 * cap
    np.testing.assert_allclose(capped_logits[..., :VOCAB], cap * np.tanh(logits[..., :VOCAB] / cap), rtol=1e-5)
    for each in (logits, capped_logits):
        assert each.shape[-1] == 128  # 97, padded
        assert np.all(np.asarray(jax.nn.softmax(each))[..., VOCAB:] == 0.0)


LOSS = "jvp(cross_entropy)"


@pytest.mark.parametrize("capacity_factor", [-1, 2])
def test_the_program_names_the_parts_of_the_model(capacity_factor):
    """So that a profile reads like the code, backward pass and recomputation included."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "capacity_factor": capacity_factor}
    _, plan = make(**experts, remat_policy="full", base_num_decoder_layers=1)
    weights, batch = (jax.eval_shape(lambda tree=tree: tree) for tree in (random_weights(plan), packed_rows(0)))
    text = jax.jit(functools.partial(loss_and_gradients, plan)).lower(weights, batch).as_text(debug_info=True)
    for scope in (
        *("jvp(embedding)/", *(f"{each}/output_projection/" for each in (LOSS, f"transpose({LOSS})"))),
        *(f"rematted_computation/{part}/norm/" for part in ("attention", "feed_forward")),
        *("/attention/", "feed_forward/router/", "feed_forward/dispatch/", "/dispatch/experts/"),
    ):
        assert scope in text, scope


def test_attention_knows_the_number_of_its_layer(monkeypatch):
    numbers = []

    class Counted(Attention):
        def __call__(self, x_BTD, context, cache):
            jax.debug.callback(lambda number: numbers.append(int(number)), context.layer, ordered=True)
            return super().__call__(x_BTD, context, cache)

    monkeypatch.setitem(MIXERS, "global", Counted)
    segments = "[{repeats: 2, pattern: [{}, {mlp_bias: true}]}, {pattern: [{}]}]"
    _, plan = make(base_num_decoder_layers=5, decoder_segments=segments)
    batch = packed_rows(0)
    run(plan, random_weights(plan), batch["tokens"], batch["segment_ids"], batch["positions"])
    jax.effects_barrier()
    assert numbers == [0, 1, 2, 3, 4]
