"""Every axis of the mesh alone and with others gives one device's losses and gradients."""

import functools

import pytest

from tests.parallel.axes import MODELS, Job, assert_same
from tests.tiny import assert_close

NAMES = ("data", "stage", "fsdp", "context", "expert", "tensor")
WORDS = {"stage": "pipeline"}
ALONE = ["data 8", "stage 4", "stage 2", "fsdp 8", "context 4", "expert 8", "expert 2", "tensor 4"]
TWO = [
    *("data 2 fsdp 4", "data 2 tensor 4", "fsdp 2 tensor 4", "fsdp 2 context 4", "fsdp 4 expert 2", "data 2 context 2"),
    *("context 2 tensor 2", "context 2 expert 2", "expert 2 tensor 2", "expert 4 tensor 2"),
    *("stage 2 data 2", "stage 2 fsdp 4", "stage 2 tensor 2", "stage 2 context 2", "stage 2 expert 2"),
]
THREE = [
    *("data 2 fsdp 2 tensor 2", "fsdp 2 context 2 tensor 2", "fsdp 2 expert 2 tensor 2", "data 2 context 2 expert 2"),
    *("stage 2 fsdp 2 tensor 2", "stage 2 data 2 fsdp 2", "stage 2 context 2 expert 2", "stage 2 expert 2 tensor 2"),
]
# Other ways to use an axis.
MORE = {
    "stage 2, layers in turns": {"num_pipeline_repeats": 2, "num_pipeline_microbatches": 4},
    "tensor 2, sequences too": {"logical_axis_rules__norm_length": "[context, tensor]"},
    "fsdp 2 tensor 2, sequences too": {"logical_axis_rules__norm_length": "[context, tensor]"},
    "context 2 tensor 2, sequences too": {"logical_axis_rules__norm_length": "[context, tensor]"},
    "data 2 fsdp 2, in micro-batches": {"gradient_accumulation_steps": 2},
    "data 2 stage 2, in micro-batches": {"gradient_accumulation_steps": 2},
    "expert 2 fsdp 2, some dropped": {"capacity_factor": 1.0},
    "data 2 context 2, recomputed": {"remat_policy": "full"},
    "stage 2 fsdp 2, recomputed": {"remat_policy": "minimal"},
}


def devices_and_keys(mesh):
    """`fsdp 2 tensor 4` as a number of devices and the keys of its sizes."""
    words = mesh.partition(",")[0].split()
    sizes, count = {f"ici_{WORDS.get(name, name)}_parallelism": 1 for name in NAMES}, 1
    for name, size in zip(words[::2], words[1::2], strict=True):
        sizes[f"ici_{WORDS.get(name, name)}_parallelism"] = int(size)
        count *= int(size)
    return count, {**sizes, **MORE.get(mesh, {})}


CASES = [
    (model, mesh)
    for mesh in (*ALONE, *TWO, *THREE, *MORE)
    for model in MODELS
    if "expert" not in mesh or model == "latent experts"
]
# Each axis alone and with others, but for those that tests of an axis's own have: stage (tests/model/test_pipeline.py),
# expert and context (test_expert_axis.py and test_context_axis.py there); GPT's layers, with data, fsdp, micro-batches
# and what is computed again, are in tests/step/test_train_step.py. The rest take an hour.
SHORT = {
    "dense": ["tensor 4", "stage 2 context 2"],
    "windowed": [],  # in stages tests/model/test_pipeline.py has it, windows over context test_context_axis.py
    "latent experts": [],  # test_expert_axis.py
    "gpt3": [],
}


@functools.cache
def one_device(model, keys):
    """What one device computes, with the keys that change a result."""
    job = Job(model, devices=1, **dict(keys))
    return job.first_gradients(), job.losses()


def assert_agrees(expected, model, devices, keys, capfd):
    """What the devices compute is as expected, and XLA's partitioner says of no array that it copies it whole."""
    capfd.readouterr()
    job = Job(model, devices, **keys)
    assert_same((job.first_gradients(), job.losses()), expected)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "mesh"),
    [pytest.param(model, mesh, marks=() if mesh in SHORT[model] else pytest.mark.long) for model, mesh in CASES],
)
def test_a_mesh_gives_the_gradients_and_losses_of_one_device(model, mesh, capfd):
    devices, keys = devices_and_keys(mesh)
    alters = {name: keys[name] for name in ("gradient_accumulation_steps", "capacity_factor") if name in keys}
    assert_agrees(one_device(model, tuple(alters.items())), model, devices, keys, capfd)


