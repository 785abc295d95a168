"""Every axis of the mesh alone and with others gives one device's losses and gradients."""

import functools

import pytest

from tests.axes import MODELS, Job, assert_same

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
# One model for each mesh, in turn; the rest take minutes.
ALWAYS = {(list(MODELS)[number % 4], mesh) for number, mesh in enumerate((*ALONE, *TWO, *THREE, *MORE))}
ALWAYS |= {(model, mesh) for model, mesh in CASES if "expert" in mesh}


@functools.cache
def one_device(model, keys):
    """What one device computes, with the keys that change a result."""
    job = Job(model, devices=1, **dict(keys))
    return job.first_gradients(), job.losses()


@pytest.mark.parametrize(
    ("model", "mesh"), [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.long) for case in CASES]
)
def test_a_mesh_gives_the_gradients_and_losses_of_one_device(model, mesh, capfd):
    devices, keys = devices_and_keys(mesh)
    alters = {name: keys[name] for name in ("gradient_accumulation_steps", "capacity_factor") if name in keys}
    expected = one_device(model, tuple(alters.items()))
    capfd.readouterr()
    job = Job(model, devices, **keys)
    assert_same((job.first_gradients(), job.losses()), expected)
    assert "rematerialization" not in capfd.readouterr().err
