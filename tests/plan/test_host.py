"""The time of copies to host memory, beside sums by hand."""

import functools
import math

import jax
import pytest

from src.extras.aot.topology import parse_topology
from src.extras.plan import host
from src.extras.plan.estimate import step_costs
from src.model import params
from src.model.decoder import Decoder
from tests.tiny import LENGTH, TINY, load, spec_of

H100, V5P = parse_topology("a3:1", 1), parse_topology("v5p:2x2x1", 1)
INPUTS = {"remat_policy": "custom", "remat_custom": "{decoder_layer_input: offload}"}


def estimated(config, topology):
    memory = step_costs(config, topology).memory
    return host.seconds(topology, memory.on_host, memory.saved_on_host * config.step.gradient_accumulation_steps)


def test_without_the_host_there_is_no_time():
    assert estimated(load(remat_policy="full"), H100) == 0
    assert estimated(load(remat_policy="minimal"), H100) == 0
    assert host.seconds(H100, 0, 0) == 0


def test_an_optimizer_is_read_and_written_before_the_next_step():
    """Two moments in float32, at 64 GB/s each way; a device of four has a quarter, at 16."""
    config = load(optimizer_memory_host_offload="true", remat_policy="full", dtype="bfloat16")
    weights = jax.tree.leaves(params.values(params.abstract(functools.partial(Decoder, spec_of(config)))[1]))
    size = 8 * sum(math.prod(weight.shape) for weight in weights)
    assert estimated(config, H100) == pytest.approx(2 * size / 64e9, rel=1e-3)
    assert estimated(config, V5P) == pytest.approx(2 * size / 4 / 16e9, rel=0.05)  # norms are replicated


@pytest.mark.parametrize("passes", [1, 3])
def test_half_of_the_copies_of_block_inputs_is_waited_for(passes):
    config = load(**INPUTS, gradient_accumulation_steps=passes, per_device_batch_size=2)
    inputs = TINY["base_num_decoder_layers"] * 2 * LENGTH * TINY["base_emb_dim"] * 4
    assert estimated(config, H100) == pytest.approx(passes * inputs / 64e9)


def test_what_a_policy_offloads_is_what_its_twin_keeps():
    """minimal_offloaded is minimal with its arrays in host memory."""
    policies = [load(remat_policy=policy, attention="dot_product") for policy in ("minimal_offloaded", "minimal")]
    assert estimated(policies[0], H100) > 0 == estimated(policies[1], H100)
    custom = load(
        remat_policy="custom",
        attention="dot_product",
        remat_custom="{query_proj: offload, key_proj: offload, value_proj: offload, out_proj: offload, "
        "mlpwi: offload, mlpwo: offload}",
    )
    assert estimated(custom, H100) == estimated(policies[0], H100)