LOCAL = "{attention_type: local_sliding, sliding_window_size: 7}"
CHUNK = "{attention_type: chunk, chunk_attn_window_size: 6}"
# Facts and keys that a mesh has code or placements of its own for, and a mesh of such.
FACTS = {
    "sinks, windows and chunks": (
        "context 2 tensor 2",
        {"attention_sink": "true", "decoder_segments": f"[{{repeats: 2, pattern: [{CHUNK}, {LOCAL}]}}]"},
    ),
    "two key heads, copied": (
        "context 2 tensor 4",
        {"base_num_query_heads": 8, "base_num_kv_heads": 2, "logical_axis_rules__kv_heads": "[]"},
    ),
    "three query heads of six a device": (
        "fsdp 2 tensor 2",
        {"base_num_query_heads": 6, "base_num_kv_heads": 3, "logical_axis_rules__kv_heads": "[]"},
    ),
    "biases, and inputs that are scaled": (
        "fsdp 2 expert 2 tensor 2",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "shared_experts": 1, "base_moe_mlp_dim": 16},
            **{"routed_score_func": "sigmoid", "scale_expert_inputs": "true", "mlp_bias": "true"},
            "router_bias": "true",
        },
    ),
    "biases": (
        "expert 4 context 2",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16},
            **{"mlp_bias": "true", "norm_topk_prob": "true"},
        },
    ),
    "adapters": ("fsdp 2 tensor 2", {"lora_rank": 4, "lora_parameters": "['*']", "load_parameters_path": "elsewhere"}),
    "unrolled": ("fsdp 2 context 2", {"base_num_decoder_layers": 2, "scan_layers": "false"}),
    # Masks are of tokens, whatever part of them a device has and in however many rounds they go.
    "dropout": ("fsdp 2 tensor 2", {"dropout_rate": 0.2}),
    "dropout over rows": ("context 2 tensor 2", {"dropout_rate": 0.2, "base_num_decoder_layers": 2}),
    "dropout in stages": ("stage 2 data 2", {"dropout_rate": 0.2, "base_num_decoder_layers": 2}),
    "dropout in micro-batches": (
        "data 2 fsdp 2, in micro-batches",
        {"dropout_rate": 0.2, "base_num_decoder_layers": 2},
    ),
    "dropout in micro-batches of stages": (
        "data 2 stage 2, in micro-batches",
        {"dropout_rate": 0.2, "base_num_decoder_layers": 2},
    ),
}


# Others have their kinds; and windows, sinks and chunks those of tests/model/test_context_axis.py, as has dropout over
# rows; adapters those of test_lora.py there, unrolled layers those of test_pipeline.py, and experts' biases and inputs
# those of test_expert_axis.py and, on one device, of test_parity.py.
LONG_FACTS = (
    *(
        "biases",
        "biases, and inputs that are scaled",
        "three query heads of six a device",
        "dropout",
        "sinks, windows and chunks",
        "dropout over rows",
    ),
    *("adapters", "unrolled", "dropout in stages", "dropout in micro-batches"),
)


@pytest.mark.parametrize(
    "facts", [pytest.param(each, marks=pytest.mark.long) if each in LONG_FACTS else each for each in FACTS]
)
def test_facts_that_a_mesh_has_code_for_give_the_gradients_and_losses_of_one_device(facts, capfd):
    mesh, alters = FACTS[facts]
    devices, keys = devices_and_keys(mesh)
    assert_agrees(one_device("dense", tuple(alters.items())), "dense", devices, {**keys, **alters}, capfd)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *(("dense", "stage 2 fsdp 2"), ("windowed", "context 2 tensor 2")),
        pytest.param("latent experts", "expert 4", marks=pytest.mark.long),
    ],
)
def test_evaluation_on_a_mesh_gives_the_loss_of_one_device(model, mesh):
    devices, keys = devices_and_keys(mesh)
    expected, found = Job(model, devices=1, packing="false"), Job(model, devices, packing="false", **keys)
    assert_close(found.evaluation(0), expected.evaluation(0), 1e-5)
