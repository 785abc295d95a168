"""What a pipelined step moves between TPUs, read from the program that XLA's compiler makes of it."""

import pytest
from tiny import BASE

from src import config as configuration
from src.aot.devices import abstract_devices
from src.aot.hlo import collectives
from src.build import build
from src.topology import parse_topology
from tests.compilers import SMALL, needs_libtpu

ROWS, LENGTH, WIDTH, LAYERS = 4, 256, 256, 8  # rows of a micro-batch
MESH = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")


@needs_libtpu
@pytest.mark.parametrize("repeats", [1, 2])
def test_stages_pass_on_activations_and_no_weights(repeats, capfd):
    micro_batches = 4
    keys = (f"num_pipeline_repeats={repeats}", f"num_pipeline_microbatches={micro_batches}", "per_device_batch_size=2")
    layers = f"base_num_decoder_layers={LAYERS}"
    config = configuration.load(
        [BASE, *SMALL, *MESH, *keys, layers, "dataset_type=synthetic", "mlp_activations=[gelu]"]
    )
    built = build(config, abstract_devices(parse_topology("v5e-8", 1)))
    compiled = built.traced.lower().compile()
    moved = collectives(compiled.as_text(), built.plan.layout.mesh)
    iterations = micro_batches * repeats + 1
    turn = LAYERS // 2 // repeats

    # In each iteration the rows of a micro-batch that fsdp leaves a device, in bfloat16; and their gradients.
    between = [each for each in moved if each.axes == ("stage",)]
    assert [(each.kind, each.whole_bytes, each.times) for each in between if each.times > 1] == [
        ("collective-permute", ROWS // 2 * LENGTH * WIDTH * 2, iterations)
    ] * 2
    # Besides, once: all rows after the last stage, twice for its derivative, once for the first stage's input.
    once = [each for each in between if each.times == 1]
    whole = ROWS // 2 * micro_batches * LENGTH * WIDTH * 2
    assert [each.whole_bytes for each in once if each.kind == "all-reduce" and each.whole_bytes > 100] == [whole] * 3
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
