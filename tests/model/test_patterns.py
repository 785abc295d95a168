"""Gradients of blocks with experts in a pattern of several blocks, as on TPUs."""

import dataclasses

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from src.model.params import Weights, by_path
from src.step.loss import next_token_loss
from tests.tiny import assert_close, loss_and_gradients, make, packed_rows, random_weights

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24, "remat_policy": "full"}
TWO_BLOCKS = "[{repeats: 2, pattern: [{}, {sliding_window_size: 4, attention_type: local_sliding}]}]"
ONE_BLOCK = "[{repeats: 4, pattern: [{}]}]"


def plan_on_tpus(segments, **keys):
    """A plan that runs as on TPUs, on a CPU; and the same without barriers."""
    keys = {"base_num_decoder_layers": 4, "scan_layers": "true", "decoder_segments": segments, **keys}
    _, plan = make(1, **keys)
    return dataclasses.replace(plan, execution=dataclasses.replace(plan.execution, grad_barriers=True)), plan


def barred_shapes(plan):
    """The shapes of the arrays in each barrier of the loss and its gradients."""
    batch, weights = packed_rows(0), random_weights(plan)
    loss = jax.grad(lambda weights: next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss)
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "optimization_barrier":
                found.append({out.aval.shape for out in equation.outvars})
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(loss)(weights).jaxpr)
    return found


def expert_shapes(plan):
    """The shapes of one block's expert weights."""
    flat = by_path(random_weights(plan))
    return {
        each.shape[1:] for path, each in flat.items() if path[-2:] in {("feed_forward", "wi"), ("feed_forward", "wo")}
    }


@pytest.mark.parametrize("keys", [{}, {"shared_experts": 1, "scan_layers": "false"}], ids=str)
def test_each_blocks_experts_are_summed_before_the_block_before_it(keys):
    early, plain = plan_on_tpus(TWO_BLOCKS, **EXPERTS, **keys)
    assert len(expert_shapes(plain)) == 2
    assert any(expert_shapes(plain) <= shapes for shapes in barred_shapes(early))
    batch, weights = packed_rows(0), random_weights(plain)
    assert_close(loss_and_gradients(early, weights, batch), loss_and_gradients(plain, weights, batch), 1e-5)


@pytest.mark.parametrize("segments", [ONE_BLOCK])
def test_a_pattern_of_one_block_has_no_barrier_on_experts(segments):
    early, plain = plan_on_tpus(segments, **EXPERTS)
    assert not any(expert_shapes(plain) & shapes for shapes in barred_shapes(early))
