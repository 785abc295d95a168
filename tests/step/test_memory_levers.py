"""Optimizers on any mesh: their state cut over copies of the weights, in host memory, and through checkpoints."""

import jax
import numpy as np
import pytest

from src.checkpoint.checkpointer import Checkpointer
from src.extras.aot.devices import abstract_devices
from src.extras.aot.hlo import collectives
from src.extras.aot.memory import device_bytes
from src.extras.aot.topology import parse_topology
from src.step.state import TrainState, abstract_batch, abstract_state
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_libtpu
from tests.tiny import Trainer, load, make, packed_rows, tree_bits

COPIES = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
CUT, ON_HOST = {"shard_optimizer_over_data": "true"}, {"optimizer_memory_host_offload": "true"}
OPTIMIZERS = ["adamw", "adafactor", "muon"]
OF_ALL_SHAPES = [pytest.param("adamw", marks=pytest.mark.long), "adafactor", "muon"]  # and moments like the weights
RATES = {"adamw": 1e-2, "adafactor": 0.1, "muon": 1e-2}


def losses(opt_type, devices=1, **overrides):
    """Of three steps on the same rows."""
    keys = {"opt_type": opt_type, "learning_rate": RATES[opt_type], "warmup_steps_fraction": 0, **overrides}
    trainer = Trainer(devices=devices, initial=False, **keys)
    return [trainer.step(packed_rows(0), number)["loss"] for number in range(3)]


SEVERAL = {**COPIES, **CUT, **ON_HOST, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    "mesh", [pytest.param(COPIES, marks=pytest.mark.long, id="copies"), pytest.param(SEVERAL, id="several")]
)
@pytest.mark.parametrize(
    "opt_type", [*(pytest.param(name, marks=pytest.mark.long) for name in ("adamw", "adafactor")), "muon"]
)
def test_eight_devices_update_as_one_does(opt_type, mesh):
    expected = losses(opt_type)
    assert expected[2] < expected[1] < expected[0]
    np.testing.assert_allclose(losses(opt_type, 8, **mesh), expected, rtol=1e-5)


@pytest.mark.long
def test_so_they_do_by_rules():
    rules = """[{match: "*norm.scale", opt_type: sgd}, {match: "attention.*", opt_type: muon, learning_rate_scale: 2},
        {match: embedding, opt_type: adafactor, weight_decay: 0}]"""
    keys = {"optimizer_rules": rules, "ema_decay": 0.5, "base_num_decoder_layers": 1}
    expected = losses("adamw", **keys)
    np.testing.assert_allclose(losses("adamw", 8, **COPIES, **CUT, **keys), expected, rtol=1e-5)


@pytest.mark.long
def test_so_they_do_with_experts():
    opt_type = "muon"
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    expected = losses(opt_type, **experts)
    mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2}
    np.testing.assert_allclose(losses(opt_type, 8, **experts, **mesh, **CUT), expected, rtol=1e-5)


