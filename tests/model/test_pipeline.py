"""Pipeline stages give one device's losses and gradients, by a schedule without more idle iterations than it must."""

import functools

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from src.extras.verify.comparison import compared
from src.extras.verify.rows import PASS
from src.extras.verify.subject import PLAIN_DESCENT, Subject
from src.model.params import Weights
from src.model.pipeline import Schedule
from src.step.loss import next_token_loss
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.tiny import GPT3, load, make, packed_rows

LAYERS, ROWS = 8, 8
LOCAL = "{attention_type: local_sliding, sliding_window_size: 5}"
MODELS = {
    "dense": {"remat_policy": "full"},
    "windowed": {  # 4 repeats of two layers, and a segment before and after them that all stages run
        "base_num_decoder_layers": 10,
        "decoder_segments": f"[{{pattern: [{{base_mlp_dim: 48}}]}}, {{repeats: 4, pattern: [{LOCAL}, {{}}]}}, "
        f"{{pattern: [{LOCAL}]}}]",
        "normalization_placement": "both",
    },
    "between others": {  # the same in short
        "base_num_decoder_layers": 6,
        "decoder_segments": f"[{{pattern: [{{base_mlp_dim: 48}}]}}, {{repeats: 4, pattern: [{LOCAL}]}}, "
        "{pattern: [{}]}]",
    },
    "gpt3": {**GPT3, "base_num_kv_heads": 4},
    "latent experts": {
        "base_num_decoder_layers": 9,
        "decoder_segments": "[{pattern: [{num_experts: 1, shared_experts: 0}]}, {repeats: 8, pattern: [{}]}]",
        "attention_type": "mla",
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 16,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "routed_bias": "true",
        "norm_topk_prob": "true",
        "load_balance_loss_weight": 0.1,
    },
}


def keys_of(stages, repeats=1, micro_batches=-1, data=1, fsdp=1, tensor=1, **others):
    return {
        "ici_pipeline_parallelism": stages,
        "ici_data_parallelism": data,
        "ici_fsdp_parallelism": fsdp,
        "ici_tensor_parallelism": tensor,
        "num_pipeline_repeats": repeats,
        "num_pipeline_microbatches": micro_batches,
        **others,
    }


def named(value):
    """A test's name: the keys that are not their defaults."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{key}={size}" for key, size in value.items() if size not in (1, -1))


def computed(model, devices, **keys):
    """The loss and gradients of a step."""
    settings = {"base_num_decoder_layers": LAYERS, **MODELS[model]}
    plan = Subject(load(**{**settings, **keys})).plan(devices, **PLAIN_DESCENT)
    return Subject(load(**settings)).result(plan)


@functools.cache
def one_device(model):
    return computed(model, 1)


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        pytest.param("dense", keys_of(2), marks=pytest.mark.long),
        pytest.param("dense", keys_of(2, repeats=4, micro_batches=4), marks=pytest.mark.long),
        pytest.param("dense", keys_of(4, micro_batches=8), marks=pytest.mark.long),
        pytest.param("dense", keys_of(4, repeats=2, micro_batches=8), marks=pytest.mark.long),
        pytest.param("dense", keys_of(2, repeats=2, fsdp=2, micro_batches=4), marks=pytest.mark.long),
        ("dense", keys_of(2, micro_batches=4, tensor=2, scan_layers="false")),
        pytest.param("dense", keys_of(2, data=2, gradient_accumulation_steps=2), marks=pytest.mark.long),
        ("between others", keys_of(2, repeats=2, fsdp=2, gradient_accumulation_steps=2)),
        pytest.param("windowed", keys_of(2, repeats=2, fsdp=2), marks=pytest.mark.long),
        pytest.param("windowed", keys_of(4, fsdp=2), marks=pytest.mark.long),
        # Its kind, in stages too: tests/parallel/test_axes.py.
        pytest.param("gpt3", keys_of(2, fsdp=2, tensor=2), marks=pytest.mark.long),
        pytest.param("gpt3", keys_of(4, repeats=2), marks=pytest.mark.long),
        pytest.param("latent experts", keys_of(2, repeats=2, micro_batches=4), marks=pytest.mark.long),
        pytest.param("latent experts", keys_of(4, fsdp=2), marks=pytest.mark.long),
    ],
    ids=named,
)
def test_stages_give_the_losses_and_gradients_of_one_device(model, keys, capfd):
    sizes = [size for name, size in keys.items() if name.startswith("ici_")]
    row = compared("", computed(model, int(np.prod(sizes)), **keys), one_device(model), 1e-4)
    assert row.status == PASS, row
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_bfloat16_runs_on_cpus():
    """XLA for CPUs aborts on a sum in bfloat16 that is made within a map over some of the axes."""
    staged = computed("dense", 4, dtype="bfloat16", **keys_of(2, fsdp=2))
    assert staged.metrics["loss"] == pytest.approx(one_device("dense").metrics["loss"], rel=1e-2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_micro_batch_goes_through_the_chunks_in_their_order(stages, repeats, groups):
    """Each stage makes each turn of each micro-batch once, and each turn follows at once on what it needs."""
    schedule = Schedule(stages, repeats, stages * groups)
    done = {}
    for iteration in range(schedule.iterations):
        for stage in range(stages):
            if 0 <= iteration - stage < schedule.items:
                item = iteration - stage
                turn, micro_batch = schedule.turn(item), schedule.micro_batch(item)
                assert schedule.item(turn, micro_batch) == item
                chunk = turn * stages + stage
                assert (chunk, micro_batch) not in done
                if chunk:  # it comes from the stage before, of the iteration before
                    assert done[chunk - 1, micro_batch] == iteration - 1
                done[chunk, micro_batch] = iteration
    assert len(done) == stages * repeats * schedule.micro_batches
    assert schedule.bubble == pytest.approx(1 - len(done) / (stages * schedule.iterations))


def loops(jaxpr):
    """The lengths of the loops within which a program's activations are passed on to the next stage."""
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            if equation.primitive.name == "scan" and any(each.primitive.name == "ppermute" for each in inner.eqns):
                yield equation.params["length"]
            yield from loops(inner)


