"""The choice of experts against a loop over tokens, its load-balance loss, and the bias that evens the load."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from src.model.forward_context import ForwardContext
from src.model.moe import layer as moe
from src.model.moe import router
from src.model.moe.layer import Experts
from src.model.moe.router import by_layer, totals, update_router_bias
from src.model.params import Rngs
from src.system.errors import UserError
from tests.tiny import Trainer, assert_close, load, make, packed_rows, spec_of

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
    "gate": {"shared_experts": 1, "shared_expert_gate": "true", "mlp_bias": "true"},
}


def layer(kind):
    """A layer of experts with random weights, these as a nested dict of arrays, and some of its inputs."""
    rng = np.random.default_rng(0)
    spec = spec_of(load(**{**EXPERTS, **KINDS[kind]})).layers[0]
    module = Experts(spec, 1.0, "float32", Rngs(jax.random.key(0)))
    state = jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape).astype(np.float32), nnx.state(module))
    nnx.update(module, state)
    return module, nnx.to_pure_dict(state), rng.normal(size=(ROWS, T, D)).astype(np.float32)


def run(module, x_BTD, segment_ids_BT):
    layout = make()[1].layout

    @nnx.jit
    def apply(module, x_BTD, segment_ids_BT):
        zeros_BT = jnp.zeros((ROWS, T), jnp.int32)
        return module(x_BTD, ForwardContext(zeros_BT, segment_ids_BT, layout, "dot_product", packed=True))

    return jax.device_get(apply(module, jnp.asarray(x_BTD), segment_ids_BT))


def figures(report, tokens=ROWS * T):
    """`by_layer`'s, of a model of this one layer and so many tokens."""
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], report)
    found = by_layer(totals({"segments": {0: {0: {"feed_forward": stacked}}}}), tokens)
    return {name: entry.item() for name, entry in found.items()}


def feed_forward(x, weights):
    """SwiGLU of one token."""
    gate, up = np.einsum("d,daf->af", x, weights["wi"]) + weights.get("wi_bias", 0.0)
    return (gate / (1 + np.exp(-gate)) * up) @ weights["wo"] + weights.get("wo_bias", 0.0)


def scores_of(x, weights, spec):
    logits = x @ weights["router"] + weights.get("router_bias", 0.0)
    if spec.routed_score_func == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum()


def chosen(scores, weights, spec):
    """The experts of a token, by sorting."""
    choice = scores + weights.get("correction_bias", 0.0)
    size = spec.num_experts // spec.n_routing_groups
    best = {"max": 1, "top2": 2}[spec.routing_group_score]
    group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(spec.n_routing_groups)]
    groups = sorted(range(spec.n_routing_groups), key=lambda g: -group_scores[g])[: spec.topk_routing_group]
    allowed = [expert for expert in range(spec.num_experts) if expert // size in groups]
    return sorted(allowed, key=lambda expert: -choice[expert])[: spec.num_experts_per_tok]


def expert(weights, index):
    return {name: weights[name][index] for name in ("wi", "wo", "wi_bias", "wo_bias") if name in weights}


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_goes_through_its_experts(kind):
    module, weights, x = layer(kind)
    spec, expected, load_E, share_E = module.spec, np.zeros_like(x), np.zeros(8), np.zeros(8)
    segment_ids = np.ones((ROWS, T), np.int32)
    segment_ids[1, 6:] = 0  # padding, which goes to no expert and counts for no load
    for row, t in np.ndindex(ROWS, T):
        scores = scores_of(x[row, t], weights, spec)
        experts = chosen(scores, weights, spec)
        total_score = sum(scores[experts]) if spec.norm_topk_prob else 1.0
        for index in experts if segment_ids[row, t] else ():
            factor = spec.routed_scaling_factor * scores[index] / total_score
            if spec.scale_expert_inputs:
                expected[row, t] += feed_forward(factor * x[row, t], expert(weights, index))
            else:
                expected[row, t] += factor * feed_forward(x[row, t], expert(weights, index))
        if spec.shared_experts:
            gate = 1 / (1 + np.exp(-x[row, t] @ weights["shared_gate"])) if spec.shared_expert_gate else 1.0
            expected[row, t] += gate * feed_forward(x[row, t], weights["shared"])
        if segment_ids[row, t]:
            load_E[experts] += 1
            share_E += scores / scores.sum()
    out, report = run(module, x, segment_ids)
    np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(report["expert_load"], load_E[None] / spec.num_experts_per_tok, rtol=1e-5)
    balance = 8 * np.sum(load_E / load_E.sum() * share_E / share_E.sum())
    assert figures(report, segment_ids.astype(bool).sum())["load_balance_loss"] == pytest.approx(balance, rel=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "biases", "llama4"])
