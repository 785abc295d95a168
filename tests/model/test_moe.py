"""The choice of experts against a loop over tokens, its load-balance loss, and the bias that evens the load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import Trainer, load, make, packed_rows

from src.model.context import Context
from src.model.moe import Experts
from src.model.router import by_layer, corrected
from src.model.spec import model_spec

ROWS, T, D = 3, 11, 32
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "base_moe_mlp_dim": 12}
GROUPS = {"n_routing_groups": 4, "topk_routing_group": 2}
KINDS = {
    "plain": {},
    "one": {"num_experts_per_tok": 1},
    "mixtral": {"norm_topk_prob": "true"},
    "deepseek2": {**GROUPS, "routed_scaling_factor": 2.5, "shared_experts": 2},
    "deepseek3": {
        **GROUPS,
        "routed_score_func": "sigmoid",
        "routed_bias": "true",
        "routing_group_score": "top2",
        "norm_topk_prob": "true",
        "routed_scaling_factor": 1.5,
    },
    "llama4": {"routed_score_func": "sigmoid", "scale_expert_inputs": "true", "shared_experts": 1},
    "biases": {"router_bias": "true", "mlp_bias": "true", "norm_topk_prob": "true"},
}


def layer(kind):
    """A layer of experts with random weights, these as a nested dict of arrays, and some of its inputs."""
    rng = np.random.default_rng(0)
    spec = model_spec(load(**{**EXPERTS, **KINDS[kind]})).layers[0].feed_forward
    module = Experts(spec, D, 1.0, "float32", nnx.Rngs(0))
    state = jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape).astype(np.float32), nnx.state(module))
    nnx.update(module, state)
    return module, nnx.to_pure_dict(state), rng.normal(size=(ROWS, T, D)).astype(np.float32)


def run(module, x_BTD, segment_ids_BT):
    context = Context(jnp.zeros((ROWS, T), jnp.int32), segment_ids_BT, make()[1].layout, "dot_product", packed=True)
    return jax.device_get(module(jnp.asarray(x_BTD), context))


def figures(report):
    """`by_layer`'s, of a model of this one layer."""
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], report)
    return {name: entry.item() for name, entry in by_layer({"segments": {0: {0: {"feed_forward": stacked}}}}).items()}


def feed_forward(x, weights):
    """SwiGLU of one token."""
    gate, up = np.einsum("d,daf->af", x, weights["wi"]) + weights.get("wi_bias", 0.0)
    return (gate / (1 + np.exp(-gate)) * up) @ weights["wo"] + weights.get("wo_bias", 0.0)


def scores_of(x, weights, spec):
    logits = x @ weights["router"] + weights.get("router_bias", 0.0)
    if spec.score_func == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum()


def chosen(scores, weights, spec):
    """The experts of a token, by sorting."""
    choice = scores + weights.get("correction_bias", 0.0)
    size = spec.count // spec.groups
    best = {"max": 1, "top2": 2}[spec.group_score]
    group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(spec.groups)]
    groups = sorted(range(spec.groups), key=lambda g: -group_scores[g])[: spec.groups_per_token]
    allowed = [expert for expert in range(spec.count) if expert // size in groups]
    return sorted(allowed, key=lambda expert: -choice[expert])[: spec.per_token]


def expert(weights, index):
    return {name: weights[name][index] for name in ("wi", "wo", "wi_bias", "wo_bias") if name in weights}


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_goes_through_its_experts(kind):
    module, weights, x = layer(kind)
    spec, expected, load_E, share_E = module.spec, np.zeros_like(x), np.zeros(8), np.zeros(8)
    segment_ids = np.ones((ROWS, T), np.int32)
    segment_ids[1, 6:] = 0  # padding, which counts for no load
    for row, t in np.ndindex(ROWS, T):
        scores = scores_of(x[row, t], weights, spec)
        experts = chosen(scores, weights, spec)
        total_score = sum(scores[experts]) if spec.normalise else 1.0
        for index in experts:
            factor = spec.scaling * scores[index] / total_score
            if spec.scale_inputs:
                expected[row, t] += feed_forward(factor * x[row, t], expert(weights, index))
            else:
                expected[row, t] += factor * feed_forward(x[row, t], expert(weights, index))
        if spec.shared:
            expected[row, t] += feed_forward(x[row, t], weights["shared"])
        if segment_ids[row, t]:
            load_E[experts] += 1
            share_E += scores / scores.sum()
    out, report = run(module, x, segment_ids)
    np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(report["expert_load"], load_E / load_E.sum(), rtol=1e-5)
    balance = 8 * np.sum(load_E / load_E.sum() * share_E / share_E.sum())
    assert figures(report)["load_balance_loss"] == pytest.approx(balance, rel=1e-5)


def test_the_load_balance_loss_is_1_when_even_and_e_when_one_expert_has_all():
    module, _, x = layer("one")
    module.router[...] = jnp.zeros((D, 8))
    _, report = run(module, x, np.ones((ROWS, T), np.int32))
    assert figures(report)["load_balance_loss"] == pytest.approx(1.0, rel=1e-6)
    module.router[...] = jnp.zeros((D, 8)).at[:, 5].set(100.0)
    _, report = run(module, np.abs(x), np.ones((ROWS, T), np.int32))
    assert figures(report)["load_balance_loss"] == pytest.approx(8.0, rel=1e-6)
    assert figures(report)["expert_load_max"] == pytest.approx(8.0, rel=1e-6)


def test_a_bias_moves_towards_an_even_load_and_stands_still_at_rate_0():
    biases = np.array([[0.5, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    loads = np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]], np.float32)
    stats = {"segments": {0: {1: {"feed_forward": {"correction_bias": biases}}}}}
    reports = {"segments": {0: {0: {"feed_forward": {}}, 1: {"feed_forward": {"expert_load": loads}}}}}
    (moved,) = jax.tree.leaves(corrected(stats, reports, 0.01))
    np.testing.assert_allclose(moved - biases, [[-0.01, 0.01, 0.01, 0.01], [0.0, 0.0, -0.01, 0.01]], atol=1e-7)
    (still,) = jax.tree.leaves(corrected(stats, reports, 0.0))
    np.testing.assert_array_equal(still, biases)


def test_training_steps_even_the_load_by_the_bias_alone():
    """With weights as good as fixed, so are the mean scores: the load-balance loss is 1 a layer when loads are even."""
    settings = {**EXPERTS, **KINDS["deepseek3"], "learning_rate": 1e-12, "routed_bias_update_rate": 0.01}
    trainer, batch = Trainer(initial=False, **settings), packed_rows(0)
    losses = [trainer.step(batch, number)["load_balance_loss"] for number in range(60)]
    assert abs(losses[-1] - 2) < 0.3 * abs(losses[0] - 2)


def test_training_steps_descend_the_load_balance_loss():
    trainer, batch = Trainer(initial=False, **EXPERTS, load_balance_loss_weight=10.0), packed_rows(0)
    losses = [trainer.step(batch, number)["load_balance_loss"] for number in range(15)]
    assert losses[-1] - 2 < 0.5 * (losses[0] - 2)
