"""What lies in host memory, by the TPU compiler's own count: the optimizer's state, and what blocks keep."""

import math

import jax
import pytest

from src.checkpoint.digest import digest_from_host
from src.extras.aot.devices import abstract_devices
from src.extras.aot.memory import memory
from src.extras.aot.topology import parse_topology
from src.parallel.mesh import make_layout
from src.step.state import abstract_state
from src.step.trace import plan_step, trace_train_step
from tests.compilers import needs_libtpu
from tests.tiny import TINY, load

# Activations outweigh the optimizer's state, as they do in models of a useful size.
MODEL = {
    **TINY,
    **{"base_emb_dim": 512, "base_mlp_dim": 1024, "base_num_decoder_layers": 4, "base_num_query_heads": 4},
    **{"base_num_kv_heads": 4, "head_dim": 128, "vocab_size": 1024, "max_target_length": 1024, "dtype": "bfloat16"},
    **{"matmul_precision": "default", "per_device_batch_size": 4, "remat_policy": "full"},
}
ON_HOST = {"optimizer_memory_host_offload": "true"}


def compiled(**keys):
    """What the compiler says of the memory of a step on four chips, and what this project does."""
    step = trace_train_step(load(**{**MODEL, **keys}), abstract_devices(parse_topology("v5p-8", 1)))
    return step.jax_traced.lower().compile().memory_analysis(), memory(step)


@pytest.mark.long
@needs_libtpu
@pytest.mark.usefixtures("little_effort")
def test_the_optimizers_state_is_in_host_memory():
    on_host, parts = compiled(**ON_HOST)
    assert parts.on_host > 2**20
    # Tiles fill up the smallest arrays.
    assert on_host.host_argument_size_in_bytes == pytest.approx(parts.on_host, rel=0.02)
    assert on_host.argument_size_in_bytes == pytest.approx(sum(parts.arguments.values()), rel=0.02)
    # It comes to the device when activations have gone.
    on_device = on_host.argument_size_in_bytes + on_host.temp_size_in_bytes
    assert on_device < parts.total + 0.2 * parts.on_host


@pytest.mark.long
@needs_libtpu
@pytest.mark.usefixtures("little_effort")
def test_the_optimizers_state_on_the_host_leaves_its_room_to_the_step():
    on_device, parts = compiled()
    on_host, host_parts = compiled(**ON_HOST)
    moments = host_parts.on_host
    assert moments == parts.arguments["optimizer"] - host_parts.arguments["optimizer"] > 2**20
    assert on_device.host_argument_size_in_bytes == 0
    saved = on_device.argument_size_in_bytes - on_host.argument_size_in_bytes
    assert saved == pytest.approx(moments, rel=0.02)
    # It comes to the device when activations have gone.
    assert on_host.temp_size_in_bytes - on_device.temp_size_in_bytes < 0.2 * moments


@pytest.mark.long
@needs_libtpu
def test_a_digest_brings_a_single_array_of_the_optimizers_state_to_the_device():
    """A checkpoint has the digest of every array; all together may not fit beside the weights."""
    keys = load(**{**MODEL, **ON_HOST})
    plan = plan_step(keys, make_layout(keys.mesh, abstract_devices(parse_topology("v5p-8", 1))))
    on_host = [x for x in jax.tree.leaves(abstract_state(plan)) if x.sharding.memory_kind == "pinned_host"]
    sizes = [x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in on_host]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    assert sum(sizes) > 4 * sizes[largest]
    found = digest_from_host.lower(on_host[largest]).compile().memory_analysis()
    assert found.host_argument_size_in_bytes == pytest.approx(sizes[largest], rel=0.02)
    assert found.temp_size_in_bytes < 1.1 * sizes[largest]


@pytest.mark.long
@needs_libtpu
def test_offloaded_activations_are_in_host_memory():
    on_device, _ = compiled(remat_policy="minimal")
    on_host, _ = compiled(remat_policy="minimal_offloaded")
    assert on_device.host_temp_size_in_bytes == 0
    assert on_host.host_temp_size_in_bytes > 2**20
    assert on_host.temp_size_in_bytes < on_device.temp_size_in_bytes
