"""Initial values and learning rates by width, in closed form: Adam's first update of a weight is its rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.params import by_path
from src.system.errors import UserError
from tests import tiny

WIDE = {"base_emb_dim": 128, "base_mlp_dim": 256, "base_num_query_heads": 16, "base_num_kv_heads": 8}
KEYS = {"adam_weight_decay": 0, "gradient_clipping_threshold": 0, "position_type": "learned", "mup_base_emb_dim": 32}


def test_a_model_four_times_as_wide_as_the_base():
    trainer = tiny.Trainer(**WIDE, **KEYS, optimizer_rules="[{match: query, learning_rate_scale: 0.5}]")
    before = by_path(jax.device_get(trainer.state.weights.trainable))
    placed = {name: jnp.asarray(array) for name, array in tiny.packed_rows(0).items()}
    rate = trainer.hparams(0)["learning_rate"]
    trainer.state, _ = trainer.train_step(trainer.state, placed, trainer.hparams(0))
    after = by_path(jax.device_get(trainer.state.weights.trainable))
    # Of each matrix: its standard deviation, and the factor on its rate (Yang et al. 2022, table 3; 1/32 at the base).
    expected = {
        "embedding": (1, 1),
        "position_embedding": (32**-0.5, 1),
        "query": (128**-0.5, 1 / 8),
        "key": (128**-0.5, 1 / 4),
        "value": (128**-0.5, 1 / 4),
        "out": (None, 1 / 4),  # its values go with the number of layers too
        "wi": (128**-0.5, 1 / 4),
        "wo": (None, 1 / 4),
        "output": (32**0.5 / 128, 1 / 4),
        "scale": (None, 1),
    }
    assert {path[-1] for path in before} == set(expected)
    for path, old in before.items():
        deviation, factor = expected[path[-1]]
        if deviation:
            np.testing.assert_allclose(np.std(old), deviation, rtol=0.05, err_msg=path[-1])
        np.testing.assert_allclose(np.abs(after[path] - old).max(), rate * factor, rtol=0.01, err_msg=path[-1])


def test_the_width_does_not_change_what_weight_decay_takes():
    """With decay d an update takes rate * d of a weight besides, at every width (times the scale of its rule)."""
    after = []
    for decay in (0, 8):
        keys = {**KEYS, "adam_weight_decay": decay}
        trainer = tiny.Trainer(**WIDE, **keys, optimizer_rules="[{match: query, learning_rate_scale: 0.5}]")
        before = by_path(jax.device_get(trainer.state.weights.trainable))
        placed = {name: jnp.asarray(array) for name, array in tiny.packed_rows(0).items()}
        rate = trainer.hparams(0)["learning_rate"]
        trainer.state, _ = trainer.train_step(trainer.state, placed, trainer.hparams(0))
        after.append(by_path(jax.device_get(trainer.state.weights.trainable)))
    for path, old in before.items():
        share = {"query": 0.5, "scale": 0}.get(path[-1], 1) * rate * 8
        np.testing.assert_allclose(after[0][path] - after[1][path], share * old, atol=1e-6, err_msg=path[-1])


def test_the_gate_of_shared_experts_is_a_readout():
    """Its one output does not grow with the width: a variance of 1/fan_in**2 (32/128**2 here), and 1/m of the rate."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 64, "shared_experts": 1}
    wide = {name: value for name, value in WIDE.items() if name != "base_mlp_dim"}
    _, plan = tiny.make(**wide, **KEYS, **experts, shared_expert_gate="true")
    weights, rules = by_path(plan.init_weights().merged()), by_path(plan.rules)
    (gate,) = (path for path in weights if path[-1] == "shared_gate")
    assert rules[gate].by_width == 1 / 4
    np.testing.assert_allclose(np.std(weights[gate]), 32**0.5 / 128, rtol=0.1)


def test_at_the_base_nothing_changes():
    plain, base = (tiny.make(mup_base_emb_dim=width)[1] for width in (0, 32))
    assert {rule.by_width for rule in jax.tree.leaves(base.rules)} == {1.0}
    assert plain.rules == base.rules
    for ours, expected in zip(jax.tree.leaves(base.init_weights()), jax.tree.leaves(plain.init_weights()), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"opt_type": "muon"}, "needs opt_type=adamw"),
        ({"optimizer_rules": "[{match: scale, opt_type: sgd}]"}, "needs opt_type=adamw, in optimizer_rules too"),
        ({"logits_via_embedding": "true"}, "needs logits_via_embedding=false"),
        ({"scale_embedding": "true"}, "needs scale_embedding=false"),
        ({"lora_rank": 4}, "needs lora_rank=0"),
        ({"mtp_num_layers": 1}, "projection writes to dims that do not scale with the model's width"),
    ],
)
def test_what_no_rate_is_known_for_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        tiny.make(mup_base_emb_dim=16, **keys)
