"""Experts shared out over devices: what one device computes, computed by eight."""

import jax
import numpy as np
import pytest
from test_moe import EXPERTS
from tiny import Trainer, assert_close, loss_and_gradients, make, packed_rows, random_weights

MIXTRAL = {**EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": "true", "load_balance_loss_weight": 0.02}
DEEPSEEK = {
    **EXPERTS,
    **{"attention_type": "mla", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_routing_groups": 4, "topk_routing_group": 2, "routing_group_score": "top2"},
    **{"routed_score_func": "sigmoid", "routed_bias": "true", "norm_topk_prob": "true", "shared_experts": 1},
    "router_z_loss_weight": 0.01,
}
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}
MESHES = {
    "expert 8": {"ici_expert_parallelism": 8},
    "expert 4 x fsdp 2": {"ici_expert_parallelism": 4},
    "expert 2 x fsdp 2 x tensor 2": {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2},
    "expert 2 x data 4": {"ici_expert_parallelism": 2, "ici_data_parallelism": 4, "ici_fsdp_parallelism": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def alone(request):
    """A model's settings, and its losses, gradients and weights after three steps on one device."""
    settings = MODELS[request.param]
    return settings, steps(1, settings), gradients(1, settings)


def steps(devices, settings):
    trainer = Trainer(devices=devices, initial=False, **settings)
    metrics = [trainer.step(packed_rows(number), number) for number in range(3)]
    return metrics, jax.device_get((trainer.state.trainable, trainer.state.stats))


def gradients(devices, settings):
    _, plan = make(devices, **settings)
    weights = jax.device_put(random_weights(plan), plan.shardings)
    return loss_and_gradients(plan, weights, packed_rows(0))


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_computes_what_one_device_does(alone, mesh):
    settings, (metrics, weights), (loss, expected) = alone
    found, gradient = gradients(8, settings | MESHES[mesh])
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_close(gradient, expected, 1e-3)
    found, found_weights = steps(8, settings | MESHES[mesh])
    for name in ("loss", "load_balance_loss", "router_z_loss", "expert_load_max"):
        np.testing.assert_allclose([step[name] for step in found], [step[name] for step in metrics], rtol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found_weights[1], weights[1])
