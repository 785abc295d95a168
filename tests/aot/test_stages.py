"""What a pipelined step moves between TPUs, read from the program that XLA's compiler makes of it."""

import jax
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.memory import memory
from src.extras.aot.roofline import constants_of, predict, work_of
from src.extras.aot.topology import parse_topology
from src.run import resolve_config
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_libtpu
from tests.tiny import BASE, LENGTH, TINY, load

ROWS, TOKENS, WIDTH, LAYERS = 4, 256, 256, 8  # rows of a micro-batch
MESH = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")


@needs_libtpu
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.long), 2])
def test_stages_pass_on_activations_and_no_weights(repeats, capfd):
    micro_batches = 4
    keys = (f"num_pipeline_repeats={repeats}", f"num_pipeline_microbatches={micro_batches}", "per_device_batch_size=2")
    layers = f"base_num_decoder_layers={LAYERS}"
    config = resolve_config.load(
        [BASE, *SMALL, *MESH, *keys, layers, "dataset_type=synthetic", "mlp_activations=[gelu]"]
    )
    traced = trace_train_step(config, abstract_devices(parse_topology("v5e-8", 1)))
    compiled = traced.jax_traced.lower().compile()
    moved = collectives(compiled.as_text(), traced.plan.layout.mesh)
    iterations = micro_batches * repeats + 1
    turn = LAYERS // 2 // repeats

    # In each iteration the rows of a micro-batch that fsdp leaves a device, in bfloat16; and their gradients.
    between = [each for each in moved if each.axes == ("stage",)]
    assert [(each.kind, each.whole_bytes, each.times) for each in between if each.times > 1] == [
        ("collective-permute", ROWS // 2 * TOKENS * WIDTH * 2, iterations)
    ] * 2
    # Besides, once: all rows after the last stage, and the gradient of the first one's.
    once = [each for each in between if each.times == 1]
    whole = ROWS // 2 * micro_batches * TOKENS * WIDTH * 2
    assert [each.whole_bytes for each in once if each.kind == "all-reduce" and each.whole_bytes > 100] == [whole] * 2
    # Weights change stages where they have several turns: half of a device's parts, and the gradients of as many come
    # back, in float32 or in the dtype of the products.
    products, norms = 4 * WIDTH * WIDTH + 2 * WIDTH * 512, 2 * WIDTH
    half = LAYERS // 2 * (products // 4 + norms) // 2
    sent = sum(each.sent_bytes for each in once if each.kind == "collective-permute")
    assert 2 * half * 2 <= sent <= 2 * half * 4 if repeats > 1 else sent == 0
    assert {each.kind for each in once} <= {"all-reduce", "collective-permute"}
    # fsdp gathers the weights of a layer when its turn comes, and no others.
    gathers = [each for each in moved if each.kind == "all-gather" and each.axes == ("fsdp",)]
    assert {each.times for each in gathers} == {1, iterations * turn}
    assert not [each for each in moved if each.kind == "all-gather" and set(each.axes) - {"fsdp"}]
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.long
@needs_libtpu
@pytest.mark.usefixtures("little_effort")
def test_stages_in_slices_of_their_own_send_each_other_rows_and_no_weights():
    mesh = ("dcn_pipeline_parallelism=2", "dcn_data_parallelism=1", "num_pipeline_microbatches=4")
    keys = (f"base_num_decoder_layers={LAYERS}", "dataset_type=synthetic", "per_device_batch_size=2")
    config = resolve_config.load([BASE, *SMALL, *mesh, *keys])
    traced = trace_train_step(config, abstract_devices(parse_topology("v5e-4", 2)))
    moved = collectives(traced.jax_traced.lower().compile().as_text(), traced.plan.layout.mesh)
    between = [each for each in moved if each.network == "dcn"]
    rows = traced.rows // 4 * TOKENS * WIDTH * 2  # bytes of all the rows that fsdp leaves a device, in bfloat16
    # A micro-batch's in each of the iterations, and its gradient on the way back.
    handed_on = [(each.whole_bytes, each.times) for each in between if each.kind == "collective-permute"]
    assert handed_on == [(rows // 4, 4 + 1)] * 2
    # Once a step all rows: what the vocabulary's halves give the embedding, what the last stage made; and gradients.
    large = [each for each in between if each.whole_bytes > 2**16 and each.kind != "collective-permute"]
    assert [(each.kind, each.whole_bytes, each.times) for each in large] == [("all-reduce", rows, 1)] * 4
    # The rest: a log-normaliser for each token of the halves of the vocabulary, norms' scales.
    assert sum(each.times * each.sent_bytes for each in between if each.whole_bytes <= 2**16) < rows / 16


@pytest.mark.parametrize(("repeats", "micro_batches"), [(1, 2), (2, 4)])
def test_estimates_know_of_idle_stages(repeats, micro_batches):
    keys = {"base_num_decoder_layers": LAYERS, "remat_policy": "full", "per_device_batch_size": 2}
    stages = {
        "ici_pipeline_parallelism": 2,
        "ici_fsdp_parallelism": 4,
        "num_pipeline_repeats": repeats,
        "num_pipeline_microbatches": micro_batches,
    }
    plain, staged = (
        trace_train_step(load(**keys), jax.devices()),
        trace_train_step(load(**keys, **stages), jax.devices()),
    )

    # Every layer's input in each iteration, of the rows that four of eight devices share out.
    iterations, turn, rows = micro_batches * repeats + 1, LAYERS // 2 // repeats, 2 * 8 // micro_batches // 4
    kept = memory(staged).temporaries["kept for the backward pass"]
    assert kept == pytest.approx(iterations * turn * rows * LENGTH * TINY["base_emb_dim"] * 4, rel=1e-3)

    chip, peak = parse_topology("v5e-8", 1).chip, 1e12
    constants = constants_of(chip.kind)._replace(narrow=0)  # a stage multiplies fewer rows at a time
    alone, together = (
        predict(work_of(each), chip, peak, [], constants=constants).compute_seconds for each in (plain, staged)
    )
    assert together == pytest.approx(alone * iterations / (micro_batches * repeats))
    assert work_of(staged).memory_bytes < 2 * work_of(plain).memory_bytes