@needs_libtpu
@pytest.mark.parametrize(
    ("rounds", "layers"), [pytest.param(*case, marks=pytest.mark.long) for case in ((1, 3), (1, 4), (2, 4))]
)
def test_over_copies_gradients_send_what_a_reduce_scatter_of_float32_does(rounds, layers):
    """One round's in bfloat16, summed whole within its layer; several rounds' in float32, each device its part.

    On v5e-16 each axis of the mesh is one dim of the torus, where the TPU compiler keeps a reduce-scatter.
    """
    mesh = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 4, "per_device_batch_size": 1}
    model = {**dict(pair.split("=") for pair in SMALL), "base_num_decoder_layers": layers, "dtype": "bfloat16"}
    keys = {**model, **mesh, **CUT, "gradient_accumulation_steps": rounds}
    step = trace_train_step(load(**keys), abstract_devices(parse_topology("v5e-16", 1)))
    sent = dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather"), 0)
    for each in collectives(step.jax_traced.lower().compile().as_text(), step.plan.layout.mesh):
        if "data" in each.axes:
            sent[each.kind] += each.times * each.sent_bytes
        elif each.kind == "all-reduce" and each.whole_bytes >= 2**16:
            # Over fsdp no weight's gradient is summed whole, but that of the lookup in pairs of devices, which hold
            # half of the table's columns (src/model/sharded_lookup.py).
            assert each.sent_bytes == each.whole_bytes == 1024 * 256 // 2 * 2
    weights = sum(leaf.size for leaf in jax.tree.leaves(step.plan.shapes)) * 4 // 4  # bytes a device has of them
    assert sent["all-gather"] == pytest.approx(3 / 4 * weights, rel=0.01)
    if rounds == 1:  # and the output table's over all devices, which fsdp cuts afterwards
        assert sent["all-reduce"] + sent["reduce-scatter"] <= 3 / 4 * weights + 2 * 1024 * 256 * 2
    else:
        assert sent["reduce-scatter"] == pytest.approx(3 / 4 * weights, rel=0.01)
        assert sent["all-reduce"] < 2**16


def compiled_arguments(**overrides):
    """Bytes of a device that a compiled step takes, and how many of them the optimizer's moments are."""
    trainer = Trainer(devices=8, initial=False, **overrides)
    batch = abstract_batch(trainer.plan, 8, trainer.config.batch.max_target_length)
    lowered = trainer.train_step.lower(trainer.abstract, batch, trainer.hparams(0))
    moments = [leaf for leaf in jax.tree.leaves(trainer.abstract.opt) if leaf.ndim]
    return lowered.compile().memory_analysis().argument_size_in_bytes, device_bytes(moments)


def test_cut_over_copies_each_device_holds_its_part_of_the_moments():
    mesh = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 2}
    whole, moments = compiled_arguments(**mesh)
    cut, cut_moments = compiled_arguments(**mesh, **CUT)
    assert cut_moments == moments / 4
    assert whole - cut == moments - cut_moments


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_what_of_adafactors_and_muons_state_is_cut(opt_type):
    _, plan = make(8, opt_type=opt_type, **COPIES)
    _, cut = make(8, opt_type=opt_type, **COPIES, **CUT)
    for each, parts_of_weight in ((plan, 4), (cut, 8)):
        for path, leaf in jax.tree.leaves_with_path(abstract_state(each).opt):
            name = jax.tree_util.keystr(path)
            whole = "rows" in name or "columns" in name or "norm" in name or "count" in name
            if not whole:
                assert leaf.size / np.prod(leaf.sharding.shard_shape(leaf.shape)) == parts_of_weight, name


def random_state(abstract):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jax.device_put((100 * rng.random(leaf.shape)).astype(leaf.dtype), leaf.sharding), abstract
    )


@pytest.mark.parametrize("opt_type", [*OF_ALL_SHAPES[:2], pytest.param("muon", marks=pytest.mark.long)])
def test_a_checkpoint_is_restored_however_the_state_lies(tmp_path, opt_type):
    def abstract(devices=8, **overrides):
        _, plan = make(devices, opt_type=opt_type, **overrides)
        return abstract_state(plan)

    state = random_state(abstract(**COPIES, **CUT, **ON_HOST))
    checkpointer = Checkpointer(tmp_path, max_to_keep=-1, async_save=False)
    checkpointer.save(int(state.step), state.by_name(), {})
    checkpointer.close()
    for wanted in (abstract(1), abstract(**COPIES), abstract(**ON_HOST), abstract(**COPIES, **CUT)):
        fields, _, _ = Checkpointer(tmp_path, max_to_keep=-1, async_save=False).restore_latest(wanted.by_name())
        restored = TrainState.of(fields)
        assert tree_bits(restored) == tree_bits(state)
        assert jax.tree.all(jax.tree.map(lambda x, leaf: x.sharding == leaf.sharding, restored, wanted))