def test_nothing_undefined_of_padding_gets_out(kind, monkeypatch):
    """TPU kernels leave rows past the last group as they find them, in results and gradients: here, not a number."""
    module, _, x = layer(kind)
    segment_ids = np.ones((ROWS, T), np.int32)
    segment_ids[:, 6:] = 0
    context = ForwardContext(jnp.zeros((ROWS, T), jnp.int32), segment_ids, make()[1].layout, "dot_product", packed=True)

    def gradients():
        graph, weights = nnx.split(module)

        def loss(weights, x):
            return jnp.sum(jnp.square(nnx.merge(graph, weights)(x, context)[0]))

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(weights, jnp.asarray(x)))

    expected, product = gradients(), moe.grouped_matmul

    def undefined_past_groups(x_RX, kernel, rows_G, platform, transposed=False):
        past_R1 = (jnp.arange(len(x_RX)) >= jnp.sum(rows_G))[:, None]

        @jax.custom_vjp
        def given(x, past_R1):
            return x

        def back(past_R1, gradient):
            return jnp.where(past_R1, jnp.nan, gradient), None

        given.defvjp(lambda x, past_R1: (x, past_R1), back)
        out = product(given(x_RX, past_R1), kernel, rows_G, platform, transposed)
        return jnp.where(past_R1.reshape(-1, *[1] * (out.ndim - 1)), jnp.nan, out)

    monkeypatch.setattr(moe, "grouped_matmul", undefined_past_groups)
    for found, wanted in zip(gradients(), expected, strict=True):  # but for the order of a product's sums
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


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
    loads = 100 * np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]], np.float32)
    stats = {"segments": {0: {1: {"feed_forward": {"correction_bias": biases}}}}}
    reports = {"segments": {0: {0: {"feed_forward": {}}, 1: {"feed_forward": {"expert_load": loads}}}}}
    (moved,) = jax.tree.leaves(update_router_bias(stats, reports, 100, 0.01))
    np.testing.assert_allclose(moved - biases, [[-0.01, 0.01, 0.01, 0.01], [0.0, 0.0, -0.01, 0.01]], atol=1e-7)
    (still,) = jax.tree.leaves(update_router_bias(stats, reports, 100, 0.0))
    np.testing.assert_array_equal(still, biases)


def test_training_steps_even_the_load_by_the_bias_alone():
    """With weights as good as fixed, so are the mean scores: the load-balance loss is 1 per layer at even loads."""
    settings = {**EXPERTS, **KINDS["deepseek3"], "learning_rate": 1e-12, "routed_bias_update_rate": 0.01}
    trainer, batch = Trainer(initial=False, **settings), packed_rows(0)
    losses = [trainer.step(batch, number)["load_balance_loss"] for number in range(60)]
    assert abs(losses[-1] - 2) < 0.3 * abs(losses[0] - 2)


def test_training_steps_descend_the_load_balance_loss():
    trainer, batch = Trainer(initial=False, **EXPERTS, load_balance_loss_weight=10.0), packed_rows(0)
    losses = [trainer.step(batch, number)["load_balance_loss"] for number in range(15)]
    assert losses[-1] - 2 < 0.5 * (losses[0] - 2)


def test_beyond_an_experts_capacity_the_choices_that_come_last_are_dropped():
    """Of 11 tokens with 3 choices among 8 experts, times 0.5, an expert takes 3 of a row: ceil(11 x 3 x 0.5 / 8)."""
    module, weights, x = layer("plain")
    spec = module.spec = dataclasses.replace(module.spec, capacity_factor=0.5)
    segment_ids = np.ones((ROWS, T), np.int32)
    segment_ids[1, 6:] = 0
    expected, dropped = np.zeros_like(x), 0
    for row in range(ROWS):
        taken = np.zeros(8, int)
        for rank, t in np.ndindex(3, T):  # all first choices, then all second ones
            if segment_ids[row, t]:
                scores = scores_of(x[row, t], weights, spec)
                index = chosen(scores, weights, spec)[rank]
                taken[index] += 1
                if taken[index] <= 3:
                    expected[row, t] += scores[index] * feed_forward(x[row, t], expert(weights, index))
                else:
                    dropped += 1
    out, report = run(module, x, segment_ids)
    assert dropped > 10
    np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(expected).max())
    real = segment_ids.astype(bool).sum()
    assert figures(report, real)["tokens_dropped"] == pytest.approx(dropped / (3 * real), rel=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "llama4", "biases"])
