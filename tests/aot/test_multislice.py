"""Slices joined by a slow network: of a step that copies weights to each, gradients alone cross it, once."""

import math

import jax
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.topology import parse_topology
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_cuda, needs_libtpu
from tests.tiny import TINY, load

MODEL = {
    **TINY,
    **dict(pair.split("=") for pair in SMALL),
    "dtype": "bfloat16",
    "base_num_decoder_layers": 4,
    "head_dim": 128,
}


def between_slices(topology, slices, **keys):
    """The collectives between slices of a step, and the bytes of a device's part of all gradients."""
    config = load(**{**MODEL, "remat_policy": "full", "per_device_batch_size": 1, **keys})
    step = trace_train_step(config, abstract_devices(parse_topology(topology, slices)))
    mesh, text = step.plan.layout.mesh, step.jax_traced.lower().compile().as_text()
    parts = jax.tree.map(
        lambda leaf, at: 4 * math.prod(at.shard_shape(leaf.shape)), step.plan.shapes, step.plan.shardings
    )
    return [each for each in collectives(text, mesh) if each.network == "dcn"], sum(jax.tree.leaves(parts))


KINDS = ("all-reduce", "reduce-scatter", "all-gather")
MESHES = PLAIN, MICRO_BATCHES, TENSOR, STAGES = [
    {},
    {"gradient_accumulation_steps": 4},
    {"ici_tensor_parallelism": 2, "gradient_accumulation_steps": 2},
    {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2},
]


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize(
    ("slices", "keys"),
    [
        (4, PLAIN),  # micro-batches: on hosts of GPUs, below
        *(pytest.param(2, keys, marks=pytest.mark.long) for keys in (PLAIN, MICRO_BATCHES, TENSOR, STAGES)),
        *(pytest.param(4, keys, marks=pytest.mark.long) for keys in (MICRO_BATCHES, TENSOR, STAGES)),
    ],
    ids=str,
)
def test_a_step_sends_its_gradients_between_slices_once_and_nothing_else(slices, keys):
    found, gradients = between_slices("v5e-8", slices, **keys)
    assert {(each.kind, each.axes) for each in found} == {("all-reduce", ("data",))}
    # A ring of n sends 2 (n - 1) / n of what it sums; beside the gradients only some numbers of the loss. One
    # micro-batch's cross in the dtype of the products that made them, sums of several rounds in float32.
    sent = sum(each.times * each.sent_bytes for each in found) / (2 * (slices - 1) / slices)
    # (Stages cut one of the tables' gradients after it has crossed.)
    assert sent <= (1.1 if "ici_pipeline_parallelism" in keys else 1.01) * gradients
    assert sent >= (0.99 if keys else 0.5) * gradients


@needs_libtpu
@pytest.mark.long  # a lookup for TPUs: tests/model/test_lookup.py
@pytest.mark.usefixtures("little_effort")
def test_a_device_looks_up_the_tokens_and_positions_of_its_own_rows():
    """XLA by itself makes of a lookup within the map over slices one of all their rows, on every device."""
    emb_dim, rows, length = 384, 2, 256  # of a micro-batch on one device
    keys = {"base_emb_dim": emb_dim, "base_num_decoder_layers": 1, "per_device_batch_size": rows}
    keys |= {"position_type": "learned", "trainable_position_size": length, "gradient_accumulation_steps": 2}
    config = load(**{**MODEL, **keys})
    text = trace_train_step(config, abstract_devices(parse_topology("v5e-4", 2))).jax_traced.lower().compile().as_text()

    def of_rows(rows):
        return [shape for shape in (f"[{rows},{length},{emb_dim}]", f"[{rows * length},{emb_dim}]") if shape in text]

    assert of_rows(rows)
    assert not of_rows(4 * rows)
    assert not of_rows(8 * rows)


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.long
@pytest.mark.parametrize("keys", [MICRO_BATCHES, PLAIN, TENSOR, STAGES], ids=str)
def test_where_each_slice_updates_its_part_it_gets_sums_of_that_part_alone(keys):
    found, gradients = between_slices("v5e-8", 2, base_emb_dim=1024, shard_optimizer_over_data="true", **keys)
    sent = {kind: sum(each.times * each.sent_bytes for each in found if each.kind == kind) for kind in KINDS}
    assert {each.axes for each in found} == {("data",)}
    assert sum(sent.values()) == sum(each.times * each.sent_bytes for each in found)
    # Of two parts a device sends the other's; it gets back the part of the weights that the other has updated.
    assert sent["all-gather"] == pytest.approx(gradients / 2, rel=0.01)
    # One round's sums cross whole in bfloat16, the same bytes; beside several's only numbers of the loss.
    assert sent["all-reduce"] + sent["reduce-scatter"] <= 1.02 * gradients / 2
    assert sent["all-reduce"] <= 0.01 * gradients or not keys


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "load_balance_loss_weight": 0.01, "ici_expert_parallelism": 4}


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.long
@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_experts_add_no_more_than_their_loads(keys):
    """The loads, of which the load-balance loss is made, are all that goes with the gradients."""
    found, gradients = between_slices("v5e-8", 2, **EXPERTS, **keys)
    assert {each.kind for each in found} == {"all-reduce"}
    assert sum(each.times * each.sent_bytes for each in found) <= 1.02 * gradients


@pytest.mark.long
@needs_libtpu
def test_experts_whose_losses_have_no_weight_wait_for_other_slices_once_a_step():
    keys = {**EXPERTS, "load_balance_loss_weight": 0.0, "gradient_accumulation_steps": 2}
    found, _ = between_slices("v5e-8", 2, **keys)
    assert {each.times for each in found} == {1}


@pytest.mark.long
@needs_libtpu
@pytest.mark.usefixtures("little_effort")
def test_experts_of_other_slices_get_rows_and_send_them_back():
    """Of 256 tokens with two experts each a device sends all rows, and gets as many: where experts are balanced."""
    keys = {**EXPERTS, "base_emb_dim": 1024, "ici_expert_parallelism": 1, "dcn_expert_parallelism": 2}
    found, _ = between_slices("v5e-8", 2, **keys, dcn_data_parallelism=1)
    exchanges = [each for each in found if each.kind == "ragged-all-to-all"]
    row, rows = 1024 * 2, 256 * 2
    assert {each.whole_bytes for each in exchanges} == {rows * row}
    assert {(each.axes, each.sent_bytes / each.whole_bytes) for each in exchanges} == {(("expert",), 1 / 2)}
    # In each of four layers there and back, forward, forward again, and backward; and as often in a further window.
    assert sum(each.times for each in exchanges) == sum(each.per_round for each in exchanges) >= 4 * 3 * 2


@needs_cuda
@pytest.mark.parametrize(
    "keys", [pytest.param(keys, marks=pytest.mark.long) for keys in ({}, {"gradient_accumulation_steps": 4})], ids=str
)
def test_so_does_one_on_hosts_of_gpus(keys):
    found, gradients = between_slices("a3", 2, **keys)
    assert {each.kind for each in found} == {"all-reduce"}
    assert 0.49 * gradients <= sum(each.times * each.sent_bytes for each in found) <= 1.01 * gradients
