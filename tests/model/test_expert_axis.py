"""Experts shared out over devices: what one device computes, computed by eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_moe import EXPERTS, expert, feed_forward

from src.model.moe import dispatch
from src.model.moe.layer import Experts
from src.model.params import Rngs
from src.parallel.mesh import make_layout
from src.system.errors import UserError
from tests.tiny import Trainer, assert_close, load, loss_and_gradients, make, packed_rows, random_weights, spec_of

MIXTRAL = {**EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": "true", "load_balance_loss_weight": 0.02}
DEEPSEEK = {
    **EXPERTS,
    **{"attention_type": "mla", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_routing_groups": 4, "topk_routing_group": 2, "routing_group_score": "top2"},
    **{"routed_score_func": "sigmoid", "routed_bias": "true", "norm_topk_prob": "true", "shared_experts": 1},
    "router_z_loss_weight": 0.01,
}
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "capacity": {**MIXTRAL, "capacity_factor": 1.0}}
MESHES = {
    "expert 8": {"ici_expert_parallelism": 8},
    "expert 4 x fsdp 2": {"ici_expert_parallelism": 4},
    "expert 2 x fsdp 2 x tensor 2": {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2},
    "expert 2 x data 4": {"ici_expert_parallelism": 2, "ici_data_parallelism": 4, "ici_fsdp_parallelism": 1},
    "expert 4 x context 2": {"ici_expert_parallelism": 4, "ici_context_parallelism": 2},
    "context 4 x fsdp 2": {"ici_context_parallelism": 4},
    "expert 2 x stage 2 x fsdp 2": {
        **{"ici_expert_parallelism": 2, "ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2}
    },
}
# Each axis beside experts once, but for tensor: that is with data, in micro-batches, below.
CASES = [
    ("deepseek", "expert 2 x stage 2 x fsdp 2"),
    ("capacity", "expert 4 x context 2"),  # if devices share rows, whole rows choose which tokens are dropped
]
FURTHER = [
    *(("mixtral", mesh) for mesh in ("expert 2 x data 4", "expert 8", "expert 4 x fsdp 2", "expert 4 x context 2")),
    *((model, "expert 2 x fsdp 2 x tensor 2") for model in ("mixtral",)),
    *((model, "expert 2 x stage 2 x fsdp 2") for model in ("mixtral", "deepseek")),
    *(("deepseek", mesh) for mesh in ("expert 8", "expert 4 x context 2")),
    *(("capacity", mesh) for mesh in ("expert 4 x fsdp 2", "context 4 x fsdp 2")),
]


@functools.cache
def computed(model, mesh):
    """The gradients of a step, and the metrics and statistics of three; an empty mesh is one device."""
    devices, settings = 8 if mesh else 1, MODELS[model] | MESHES.get(mesh, {})
    trainer = Trainer(devices=devices, initial=False, opt_type="sgd", learning_rate=0.5, **settings)
    before = jax.device_get(trainer.state.weights.trainable)
    metrics = [trainer.step(packed_rows(0), 5)]
    after = jax.device_get(trainer.state.weights.trainable)
    metrics += [trainer.step(packed_rows(number), 5) for number in (1, 2)]
    return jax.tree.map(np.subtract, before, after), metrics, jax.device_get(trainer.state.weights.stats)


@pytest.mark.parametrize(
    ("model", "mesh"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)]
)
def test_any_mesh_computes_what_one_device_does(model, mesh):
    update, metrics, stats = computed(model, "")
    found_update, found_metrics, found_stats = computed(model, mesh)
    assert_close(found_update, update, 1e-3)  # of plain gradient descent: the gradient
    for name in ("loss", "load_balance_loss", "router_z_loss", "expert_load_max", "tokens_dropped", "grad_norm"):
        values, expected = ([step[name] for step in steps] for steps in (found_metrics, metrics))
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-7)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found_stats, stats)
    assert (np.max(metrics[0]["tokens_dropped"]) > 0.05) == (model == "capacity")


@pytest.mark.long
def test_micro_batches_on_a_mesh():
    """Their gradients are added up within a `shard_map` over data.

    A load-balance loss without a weight is of the whole batch, and with one of each micro-batch.
    """
    settings = MIXTRAL | {"load_balance_loss_weight": 0.0}
    mesh = {
        "ici_expert_parallelism": 2,
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 1,
        "ici_tensor_parallelism": 2,
    }
    alone = Trainer(initial=False, **settings)
    shared = Trainer(devices=8, initial=False, **settings, **mesh, gradient_accumulation_steps=2)
    metrics, expected = shared.step(packed_rows(0), 5), alone.step(packed_rows(0), 5)
    for name in ("loss", "grad_norm", "expert_load_max", "load_balance_loss", "router_z_loss"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4)


def routed(choices_BTk, devices=8, real_BT=None, **overrides):
    """A layer whose tokens choose these experts, on a mesh, its arguments, and its output by numpy; all tokens real."""
    B, T, k = choices_BTk.shape
    config = load(**{**EXPERTS, "num_experts_per_tok": k, **overrides})
    layout = make_layout(config.mesh, jax.devices()[:devices])
    rng = np.random.default_rng(0)
    module = Experts(spec_of(config).layers[0], 1.0, "float32", Rngs(jax.random.key(0)))
    nnx.update(module, jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape), nnx.state(module)))
    graphdef, state = nnx.split(module)
    x, weights_BTk = rng.normal(size=(B, T, 32)).astype(np.float32), rng.uniform(size=(B, T, k)).astype(np.float32)
    real_BT = np.ones((B, T), bool) if real_BT is None else real_BT

    def run(state, x_BTD, weights_BTk):
        return nnx.merge(graphdef, state)._run(x_BTD, choices_BTk, weights_BTk, real_BT, layout)[0]

    weights = nnx.to_pure_dict(state)
    expected = np.zeros_like(x)
    for row, t, rank in np.ndindex(B, T, k):
        chosen = expert(weights, choices_BTk[row, t, rank])
        expected[row, t] += weights_BTk[row, t, rank] * feed_forward(x[row, t], chosen)
    return run, (state, x, weights_BTk), expected


def one_peers(k):
    """All tokens choose the first k experts."""
    return np.broadcast_to(np.arange(k), (8, 16, k))


def uneven(k):
    """Most tokens choose few experts, and each device's tokens others."""
    rng = np.random.default_rng(1)
    odds = np.array([20, 1, 1, 6, 1, 1, 1, 1]) / 32
    return np.array([[rng.choice(8, k, replace=False, p=odds) for _ in range(16)] for _ in range(8)])


