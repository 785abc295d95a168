import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from src.checkpoint import digest as digest_module
from src.checkpoint.digest import digest, digests

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool", "float8_e4m3fn"]


def random_array(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return values.astype(jnp.dtype(dtype))


def digest_of(array):
    return int(digests({"x": array})["x"])


def test_one_word_at_position_0_gives_murmurhash3s_published_finalizer():
    assert digest_of(np.array([0], np.uint32)) == 0
    assert digest_of(np.array([1], np.uint32)) == 0x514E28B7
    assert digest_of(np.array(0xFFFFFFFF, np.uint32)) == 0x81F16F39


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P(), P("a"), P(("a", "b"), None, None), P("b", "a"), P(None, "a", "b")])
def test_is_the_same_under_every_sharding(spec, axis_type):
    arrays = {dtype: random_array((16, 8, 4), dtype) for dtype in DTYPES}
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    placed = {dtype: jax.device_put(array, NamedSharding(mesh, spec)) for dtype, array in arrays.items()}
    assert jax.device_get(digests(placed)) == jax.device_get(digests(arrays))


def test_arrays_in_host_memory_are_copied_to_the_devices_one_after_the_other(monkeypatch):
    """An optimizer's state in host memory may be larger than the memory of the devices."""
    before, copied = [], []

    def alone(x, from_host=digest_module.digest_from_host):
        assert all(each.is_ready() for each in before), "the array before may still be on the devices"
        copied.append(x)
        before.append(from_host(x))
        return before[-1]

    monkeypatch.setattr(digest_module, "digest_from_host", alone)
    arrays = {name: random_array((16, 8, 4), "float32", seed) for seed, name in enumerate("abc")}
    mesh = jax.make_mesh((8,), ("a",))
    kinds = {"a": "pinned_host", "b": "device", "c": "pinned_host"}
    placed = {
        name: jax.device_put(array, NamedSharding(mesh, P("a"), memory_kind=kinds[name]))
        for name, array in arrays.items()
    }
    assert jax.device_get(digests(placed)) == jax.device_get(digests(arrays))
    assert list(map(id, copied)) == [id(placed["a"]), id(placed["c"])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sees_any_single_bit(dtype, data):
    array = random_array((5, 7), dtype, seed=1)
    damaged = array.copy()
    raw = damaged.view(np.uint8).reshape(-1)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of(damaged) != digest_of(array)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 34), second=st.integers(0, 34))
def test_sees_swapped_elements(first, second):
    array = np.arange(35, dtype=np.float32)
    swapped = array.copy()
    swapped[[first, second]] = swapped[[second, first]]
    assert (digest_of(swapped) == digest_of(array)) == (first == second)


def test_tells_transposed_shifted_and_constant_arrays_apart():
    array = random_array((6, 6), "float32", seed=2)
    variants = [array, array.T, np.roll(array, 1, axis=0), np.roll(array, 1, axis=1), 0 * array, 0 * array + 1]
    assert len({digest_of(variant) for variant in variants}) == len(variants)


def test_arrays_of_more_than_2_to_the_32_elements_have_a_digest():
    """One such array is too large to fill here, so its digest is only traced."""
    assert jax.eval_shape(digest, jax.ShapeDtypeStruct((2, 2**17, 2**15), jnp.int8)).dtype == jnp.uint32
