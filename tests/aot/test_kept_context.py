"""A policy that keeps attention's output keeps all that its kernel's backward pass needs."""

from collections import Counter

import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.run import resolve_config
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_cuda, needs_libtpu
from tests.tiny import BASE

SIZES = (*SMALL, "base_num_decoder_layers=2", "dataset_type=synthetic", "max_target_length=1024")


def primitives(jaxpr, found):
    """How often each primitive is in a program; what a loop or its like contains counts once."""
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in jaxprs_in_params(equation.params):
            primitives(inner, found)
    return found


def counted(topology, *keys):
    devices = abstract_devices(parse_topology(topology, 1))
    traced = trace_train_step(resolve_config.load([BASE, *SIZES, *keys]), devices, {})
    jaxpr = traced.jax_traced.jaxpr.jaxpr
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return primitives(used, Counter())


# The primitives of a kernel's forward pass, and how many of them a packed batch and an unpacked one have.
KERNELS = {
    "cudnn_flash": ("a3:1", "dot_product_attention_fwd", {True: 4, False: 1}),  # one list of segments, two, or a mask
    "flash": ("v5e-1", "pallas_call", {True: 1, False: 1}),
    "blocked": ("v5e-1", "scan", {True: 1, False: 1}),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("cudnn_flash", marks=needs_cuda),
        pytest.param("flash", marks=needs_libtpu),
        pytest.param("blocked", marks=needs_libtpu),
    ],
)
def test_attention_is_not_run_again(kernel, packed):
    topology, primitive, expected = KERNELS[kernel]
    keys = (f"attention={kernel}", f"packing={packed}".lower())
    again, once = (counted(topology, *keys, f"remat_policy={policy}") for policy in ("minimal", "minimal_with_context"))
    assert again[primitive] - once[primitive] == expected[packed]
