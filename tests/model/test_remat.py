"""Every remat_policy computes the same, and keeps for the backward pass what base.yml says it does."""

import re
from collections import Counter

import pytest
from jax.ad_checkpoint import print_saved_residuals
from tiny import assert_close, loss_and_gradients, make, packed_rows, random_weights

from src.train_step import loss_sums

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
ON_HOST = {"qkv_proj_offloaded": QKV, "minimal_offloaded": QKV | {"out_proj", "mlpwi"}}


@pytest.fixture(scope="module")
def exact():
    """A batch, weights, and the loss and gradients of a model that computes nothing again."""
    batch = packed_rows(0, rows=2)
    _, plan = make()
    weights = random_weights(plan)
    return batch, weights, loss_and_gradients(plan, weights, batch)


@pytest.mark.parametrize("overrides", [{"remat_policy": name} for name in (*KEPT, *ON_HOST)] + [CUSTOM], ids=str)
def test_policies_give_the_same_loss_and_gradients(exact, overrides):
    batch, weights, expected = exact
    _, plan = make(**overrides)
    assert_close(loss_and_gradients(plan, weights, batch), expected, 1e-5)


def residuals(capsys, **overrides):
    """What the backward pass of the model is handed, a line an array: its type, and where it comes from."""
    _, plan = make(**PATTERN, **overrides)
    batch = packed_rows(0, rows=3)
    print_saved_residuals(lambda weights: loss_sums(plan.decoder(weights), batch, plan, None)[0], plan.shapes)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("policy", "names"), KEPT.items())
def test_unrolled_blocks_keep_the_arrays_named(capsys, policy, names):
    lines = residuals(capsys, remat_policy=policy, scan_layers="false")
    kept = Counter(match[1] for line in lines if (match := re.search(r"named '(\w+)'", line)))
    assert kept == dict.fromkeys(names, 4)
    # Without names: the four blocks' inputs, and the final norm's.
    inputs = [line for line in lines if line.startswith("f32[3,16,32] output of sharding_constraint")]
    assert len(inputs) == 5


SHAPES = {
    "query_proj": ["3,16,4,8"] * 2,
    "key_proj": ["3,16,2,8"] * 2,
    "value_proj": ["3,16,2,8"] * 2,
    "context": ["3,16,4,8"] * 2,
    "out_proj": ["3,16,32"] * 2,
    "mlpwi": ["3,16,2,64", "3,16,2,48"],
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
