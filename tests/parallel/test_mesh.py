"""Meshes of devices, where arrays lie on them, and what is said of sizes that do not fit."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.parallel.mesh import global_batch_size, make_layout
from src.parallel.slices import check_hardware, describe_mesh
from src.system.errors import UserError
from tests.tiny import load, make


def layout_of(devices=8, **overrides):
    return make_layout(load(**overrides).mesh, jax.devices()[:devices])


def cube(**overrides):
    sizes = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    return layout_of(**{**sizes, **overrides})


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({}, "fsdp 8"),
        ({"ici_tensor_parallelism": 4}, "fsdp 2 x tensor 4"),
        ({"ici_fsdp_parallelism": 2, "ici_data_parallelism": -1}, "data 4 x fsdp 2"),
        ({"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2, "ici_tensor_parallelism": 2}, None),
        (
            {"mesh_axes": "[tensor, data, fsdp, expert, context, stage]", "ici_tensor_parallelism": 2},
            "tensor 2 x fsdp 4",
        ),
    ],
)
def test_a_size_of_minus_one_takes_the_devices_that_are_left(sizes, mesh):
    layout = layout_of(**sizes)
    assert describe_mesh(layout.mesh.shape) == (mesh or "data 2 x fsdp 2 x tensor 2")
    assert sorted(device.id for device in layout.mesh.devices.flat) == list(range(8))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"ici_fsdp_parallelism": 4}, ["ici_fsdp_parallelism=4 for 8 devices", "whose product is 8"]),
        ({"ici_tensor_parallelism": 3}, ["ici_tensor_parallelism=3 does not divide 8 devices", "1, 2, 4 or 8 do"]),
        ({"ici_pipeline_parallelism": 3, "ici_tensor_parallelism": 4}, ["=3 x ici_tensor_parallelism=4 = 12 does not"]),
        ({"ici_tensor_parallelism": 16}, ["ici_tensor_parallelism=16 does not divide 8 devices"]),
        (
            {"ici_fsdp_parallelism": 8, "dcn_data_parallelism": 2},
            ["dcn_data_parallelism=2 for 1 slice or host", "which JAX did not find"],
        ),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices_are_an_error(sizes, parts):
    with pytest.raises(UserError, match="does not multiply out") as error:
        layout_of(**sizes)
    assert [part for part in parts if part not in str(error.value)] == []
    assert ("dcn" in str(error.value)) == ("dcn_data_parallelism" in sizes)


def test_a_mesh_on_one_device_is_answered_with_virtual_ones():
    with pytest.raises(UserError, match="JAX_NUM_CPU_DEVICES=8"):
        make_layout(load(ici_tensor_parallelism=2).mesh, jax.devices()[:1])


def test_a_size_of_minus_one_beside_the_default_one_says_what_to_add():
    with pytest.raises(UserError, match="so add ici_fsdp_parallelism=1"):
        load(ici_tensor_parallelism=-1)


@dataclass(frozen=True)
class FakeDevice:
    """As much of a device as makes a mesh."""

    id: int
    process_index: int
    slice_index: int
    device_kind: str = "fake"
    platform: str = "gpu"
    client: ClassVar = SimpleNamespace(runtime_type="of GPUs that are here")


def test_dcn_axes_run_between_slices_and_ici_axes_within():
    devices = [FakeDevice(id=i, process_index=i // 2, slice_index=i // 4) for i in range(8)]
    config = load(dcn_data_parallelism=2, ici_fsdp_parallelism=-1, ici_tensor_parallelism=2)
    layout = make_layout(config.mesh, devices)
    assert describe_mesh(layout.mesh.shape) == "data 2 x fsdp 2 x tensor 2"
    slices = np.vectorize(lambda device: device.slice_index)(layout.mesh.devices)
    for index in range(2):
        assert set(slices[index].flat) == {index}
    with pytest.raises(UserError, match="2 slices or hosts"):
        make_layout(load(dcn_data_parallelism=4).mesh, devices)
    with pytest.raises(UserError, match=r"Sizes between the 2 slices or hosts are dcn_\*_parallelism"):
        make_layout(load(ici_tensor_parallelism=8).mesh, devices)


def test_arrays_lie_in_equal_parts_on_the_devices():
    layout = layout_of()
    weight = jax.device_put(jnp.zeros((32, 4, 8)), layout.sharding(("embed", "heads", "head_dim")))
    assert {shard.data.shape for shard in weight.addressable_shards} == {(4, 4, 8)}
    both = jax.device_put(jnp.zeros((32, 4, 8)), cube().sharding(("embed", "heads", "head_dim")))
    assert {shard.data.shape for shard in both.addressable_shards} == {(16, 2, 8)}
    rows = jax.device_put(jnp.zeros((8, 16)), cube().sharding(("batch", "length")))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 16)}
    copies = jax.device_put(jnp.zeros(5), layout.sharding(()))
    assert {shard.data.shape for shard in copies.addressable_shards} == {(5,)}


def test_all_weights_that_do_not_divide_are_named_at_once():
    with pytest.raises(UserError, match="Weights do not divide") as error:
        make(devices=8, ici_tensor_parallelism=8, base_num_query_heads=4, base_num_kv_heads=2, base_mlp_dim=60)
    for problem in (
        "heads = 4 (base_num_query_heads or gdn_num_key_heads) is not divisible by tensor=8",
        "kv_heads = 2 (base_num_kv_heads) is not",
        "mlp = 60 (base_mlp_dim",
    ):
        assert problem in str(error.value)
    for key in ("ici_tensor_parallelism or dcn_tensor_parallelism", "logical_axis_rules.kv_heads=[]"):
        assert key in str(error.value)
    assert "embed" not in str(error.value)


def test_a_vocabulary_of_any_size_divides():
    _, plan = make(devices=8, ici_tensor_parallelism=8, base_num_query_heads=8, base_num_kv_heads=8, vocab_size=97)
    assert plan.shapes["output"].shape == (32, 128)


def test_two_dims_of_one_array_on_one_mesh_axis_are_an_error():
    with pytest.raises(UserError, match="two dims of one array over mesh axis fsdp") as error:
        make(devices=8, logical_axis_rules__mlp="[fsdp]")
    assert "embed" in str(error.value)
    assert "mlp" in str(error.value)


def test_rules_name_only_axes_of_the_mesh():
    with pytest.raises(UserError, match=r"logical_axis_rules\.mlp=\[experts\] must be a list of data, stage, fsdp"):
        load(logical_axis_rules__mlp="[experts]")


@pytest.mark.parametrize(
    ("per_device", "micro_batches", "sizes", "rows"),
    [
        (12, 1, {}, 96),
        (3, 4, {}, 96),
        (0.5, 1, {"ici_tensor_parallelism": 2}, 4),
        (0.125, 2, {"ici_tensor_parallelism": 8}, 2),
    ],
)
def test_global_batch(per_device, micro_batches, sizes, rows):
    layout = layout_of(**sizes)
    assert global_batch_size(layout, per_device, micro_batches, "per_device_batch_size") == rows


@pytest.mark.parametrize(("per_device", "devices"), [(0.5, 8), (0.1, 8), (1.5, 1), (0.01, 8)])
def test_rows_that_do_not_divide_over_the_devices_are_an_error(per_device, devices):
    with pytest.raises(UserError, match=f"per_device_batch_size={per_device:g} on {devices} device") as error:
        global_batch_size(layout_of(devices), per_device, 1, "per_device_batch_size")
    assert "Use a multiple of 1" in str(error.value)
    assert ("8 shards (fsdp=8)" if devices == 8 else "which is not whole") in str(error.value)


def test_shards_of_a_logical_axis():
    layout = cube()
    shards = {axis: layout.shards(axis) for axis in ("batch", "embed", "heads", "length")}
    assert shards == {"batch": 4, "embed": 2, "heads": 2, "length": 1}
    assert math.prod(layout.mesh.shape.values()) == 8


def test_hardware_that_is_not_there_is_an_error():
    check_hardware("cpu")
    with pytest.raises(UserError, match="hardware=tpu, but JAX found cpu"):
        check_hardware("tpu")
