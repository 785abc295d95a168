"""A wide feed-forward layer in halves, as on TPUs, against the whole layer, which parity tests hold to transformers."""

import dataclasses
import functools

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from src.model.params import Weights
from src.step.loss import next_token_loss
from tests.tiny import GPT3, assert_close, loss_and_gradients, make, packed_rows, random_weights

WIDE = 256  # eight times the embedding, and each half whole vectors of 128


def plan_on_tpus(devices=1, **keys):
    """A plan that runs as on TPUs, on CPUs; and the same without early gradients."""
    _, plan = make(devices, base_mlp_dim=WIDE, **{"remat_policy": "full", **keys})
    return dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, grad_barriers=True)), plan


def widths(plan):
    """The last dims of all activations of rows [8, 16, ...] that the loss and its gradients make."""
    batch, weights = packed_rows(0), random_weights(plan)
    loss = jax.grad(lambda weights: next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss)
    found = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            found.update(out.aval.shape[2:] for out in equation.outvars if out.aval.shape[:2] == (8, 16))
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(loss)(weights).jaxpr)
    return {shape[-1] for shape in found if shape}


@pytest.mark.parametrize("keys", [{}, {**GPT3, "attention_bias": "false"}, {"remat_policy": "save_qkv_proj"}], ids=str)
def test_halves_have_the_whole_layers_loss_and_gradients(keys):
    in_halves, whole = plan_on_tpus(**keys)
    batch, weights = packed_rows(0), random_weights(whole)
    assert WIDE // 2 in widths(in_halves)
    assert WIDE not in widths(in_halves)
    assert WIDE in widths(whole)
    assert_close(loss_and_gradients(in_halves, weights, batch), loss_and_gradients(whole, weights, batch), 1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"remat_policy": "none"},
        {"remat_policy": "minimal"},
        {"base_emb_dim": 64},
        {"normalization_placement": "both"},
        {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 1},
    ],
    ids=str,
)
def test_a_layer_stays_whole_if_its_hidden_units_are_saved_sharded_or_few(keys):
    in_halves, _ = plan_on_tpus(keys.get("ici_tensor_parallelism", 1), **keys)
    assert WIDE in widths(in_halves)


FOR_GPU = {
    "biases": {**GPT3, "mlp_activations": "[gelu, linear]"},
    "adapters": {"lora_rank": 3, "lora_alpha": 0.5, "lora_parameters": "['*']", "load_parameters_path": "elsewhere"},
    "fp8": {"quantization": "fp8"},
    "int8, unrolled": {"quantization": "int8", "scan_layers": "false"},
    "unrolled": {"scan_layers": "false"},
}


@pytest.mark.parametrize("kind", FOR_GPU)
def test_what_gpus_compute_faster_is_the_same(kind):
    """Factors and stacked gradients as separate arrays; in 8 bits, a gradient's scale is then each factor's own."""
    _, plan = make(**FOR_GPU[kind])
    for_gpu = dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, for_gpu=True))
    batch, weights = packed_rows(0), random_weights(plan)
    traced = [jax.jit(functools.partial(loss_and_gradients, each)).trace(weights, batch) for each in (for_gpu, plan)]
    assert str(traced[0].jaxpr) != str(traced[1].jaxpr)
    found, expected = (each.lower().compile()(weights, batch) for each in traced)
    assert_close(found, expected, 0.05 if "8" in kind else 1e-5)


def test_on_gpus_an_activation_saves_only_its_inputs():
    """XLA itself recomputes what is cheap, but saves gelu's tanh and further intermediates, at least two per layer."""
    keys = {"remat_policy": "none", "mlp_activations": "[gelu, linear]", "base_mlp_dim": WIDE}
    _, plan = make(base_num_decoder_layers=4, **keys)
    for_gpu = dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, for_gpu=True))
    batch, weights = packed_rows(0), random_weights(plan)
    sizes = []
    for each in (for_gpu, plan):
        compiled = jax.jit(functools.partial(loss_and_gradients, each)).lower(weights, batch).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    array = batch["tokens"].size * WIDE * 4
    assert sizes[0] < sizes[1] - 2 * 4 * array
