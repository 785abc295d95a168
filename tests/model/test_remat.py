"""Every remat_policy computes the same, and keeps for the backward pass what base.yml says it does."""

import functools
import re
from collections import Counter

import jax
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.extend.core import jaxprs_in_params

from src.model.params import Weights
from src.step.loss import next_token_loss
from tests.tiny import assert_close, loss_and_gradients, make, packed_rows, random_weights

# Two blocks, twice, so that a policy is seen to hold for each block of a pattern.
PATTERN = {"base_num_decoder_layers": 4, "decoder_segments": "[{repeats: 2, pattern: [{}, {base_mlp_dim: 48}]}]"}
CUSTOM = {"remat_policy": "custom", "remat_custom": "{decoder_layer_input: offload, context: device, mlpwi: offload}"}

# base.yml's words, less mlpwo: no derivative needs it, for the next block's input holds the sum that it is part of.
QKV = {"query_proj", "key_proj", "value_proj"}
KEPT = {
    "full": set(),
    "minimal": QKV | {"out_proj", "mlpwi"},
    "minimal_with_context": QKV | {"out_proj", "mlpwi", "context"},
    "save_qkv_proj": QKV,
    "save_out_proj": {"out_proj"},
}
PER_BLOCK = {"mlpwi": 2}  # arrays of a name, if not one: each factor's
ON_HOST = {"qkv_proj_offloaded": QKV, "minimal_offloaded": QKV | {"out_proj", "mlpwi"}}


@pytest.fixture(scope="module")
def exact():
    """A batch, weights, and the loss and gradients of a model that computes nothing again."""
    batch = packed_rows(0, rows=2)
    _, plan = make()
    weights = random_weights(plan)
    return batch, weights, loss_and_gradients(plan, weights, batch)


POLICIES = [{"remat_policy": name} for name in (*KEPT, *ON_HOST)] + [CUSTOM]


# Nothing kept, each array where it is told to, and all that can be; what the others keep is tested below.
EXACT = [{"remat_policy": name} for name in ("full", "minimal_with_context", "minimal_offloaded")] + [CUSTOM]


@pytest.mark.parametrize(
    "overrides", [pytest.param(each, marks=() if each in EXACT else pytest.mark.long) for each in POLICIES], ids=str
)
def test_policies_give_the_same_loss_and_gradients(exact, overrides):
    batch, weights, expected = exact
    _, plan = make(**overrides)
    assert_close(loss_and_gradients(plan, weights, batch), expected, 1e-5)


def residuals(capsys, **overrides):
    """What the backward pass of the model is handed, a line an array: its type, and where it comes from."""
    _, plan = make(**PATTERN, **overrides)
    batch = packed_rows(0, rows=3)
    print_saved_residuals(
        lambda weights: next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss, plan.shapes
    )
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("policy", "names"), KEPT.items())
def test_unrolled_blocks_keep_the_arrays_named(capsys, policy, names):
    lines = residuals(capsys, remat_policy=policy, scan_layers="false")
    kept = Counter(match[1] for line in lines if (match := re.search(r"named '(\w+)'", line)))
    assert kept == {name: 4 * PER_BLOCK.get(name, 1) for name in names}
    # Without names: the four blocks' inputs and the final norm's; and the output projection's, a matrix on one CPU.
    inputs = [line for line in lines if line.startswith("f32[3,16,32] output of sharding_constraint")]
    assert len(inputs) == 5
    assert [line for line in lines if line.startswith("f32[48,32] output of reshape")]


SHAPES = {
    "query_proj": ["3,16,4,8"] * 2,
    "key_proj": ["3,16,2,8"] * 2,
    "value_proj": ["3,16,2,8"] * 2,
    "context": ["3,16,4,8"] * 2,
    "out_proj": ["3,16,32"] * 2,
    "mlpwi": ["3,16,64"] * 2 + ["3,16,48"] * 2,
}
INPUTS = ["3,16,32"] * 2


def shapes(names):
    return [shape for name in names for shape in SHAPES[name]]


def scanned(lines, memory):
    """The shapes, without the dim of repeats, of what a scan over the pattern's two repeats stacks up."""
    found = [re.match(rf"f32{memory}\[2,([\d,]+)\] output of scan", line) for line in lines]
    return sorted(match[1] for match in found if match)


@pytest.mark.parametrize(("policy", "names"), KEPT.items())
def test_scanned_blocks_keep_the_same(capsys, policy, names):
    lines = residuals(capsys, remat_policy=policy)
    assert scanned(lines, memory="") == sorted([*INPUTS, *shapes(names)])
    assert scanned(lines, memory="<host>") == []


@pytest.mark.parametrize(("policy", "names"), ON_HOST.items())
def test_offloaded_arrays_lie_in_host_memory(capsys, policy, names):
    lines = residuals(capsys, remat_policy=policy)
    assert scanned(lines, memory="") == INPUTS
    assert scanned(lines, memory="<host>") == sorted(shapes(names))