@pytest.mark.parametrize(("repeats", "micro_batches"), [(1, 2), (1, 3), (1, 8), (2, 4)])
def test_iterations_are_as_few_as_can_be(repeats, micro_batches):
    keys = keys_of(2, repeats, micro_batches)
    _, plan = make(2, base_num_decoder_layers=LAYERS, **keys)
    batch = packed_rows(0, rows=24)

    def loss(weights):
        return next_token_loss(plan.decoder(Weights(weights)), batch, plan).loss

    iterations = micro_batches * repeats + 1
    assert list(loops(jax.make_jaxpr(jax.grad(loss))(plan.shapes).jaxpr)) == [iterations, iterations]


def test_weights_lie_in_layer_order_on_their_stages():
    """Whatever the repeats, a stage holds consecutive layers: a checkpoint is the same on any mesh."""
    _, alone = make(base_num_decoder_layers=LAYERS)
    for repeats in (1, 2):
        _, plan = make(4, base_num_decoder_layers=LAYERS, **keys_of(4, repeats))
        assert jax.tree.map(lambda x: x.shape, plan.shapes) == jax.tree.map(lambda x: x.shape, alone.shapes)
        query = plan.shardings["segments"][0][0]["attention"]["query"]
        held = query.devices_indices_map((LAYERS, 32, 4, 8))
        assert sorted(at[0].indices(LAYERS)[:2] for at in held.values()) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_as_many_turns_as_there_are_layers():
    _, plan = make(4, base_num_decoder_layers=LAYERS, **keys_of(4, repeats=-1))
    assert plan.execution.schedule == Schedule(4, LAYERS // 4, 4)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"num_pipeline_repeats": 2}, ["num_pipeline_repeats", "ici_pipeline_parallelism"]),
        ({"num_pipeline_microbatches": 2}, ["num_pipeline_microbatches", "dcn_pipeline_parallelism"]),
        (
            keys_of(4, base_num_decoder_layers=6),
            [
                "6 repeats of 1 layer",
                "4 pipeline stages",
                " may be 1, 2, 3 or 6, or ",
                "repeats (base_num_decoder_layers) a multiple of 4",
            ],
        ),
        (keys_of(4, repeats=4), ["8 repeats", "num_pipeline_repeats=4: that product may be 1, 2, 4 or 8, or"]),
        (
            keys_of(
                4, decoder_segments="[{repeats: 3, pattern: [{}, {base_mlp_dim: 48}]}, {repeats: 2, pattern: [{}]}]"
            ),
            ["3 repeats of 2 layers"],
        ),
        (keys_of(4, repeats=2, micro_batches=6), ["num_pipeline_microbatches=6", "multiple of the 4"]),
        (keys_of(2, decoder_segments="[{repeats: 8, shared: true, pattern: [{}]}]"), ["shares its weights"]),
        (keys_of(2, logical_axis_rules__layers="[]"), ["logical_axis_rules.layers=[stage]"]),
    ],
    ids=named,
)
def test_what_stages_cannot_share_out_is_an_error(keys, parts):
    devices = int(np.prod([size for name, size in keys.items() if name.startswith("ici_")]))
    with pytest.raises(UserError) as error:
        make(devices, **{"base_num_decoder_layers": LAYERS, **keys})
    assert [part for part in parts if part not in str(error.value)] == []


def test_keys_of_stages_are_refused_if_all_devices_come_to_one_stage():
    keys = {"ici_pipeline_parallelism": -1, "ici_fsdp_parallelism": 1, "num_pipeline_microbatches": 4}
    with pytest.raises(UserError, match="need more than one pipeline stage"):
        make(1, **keys)


@pytest.mark.parametrize(
    ("per_device", "keys", "parts"),
    [
        (1.5, keys_of(4), ["=1.5 on 4 devices is 6 rows", "4 micro-batches", "are per_device_batch_size=1 or 2;"]),
        (1, keys_of(2, fsdp=4, micro_batches=4), ["is 8 rows", "of 4 shards (fsdp=4)", "are per_device_batch_size=2;"]),
        (3, keys_of(2, micro_batches=4, gradient_accumulation_steps=2), ["=3 on 2 devices is 6 rows", "=2 or 4;"]),
    ],
    ids=named,
)
def test_rows_that_do_not_divide_into_micro_batches_are_an_error(per_device, keys, parts):
    devices = int(np.prod([size for name, size in keys.items() if name.startswith("ici_")]))
    config = load(base_num_decoder_layers=LAYERS, per_device_batch_size=per_device, **keys)
    with pytest.raises(UserError) as error:
        trace_train_step(config, jax.devices()[:devices])
    assert [part for part in parts if part not in str(error.value)] == []
