"""verify's checks b, c and e: what they say of clean code, and that they find faults and name the weight."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from src.config.optimizer_keys import OPTIMIZERS
from src.extras.verify import derivatives, movement, rewrites
from src.extras.verify.rows import FAIL, NOT_APPLICABLE, PASS
from src.extras.verify.subject import LENGTH, Subject
from src.model import feed_forward, norm
from src.model.moe import router
from src.model.params import Weights, by_path, nested, weight
from src.parallel import accumulate
from src.step import loss, optimizer, plan, train_step
from tests.parallel.axes import MODELS
from tests.tiny import load
from tests.verify.contexts import context

WINDOW = "{attention_type: local_sliding, sliding_window_size: 7}"
GDN = {"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 6, "gdn_value_head_dim": 5}
KINDS = {
    **MODELS,
    "averaged": {"trainable_parameters": "[attention.*]", "ema_decay": 0.999, "opt_type": "muon"},
    "hybrid": {
        **GDN,
        "base_num_decoder_layers": 4,
        "decoder_segments": "[{repeats: -1, pattern: [{attention_type: gated_delta}, {attention_gate: true}]}]",
    },
    "tied": {
        "base_num_decoder_layers": 4,
        "decoder_segments": f"[{{repeats: 2, pattern: [{WINDOW}, {{}}]}}]",
        "attn_logits_soft_cap": 5,
        "final_logits_soft_cap": 3,
        "normalization_placement": "both",
        "scale_embedding": "true",
        "logits_via_embedding": "true",
        "z_loss_multiplier": 0.001,
    },
    "adapted": {"load_parameters_path": "base", "lora_rank": 2, "lora_parameters": "['attention.*', 'feed_forward.*']"},
    "experts": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 16,
        "capacity_factor": 1.0,
        "load_balance_loss_weight": 0.02,
        "router_z_loss_weight": 0.01,
    },
}


def subject(kind, seed=0, **keys):
    return Subject(load(max_target_length=LENGTH, **{**KINDS[kind], **keys}), seed)


def failed(rows):
    return [row for row in rows if row.status == FAIL]


def assert_clean(rows):
    """No row fails, and each figure is at most a third of its bound."""
    rows = list(rows)
    assert not failed(rows)
    measured = [row for row in rows if row.bound]
    assert measured
    for row in measured:
        assert row.figure <= row.bound / 3, row


@pytest.mark.parametrize("kind", ["dense", pytest.param("averaged", marks=pytest.mark.long)])
def test_clean_code_passes(kind):
    model = subject(kind)
    assert_clean(derivatives.rows(context(model)))
    assert_clean(movement.rows(context(model)))


def test_clean_rewrites_pass():
    assert_clean(itertools.islice(rewrites.rows(context(subject("dense"))), 3))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_clean_code_passes_on_every_kind(kind, seed):
    model = subject(kind, seed)
    assert_clean(derivatives.rows(context(model)))
    assert_clean(movement.rows(context(model, weight_dtype="bfloat16")))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_rewrites_of_every_kind_are_equal(kind):
    assert_clean(rewrites.rows(context(subject(kind))))


def test_a_doubled_gradient_is_found(monkeypatch):
    activated = feed_forward.activated

    def doubled(*arguments):
        out = activated(*arguments)
        return 2 * out - jax.lax.stop_gradient(out)

    monkeypatch.setattr(feed_forward, "activated", doubled)
    (row,) = failed(derivatives.rows(context(subject("dense"))))
    assert row.figure >= 3 * row.bound
    assert "feed_forward.wi" in row.note


def test_a_loss_without_slopes_fails_and_weak_gradients_are_told(monkeypatch):
    model = subject("dense")
    query, norms = "segments.0.0.attention.query", {}

    def jumping(self, path, direction, tolerance):
        norms[path] = np.linalg.norm(self.gradients[path])
        return None if path == query else float(np.sum(self.gradients[path] * direction))

    monkeypatch.setattr(derivatives.Loss, "slope", jumping)
    monkeypatch.setattr(derivatives, "WEAK", 2)
    lost, found = derivatives.rows(context(model))
    assert (lost.status, found.status) == (FAIL, PASS)
    assert query in lost.note
    weak = [path for path, norm in norms.items() if path != query and norm < max(norms.values()) / 2]
    assert found.note.endswith(", ".join(weak))
    assert weak


@pytest.mark.long
def test_a_missing_gradient_of_a_tied_embedding_is_found(monkeypatch):
    detached = without_gradient_of(loss.objective, "embedding")
    monkeypatch.setattr(train_step, "objective", detached)
    (row,) = failed(derivatives.rows(context(subject("tied"))))
    assert row.figure >= 3 * row.bound
    assert "embedding" in row.note


def test_a_dropped_micro_batch_is_found(monkeypatch):
    over_micro_batches = accumulate._over_micro_batches

    def dropping(gradient, inputs, rows, how):
        if how.micro_batches > 1:
            rows = {name: x.at[how.micro_batches - 1 :: how.micro_batches].set(0) for name, x in rows.items()}
        return over_micro_batches(gradient, inputs, rows, how)

    monkeypatch.setattr(accumulate, "_over_micro_batches", dropping)
    (row,) = failed(itertools.islice(rewrites.rows(context(subject("dense"))), 1))
    assert row.name == "gradient_accumulation_steps=2"
    assert row.figure >= 3 * row.bound


def test_a_weight_that_gets_no_gradient_is_found(monkeypatch):
    monkeypatch.setattr(train_step, "objective", without_gradient_of(loss.objective, "wo"))
    rows = failed(movement.without_gradient(derivatives.Loss(subject("dense"))))
    (row,) = rows
    assert row.figure >= 3 * row.bound
    assert "feed_forward.wo" in row.note


def test_stale_averages_and_frozen_weights_that_move_are_found(monkeypatch):
    def thawed(trainable, frozen, stats):
        return Weights(trainable, jax.tree.map(lambda x: x * 1.001, frozen), stats)

    incremental_update = optax.incremental_update
    monkeypatch.setattr(train_step, "Weights", thawed)
    monkeypatch.setattr(optax, "incremental_update", lambda new, old, size: incremental_update(old, old, size))
    rows = {row.name: row for row in failed(movement.rows(context(subject("averaged"))))}
    assert rows.keys() == {"frozen weights keep their bits", "average of the new weights"}
    assert "feed_forward.wi" in rows["frozen weights keep their bits"].note
    assert rows["average of the new weights"].figure >= 3 * rows["average of the new weights"].bound


class TestFirstStepOfAnOptimizer:
    """Only an optimizer that declares it may leave weights in its first step."""

    @pytest.fixture(autouse=True)
    def stays(self, monkeypatch):
        scale = optax.scale_by_adam

        def in_the_second(*args, **keys):
            adam = scale(*args, **keys)

            def update(gradients, state, weights=None):
                updates, after = adam.update(gradients, state, weights)
                return jax.tree.map(lambda x: jnp.where(state.count == 0, 0, x), updates), after

            return optax.GradientTransformation(adam.init, update)

        monkeypatch.setattr(optax, "scale_by_adam", in_the_second)

    def row(self):
        rows = movement.rows(context(subject("dense", adam_weight_decay=0)))
        return next(row for row in rows if row.name == "trained weights move downhill")

    def test_it_is_a_fault(self):
        row = self.row()
        assert row.status == FAIL
        assert "11 of 11 weights are wrong" in row.note

    def test_it_may_be_declared(self, monkeypatch):
        monkeypatch.setitem(OPTIMIZERS, "adamw", OPTIMIZERS["adamw"]._replace(waits=True))
        row = self.row()
        assert row.status == PASS
        assert "in the second step" in row.note


class TestDecay:
    """Faults of weight decay, which move every weight downhill."""

    RULES = "[{match: attention.query, learning_rate_scale: 0.5}, {match: attention.key, weight_decay: 0.2}]"

    def note(self, **keys):
        (row,) = failed([movement.decay(subject("dense", **keys))])
        assert row.figure >= 3 * row.bound
        return row.note

    @pytest.mark.parametrize("keys", [{"optimizer_rules": RULES}, {"opt_type": "muon"}, {"opt_type": "adafactor"}])
    def test_clean_code_passes(self, keys):
        assert_clean([movement.decay(subject("dense", **keys))])

    def test_a_norm_that_decays_is_named(self, monkeypatch):
        monkeypatch.setattr(norm, "weight", lambda *args, decays, **keys: weight(*args, **keys))
        note = self.note()
        assert "3 of 11 weights are wrong" in note
        assert "final_norm.scale" in note

    def test_a_declaration_that_no_vector_or_matrix_should_have_is_named(self, monkeypatch):
        field = plan.params.field

        def exchanged(declarations, name):
            found = by_path(field(declarations, name))
            if name == "decays":
                found |= {path: path[-1] == "scale" for path in found if path[-1] in ("scale", "wo")}
            return nested(found)

        monkeypatch.setattr(plan.params, "field", exchanged)
        note = self.note()
        assert "4 of 11 weights are wrong" in note
        assert "feed_forward.wo" in note

    def test_a_rule_that_is_ignored_is_named(self, monkeypatch):
        monkeypatch.setattr(optimizer, "decayed", lambda rules, decays, rate: [optax.add_decayed_weights(rate, decays)])
        assert "segments.0.0.attention.key; 1 of" in self.note(optimizer_rules=self.RULES)


def test_gradients_clipped_one_by_one_are_found(monkeypatch):
    def of_its_own(gradients, norm, threshold):
        factors = jax.tree.map(lambda g: jnp.minimum(1, threshold / jnp.linalg.norm(g.ravel())), gradients)
        return jax.tree.map(lambda g, factor: g * jnp.where(threshold > 0, factor, 1), gradients, factors)

    monkeypatch.setattr(train_step, "clip", of_its_own)
    row = movement.clipping(subject("dense", gradient_clipping_threshold=1.0))
    assert row.status == FAIL
    assert row.figure >= 3 * row.bound


def test_a_bias_moved_on_the_wrong_layer_is_found(monkeypatch):
    update = router.update_router_bias

    def of_the_layer_above(stats, reports, tokens, rate):
        return update(stats, jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), reports), tokens, rate)

    monkeypatch.setattr(router, "update_router_bias", of_the_layer_above)
    row = movement.router_biases(subject("experts", routed_bias="true"))
    assert (row.status, row.figure) == (FAIL, 6 + 2)  # by the batch's loads, and by the loads that are set
    assert "segments.0.0.feed_forward.correction_bias" in row.note


def test_choices_that_depend_on_the_size_of_biases_are_found(monkeypatch):
    choose = router.choose
    assert movement.router_choices(subject("dense")).status == NOT_APPLICABLE
    of = subject("experts", routed_bias="true")
    row = movement.router_choices(of)
    assert (row.status, row.figure) == (PASS, 0)
    monkeypatch.setattr(router, "choose", lambda scores, bias, spec: choose(scores, jnp.maximum(bias, 0.0), spec))
    row = movement.router_choices(of)
    assert row.status == FAIL
    assert row.figure >= 3 * row.bound
    assert "correction_bias" in row.note


def test_what_low_precision_cannot_move_is_counted():
    old, updates = {"w": np.full(4, 0.25, np.float32)}, {"w": np.array([1e-2, 1e-2, 1e-6, 0.0])}
    row = movement.stuck(old, updates, "bfloat16")
    assert row.figure == pytest.approx(1 / 3)
    assert movement.stuck(old, updates, "float32").status == NOT_APPLICABLE


def without_gradient_of(objective, name):
    """The objective without the gradient of the weights of a name."""

    def detached(trainable, *arguments, **keys):
        flat = by_path(trainable)
        stopped = {path: jax.lax.stop_gradient(x) if path[-1] == name else x for path, x in flat.items()}
        return objective(nested(stopped), *arguments, **keys)

    return detached