@pytest.mark.parametrize("capacity_factor", [-1.0, 8.0])
def test_gradients_are_those_of_every_expert_on_every_token(kind, capacity_factor):
    """Of the weights and the input, with what the router did not choose times zero; no choice is over the capacity."""
    module, _, x = layer(kind)
    module.spec = dataclasses.replace(module.spec, capacity_factor=capacity_factor)
    graphdef, state = nnx.split(module)
    context = ForwardContext(
        jnp.zeros((ROWS, T), jnp.int32), jnp.ones((ROWS, T)), make()[1].layout, "dot_product", True
    )

    def sparse(state, x_BTD):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x_BTD, context)[0]))

    def dense(state, x_BTD):
        module = nnx.merge(graphdef, state)
        scores_BTE = router.SCORE_FUNCTIONS[module.spec.routed_score_func](module._logits(x_BTD))
        experts_BTk, weights_BTk = router.choose(scores_BTE, None, module.spec)
        weights_BTE = jnp.sum(jax.nn.one_hot(experts_BTk, 8) * weights_BTk[..., None], axis=2)
        x_BTED = jnp.repeat(x_BTD[:, :, None], 8, axis=2)
        if module.spec.scale_expert_inputs:
            x_BTED *= weights_BTE[..., None]
        hidden_BTEAF = jnp.einsum("BTED,EDAF->BTEAF", x_BTED, module.wi[...])
        hidden_BTEAF += module.wi_bias[...] if kind == "biases" else 0
        hidden_BTEF = jax.nn.silu(hidden_BTEAF[..., 0, :]) * hidden_BTEAF[..., 1, :]
        out_BTED = jnp.einsum("BTEF,EFD->BTED", hidden_BTEF, module.wo[...])
        out_BTED += module.wo_bias[...] if kind == "biases" else 0
        if not module.spec.scale_expert_inputs:
            out_BTED *= weights_BTE[..., None]
        shared = module.shared(x_BTD, context)[0] if module.spec.shared_experts else 0
        return jnp.sum(jnp.sin(jnp.sum(out_BTED, axis=2) + shared))

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(state, x) for f in (sparse, dense))
    assert_close(found, expected, 1e-4)


def test_the_router_z_loss_is_the_mean_squared_logsumexp_and_shrinks_logits():
    module, weights, x = layer("biases")
    logits = x[:, :7] @ weights["router"] + weights["router_bias"]
    expected = np.mean(np.log(np.sum(np.exp(logits), axis=-1)) ** 2)
    segment_ids = (np.arange(T) < 7).astype(np.int32) * np.ones((ROWS, 1), np.int32)
    assert figures(run(module, x, segment_ids)[1], 7 * ROWS)["router_z_loss"] == pytest.approx(expected, rel=1e-5)
    trainer, batch = Trainer(initial=False, **EXPERTS, router_z_loss_weight=1.0), packed_rows(0)
    losses = [trainer.step(batch, number)["router_z_loss"] for number in range(6)]
    assert losses[-1] < losses[0]


def test_figures_stand_in_the_order_of_the_layers():
    """Three layers of a pattern of two with experts, twice, and a prediction layer: each busiest load is its number."""

    def report(*numbers):
        loads = jnp.array([[number / 8, 1 - number / 8] + [0.0] * 6 for number in numbers])
        one = jnp.ones((len(numbers), 1))
        return {"feed_forward": {"expert_load": loads, "expert_share": loads, "router_z": one, "tokens_dropped": one}}

    last = jax.tree.map(lambda x: x[0], report(8))
    reports = {
        "segments": {0: {0: report(4.5, 5.5), 1: {"feed_forward": {}}, 2: report(5, 6)}},
        "mtp": {0: {"block": last}},
    }
    np.testing.assert_allclose(by_layer(reports, 1)["expert_load_max"], [4.5, 5, 5.5, 6, 8])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({**EXPERTS, "capacity_factor": 0}, "capacity_factor=0.0 must be a positive number, or -1"),
        (
            {"capacity_factor": 1.25},
            "capacity_factor=1.25 (on the command line) has no effect: it needs num_experts=2 or more",
        ),
    ],
    ids=str,
)
def test_a_capacity_is_of_experts_and_not_zero(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load(**overrides)