CHOICES = {"one of one": one_peers(1), "three": one_peers(3), "uneven": uneven(2)}


@functools.cache
def output_and_gradients(choices, **mesh):
    """Of these choices' layer, with its output by numpy."""
    run, inputs, expected = routed(CHOICES[choices], **mesh)

    def summed(*inputs):
        out = run(*inputs)
        return jnp.sum(jnp.sin(out)), out

    gradients, out = jax.jit(jax.grad(summed, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return out, gradients, expected


@pytest.mark.parametrize(
    ("choices", "experts"),
    [
        *((choices, 8) for choices in CHOICES if choices != "three"),
        pytest.param("three", 8, marks=pytest.mark.long),
        *(pytest.param(choices, 2, marks=pytest.mark.long) for choices in CHOICES),
        *(pytest.param(choices, 4, marks=pytest.mark.long) for choices in CHOICES),
    ],
)
def test_no_token_is_lost_however_they_choose(choices, experts):
    """Also where more windows than one are needed: the output, and gradients as one device's."""
    out, gradients, expected = output_and_gradients(choices, ici_expert_parallelism=experts)
    _, gradients_of_one, _ = output_and_gradients(choices, devices=1)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    assert_close(gradients, gradients_of_one, 1e-5)


def test_balanced_experts_take_one_window_and_a_single_one_many():
    """Eight peers with 100 rows each have room for 125: as many arrive when all are chosen as often, or 800."""
    peers = dispatch.ExpertGroup(("expert",), 8, (), "cpu")
    layout = make_layout(load(**EXPERTS, ici_expert_parallelism=8).mesh, jax.devices())
    even, one = np.full((8, 8), 100 // 8 + 1), np.eye(8, dtype=int)[[0] * 8] * 100
    windows = [
        layout.shard_map(
            lambda rows=rows: dispatch.Windows(None, 125, peers).count(jnp.asarray(rows)), (), layout.spec(())
        )()
        for rows in (even, one)
    ]
    assert list(map(int, windows)) == [1, 7]


def test_padding_causes_no_second_window(monkeypatch):
    """Three quarters of the rows are padding, which is all alike and would choose one expert."""
    real_BT = np.broadcast_to(np.arange(16) < 4, (8, 16))
    balanced = np.arange(8 * 16 * 2).reshape(8, 16, 2) % 8
    choices = np.where(real_BT[..., None], balanced, [0, 1])
    counts, windows = [], dispatch.Windows.count

    def counted(*arguments):
        found = windows(*arguments)
        jax.debug.callback(lambda count: counts.append(int(count)), found)
        return found

    monkeypatch.setattr(dispatch.Windows, "count", counted)
    for real, expected in ((real_BT, 1), (np.ones_like(real_BT), 3)):
        run, inputs, _ = routed(choices, real_BT=real, ici_expert_parallelism=8)
        jax.block_until_ready(jax.jit(run)(*inputs))
        jax.effects_barrier()
        assert set(counts) == {expected}
        counts.clear()


@pytest.mark.long
def test_adapted_experts_on_a_mesh():
    settings = {**MIXTRAL, "lora_rank": 2, "lora_parameters": "[feed_forward.wi, feed_forward.wo]"}
    settings["load_parameters_path"] = "x"
    _, alone = make(1, **settings)
    _, shared = make(8, **settings, ici_expert_parallelism=2, ici_tensor_parallelism=2)
    weights = random_weights(alone)
    found = loss_and_gradients(shared, jax.device_put(weights, shared.shardings), packed_rows(0))
    assert_close(found, loss_and_gradients(alone, weights, packed_rows(0)), 1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "this model has no experts .num_experts=1.: set ici_expert_parallelism=1"),
        ({**EXPERTS, "num_experts": 6}, "num_experts=6 is not divisible by expert=4: change it, or ici_expert_par"),
    ],
)
def test_a_mesh_that_does_not_fit_the_experts(overrides, message):
    with pytest.raises(UserError, match=message):
        make(8, **overrides, ici_expert_parallelism=4)