def test_custom_keeps_each_array_where_it_is_told_to(capsys):
    lines = residuals(capsys, **CUSTOM)
    assert scanned(lines, memory="") == SHAPES["context"]
    assert scanned(lines, memory="<host>") == sorted([*INPUTS, *SHAPES["mlpwi"]])


# Two stages with two turns of two layers each, of four micro-batches: nine iterations.
STAGES = {
    "base_num_decoder_layers": 8,
    "ici_pipeline_parallelism": 2,
    "num_pipeline_repeats": 2,
    "num_pipeline_microbatches": 4,
}
ITERATIONS, TURN = 9, 2


@pytest.fixture(scope="module")
def exact_of_eight_layers():
    """As `exact`, of more layers and rows."""
    batch = packed_rows(0, rows=4)
    _, plan = make(base_num_decoder_layers=8)
    weights = random_weights(plan)
    return batch, weights, loss_and_gradients(plan, weights, batch)


# Nothing kept, and some here and some there; the rest are of these kinds, and test_pipeline.py computes nothing again.
STAGED = [(CUSTOM, "false")]
FURTHER = [
    (overrides, scan_layers)
    for overrides in [*POLICIES, {"remat_policy": "none"}]
    for scan_layers in ("true", "false")
    if (overrides, scan_layers) not in STAGED
]


@pytest.mark.parametrize(
    ("overrides", "scan_layers"), [*STAGED, *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)], ids=str
)
def test_policies_give_the_same_loss_and_gradients_in_a_pipeline(exact_of_eight_layers, overrides, scan_layers):
    batch, weights, expected = exact_of_eight_layers
    _, plan = make(2, scan_layers=scan_layers, **STAGES, **overrides)
    assert_close(loss_and_gradients(plan, jax.device_put(weights, plan.shardings), batch), expected, 1e-5)


@functools.cache
def backward(devices=1, **overrides):
    """The program of the gradients, as a jaxpr."""
    _, plan = make(devices, **overrides)
    batch = packed_rows(0, rows=12)
    gradients = jax.grad(lambda weights: next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss)
    return jax.make_jaxpr(gradients)(plan.shapes).jaxpr


def products(jaxpr):
    """How many matrix products a program executes."""
    return sum(
        (equation.primitive.name == "dot_general")
        + equation.params.get("length", 1) * sum(map(products, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def stacked(jaxpr):
    """What the loop over a pipeline's iterations stacks up for the backward pass."""
    for equation in jaxpr.eqns:
        if equation.params.get("length") == ITERATIONS and not equation.params["reverse"]:
            of_round = equation.params["jaxpr"].jaxpr.outvars
            pairs = zip(equation.outvars, of_round, strict=True)
            yield from (all_.aval.str_short(True) for all_, one in pairs if all_.aval.shape != one.aval.shape)
        for inner in jaxprs_in_params(equation.params):
            yield from stacked(inner)


# Nothing, some and most kept, here and there.
OF_TURNS = [
    *((policy, "true") for policy in ("full", "minimal_with_context", "save_out_proj", "minimal_offloaded")),
    ("save_qkv_proj", "false"),
]
by_policy = pytest.mark.parametrize(
    ("policy", "scan_layers"),
    [
        pytest.param(policy, scan_layers, marks=() if (policy, scan_layers) in OF_TURNS else pytest.mark.long)
        for policy in (*KEPT, *ON_HOST)
        for scan_layers in ("true", "false")
    ],
)


@by_policy
def test_turns_of_a_pipeline_keep_what_their_blocks_keep_and_no_weights(policy, scan_layers):
    jaxpr = backward(2, **STAGES, remat_policy=policy, scan_layers=scan_layers)
    dims = f"{ITERATIONS},{TURN}" if scan_layers == "true" else f"{ITERATIONS}"
    times = 1 if scan_layers == "true" else TURN
    kept = [f"f32[{dims},{INPUTS[0]}]"]
    for memory, names in (("", KEPT.get(policy, ())), ("<host>", ON_HOST.get(policy, ()))):
        kept += [f"f32{memory}[{dims},{SHAPES[name][0]}]" for name in names for _ in range(PER_BLOCK.get(name, 1))]
    assert Counter(array for array in stacked(jaxpr) if array.startswith("f32")) == Counter(kept * times)


@by_policy
def test_turns_of_a_pipeline_compute_again_what_blocks_do(policy, scan_layers):
    settings = {"remat_policy": policy, "scan_layers": scan_layers}
    rest = 3  # the output projection, and its two gradients
    of_layers = products(backward(base_num_decoder_layers=8, **settings)) - rest
    of_turns = products(backward(2, **STAGES, **settings)) - rest
    assert of_turns / (ITERATIONS * TURN) == of_layers / 8
