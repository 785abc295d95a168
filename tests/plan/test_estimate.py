"""The estimate beside traced and compiled steps, and sums by hand."""

from collections import Counter

import jax
import pytest

from src.extras.aot.hlo import collectives as compiled_collectives
from src.extras.aot.memory import memory
from src.extras.aot.roofline import constants_of
from src.extras.aot.topology import parse_topology
from src.extras.plan import block_arrays, placed
from src.extras.plan.compiling import rated
from src.extras.plan.estimate import absent_step, estimate_memory, step_costs
from src.extras.plan.placed import place
from src.extras.plan.traffic import collectives
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests.tiny import TINY, load

CPUS = parse_topology("cpu-8", 1)
LAYERS, D = TINY["base_num_decoder_layers"], TINY["base_emb_dim"]
# Sizes that divide over the meshes below.
EVEN = {"base_num_query_heads": 8, "per_device_batch_size": 2}
HEADS = {"base_num_kv_heads": 8, "head_dim": 4}
MESHES = [
    {},
    {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
LATENT = {
    **{"attention_type": "mla", "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}


def configured(**keys):
    return load(**{**EVEN, **({} if "attention_type" in keys else HEADS), **keys})


def estimated(**keys):
    return estimate_memory(absent_step(configured(**keys), CPUS))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"remat_policy": "full", "gradient_accumulation_steps": 2, "mu_dtype": "bfloat16"},
        {"remat_policy": "minimal", "opt_type": "sgd", "shard_optimizer_over_data": True},
        {"remat_policy": "save_qkv_proj", "ema_decay": 0.9, **LATENT},
        {"remat_policy": "minimal", **EXPERTS},
        {"remat_policy": "minimal_offloaded"},
        {"remat_policy": "full", "logical_axis_rules__norm_length": "[context, tensor]"},
    ],
)
def test_memory_is_that_of_the_traced_step(mesh, keys):
    """Weights, state and what is kept for the backward pass, as src/extras/aot/memory.py reads them off the trace."""
    config = configured(**mesh, **keys)
    step = memory(trace_train_step(config, jax.devices()))
    mine = estimated(**mesh, **keys)
    for name, size in mine.arguments.items():
        assert size == pytest.approx(step.arguments.get(name, 0), rel=0.02, abs=64), name
    for name in ("kept for the backward pass", "logits and their gradient", "gradients", "what a block computes"):
        assert mine.temporaries[name] == pytest.approx(step.temporaries[name], rel=0.1, abs=64), name
    assert mine.saved_on_host == pytest.approx(step.saved_on_host, rel=0.1, abs=64)


def test_an_offloaded_state_and_offloaded_arrays_are_not_on_the_device():
    offloaded = {"optimizer_memory_host_offload": True, "remat_policy": "custom"}
    mine = estimated(**offloaded, remat_custom="{decoder_layer_input: offload}")
    assert mine.arguments["optimizer"] == 0
    assert mine.temporaries["kept for the backward pass"] == 0
    assert mine.on_host == estimated().arguments["optimizer"]


# Wide enough that norms, which the closed form leaves out, send little.
WIDE = {"base_emb_dim": 256, "base_mlp_dim": 1024, "vocab_size": 512, "head_dim": 32, "base_num_decoder_layers": 4}


def sent(moved):
    """MB that a device sends, by mesh axes: gathered, and summed, with a reduce-scatter as the all-reduce that it is
    on CPUs, where every device has the whole sum.
    """
    totals = Counter()
    for each in moved:
        kind = {"all-gather": "gathered", "reduce-scatter": "summed", "all-reduce": "summed"}.get(each.kind, each.kind)
        twice = 2 if each.kind == "reduce-scatter" else 1
        totals[kind, each.axes] += twice * each.times * each.sent_bytes / 1e6
    return totals


FULL = {"remat_policy": "full"}
SHARDED = {"shard_optimizer_over_data": True}


@pytest.mark.parametrize(
    ("mesh", "keys", "axes"),
    [
        ({"fsdp": 8}, {}, [("gathered", "fsdp"), ("summed", "fsdp")]),
        ({"fsdp": 8}, FULL, [("gathered", "fsdp"), ("summed", "fsdp")]),
        ({"data": 8}, {}, [("summed", "data")]),
        (
            {"data": 4, "fsdp": 2},
            {"gradient_accumulation_steps": 2},
            [("gathered", "fsdp"), ("summed", "fsdp"), ("summed", "data")],
        ),
        ({"data": 4, "fsdp": 2}, SHARDED, [("gathered", "data"), ("summed", "data"), ("gathered", "fsdp")]),
        (
            {"data": 4, "fsdp": 2},
            {**SHARDED, "gradient_accumulation_steps": 2},
            [("gathered", "data"), ("summed", "data")],
        ),
        (
            {"fsdp": 4, "context": 2},
            FULL,
            [
                ("gathered", "fsdp", "context"),
                ("gathered", "context"),
                ("summed", "context"),
                ("summed", "fsdp", "context"),
            ],
        ),
        (
            {"fsdp": 2, "pipeline": 4},  # XLA on CPUs gathers the weights before the loop
            {**FULL, "per_device_batch_size": 4},
            [("summed", "fsdp"), ("summed", "stage"), ("collective-permute", "stage")],
        ),
    ],
)
def test_bytes_are_those_of_the_compiled_program(mesh, keys, axes):
    sizes = {f"ici_{name}_parallelism": size for name, size in mesh.items()}
    config = configured(**WIDE, **sizes, **keys)
    step = trace_train_step(config, jax.devices())
    program = step.jax_traced.lower().compile().as_text()
    theirs = sent(compiled_collectives(program, step.plan.layout.mesh))
    mine = sent(collectives(absent_step(config, CPUS)))
    for kind, *names in axes:
        assert mine[kind, (*names,)] == pytest.approx(theirs[kind, (*names,)], rel=0.03), (kind, names)


V5E = parse_topology("v5e-16", 1)
REAL = {"dtype": "bfloat16", "max_target_length": 512, "matmul_precision": "default"}


def costed(topology=V5E, **keys):
    return step_costs(configured(**{**REAL, **keys}), topology)


def on_tpu(topology=V5E, **keys):
    return costed(topology, **keys).predict(constants_of(topology.chip.kind))


def test_more_work_takes_longer_and_more_memory():
    assert on_tpu(per_device_batch_size=4).step_seconds > on_tpu().step_seconds
    small, large = costed(), costed(per_device_batch_size=4)
    assert large.memory.total > small.memory.total
    assert large.tokens_per_step == 2 * small.tokens_per_step == 2 * 16 * 2 * 512


def test_recomputing_takes_longer_and_less_memory():
    policies = ("minimal", "full")
    kept, recomputed = (on_tpu(remat_policy=policy) for policy in policies)
    assert recomputed.compute_seconds > kept.compute_seconds
    kept, recomputed = (costed(remat_policy=policy).memory.total for policy in policies)
    assert recomputed < kept


def test_more_slices_send_more_between_them_and_are_no_faster():
    one, two = on_tpu(), on_tpu(parse_topology("v5e-16", 2))
    assert one.dcn_seconds == 0 < two.dcn_seconds
    assert two.step_seconds >= one.step_seconds


def test_a_pipeline_idles_as_long_as_its_schedule():
    keys = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4, "per_device_batch_size": 4}
    assert costed(**keys).work.bubble == pytest.approx(1 / 5)
    assert on_tpu(**keys).ici_seconds > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ici_tensor_parallelism": 3}, "does not divide"),
        ({"ici_tensor_parallelism": 16}, "not divisible"),
        ({"ici_expert_parallelism": 2}, "no experts"),
        ({"per_device_batch_size": 0.3}, "per_device_batch_size"),
        ({"ici_context_parallelism": 2, "max_target_length": 510}, "max_target_length"),
        ({"attention": "cudnn_flash"}, "runs on gpu"),
        ({"dtype": "float32"}, "no peak rate"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        on_tpu(**keys)


def test_points_of_one_mesh_cost_the_same_together_as_alone():
    """A model is placed on its mesh once for all policies and batches."""
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 4, "head_dim": 4}
    placed = place(configured(**REAL, **mesh), V5E)
    for keys in (
        {"remat_policy": "full"},
        {"remat_policy": "minimal", "per_device_batch_size": 4},
        {"gradient_accumulation_steps": 2},
        {"num_vocab_tiling": 8, "optimizer_memory_host_offload": True},
    ):
        config = configured(**{**REAL, **mesh, **keys})
        together, alone = step_costs(config, V5E, placed), step_costs(config, V5E)
        assert together == alone
        assert together != step_costs(configured(**REAL, **mesh), V5E), keys


def test_estimates_for_gpus_do_not_depend_on_earlier_ones_for_cpus_that_are_rated_alike(monkeypatch):
    """What a block stores and declares is kept per device: on CPUs a feed-forward layer's factors are one array."""
    keys, gpus = configured(attention="dot_product", remat_policy="none"), parse_topology("a3", 1)

    def platforms_and_sizes(*topologies):
        monkeypatch.setattr(placed, "_declared", {})
        monkeypatch.setattr(block_arrays, "_blocks", {})
        steps = [absent_step(keys, topology) for topology in topologies]
        return [(step.placed.model.plan.layout.platform, estimate_memory(step).temporaries) for step in steps]

    alone = platforms_and_sizes(gpus)
    after = platforms_and_sizes(rated(CPUS), gpus)
    assert [platform for platform, _ in after] == ["cpu", "gpu"]
    assert after[1] == alone[0]
    assert after[0] != after[1]
