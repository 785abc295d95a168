"""Products with weights on a single CPU, and how layers run there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from src.model import matmul
from src.model.matmul import weight_matmul
from src.step.optimizer import hparams_at
from src.step.state import abstract_batch, abstract_state
from src.step.train_step import compile_steps
from tests.tiny import LENGTH, make

SIZES = dict(zip("BTDNHAFVR", (2, 3, 4, 2, 5, 2, 6, 7, 4), strict=True))
FORMS = ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTF,FD->BTD", "BTD,DAF->BTAF", "BTD,VD->BTV"]
BATCHED = ["BTNH,RNH->BTNR"]  # a matrix for each head is no product of two matrices


@pytest.mark.parametrize("einsum", FORMS + BATCHED)
@pytest.mark.parametrize(("devices", "large"), [(1, 0), (1, matmul.LARGE), (2, 0)])
def test_a_product_and_its_gradients_are_the_einsums(einsum, devices, large, monkeypatch):
    monkeypatch.setattr(matmul, "LARGE", large)
    rng = np.random.default_rng(0)
    dims_x, dims_kernel, dims_y = einsum.replace("->", ",").split(",")
    shapes = [[SIZES[dim] for dim in dims] for dims in (dims_x, dims_kernel, dims_y)]
    x, kernel, dy = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    whole = NamedSharding(Mesh(np.array(jax.devices()[:devices]), "d"), PartitionSpec())
    gradients = jax.grad(lambda *of: jnp.sum(weight_matmul(*of, einsum, "highest") * dy), (0, 1))
    compiled = jax.jit(gradients, in_shardings=whole)
    dx, dkernel = compiled(*jax.device_put((x, kernel), whole))
    np.testing.assert_allclose(dx, np.einsum(f"{dims_y},{dims_kernel}->{dims_x}", dy, kernel), 1e-4, 1e-5)
    np.testing.assert_allclose(dkernel, np.einsum(f"{dims_x},{dims_y}->{dims_kernel}", x, dy), 1e-4, 1e-5)
    arrays = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=whole) for each in (x, kernel)]
    equations = [eqn for eqn in _equations(compiled.trace(*arrays).jaxpr) if eqn.primitive.name == "dot_general"]
    are_matrices = [all(operand.aval.ndim == 2 for operand in eqn.invars) for eqn in equations]
    assert set(are_matrices) == {devices == 1 and einsum in FORMS}


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_multiplies_no_large_transposed_first_matrix(tied, monkeypatch):
    """XLA for CPUs takes up to three times as long for one, by the arrays of the compiled step."""
    monkeypatch.setattr(matmul, "LARGE", 0)
    config, plan = make(1, logits_via_embedding=tied)
    state, batch = abstract_state(plan), abstract_batch(plan, 2, LENGTH)
    step = compile_steps(plan, state)[0].lower(state, batch, hparams_at(config.step, config.run.steps, 0))
    dots = re.findall(r" dot\(.*", step.compile().as_text())
    assert dots
    assert not [dot for dot in dots if "lhs_contracting_dims={0}" in dot]


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def test_layers_are_unrolled_by_default_on_a_single_cpu_unless_there_are_many():
    def scans(devices=1, layers=2, key="auto"):
        return make(devices, scan_layers=key, base_num_decoder_layers=layers)[1].execution.scan_layers

    assert [scans(), scans(layers=16), scans(layers=17), scans(devices=2)] == [False, False, True, True]
    assert [scans(key=key) for key in ("true", "True", "false", "False")] == [True, True, False, False]
