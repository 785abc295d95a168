"""A small training state for the tests of checkpoints: of several shardings and dtypes, in optax's containers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from src.checkpoint.restore import restore_any


def restore_step(path, wanted):
    """These parts of the state of a checkpoint."""
    return restore_any(path, lambda meta, saved: wanted, ", ".join(wanted))


def make_mesh(shape, devices=None):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def make_values(seed, embed=64):
    """Parts of a state as numpy arrays."""
    rng = np.random.default_rng(seed)
    weights = {
        "embed": rng.normal(size=(32, embed)).astype(np.float32),
        "layers": [{"w": rng.normal(size=(2, embed, 24)).astype(np.float32), "scale": np.ones((2, embed), np.float32)}],
        "head": rng.normal(size=(embed, 32)).astype(jnp.bfloat16),
    }
    moments = jax.tree.map(lambda w: rng.normal(size=w.shape).astype(w.dtype), weights)
    return {
        "step": np.int32(seed),
        "trainable": weights,
        "frozen": {},
        "stats": {"bias": rng.normal(size=(8,)).astype(np.float32)},
        "opt": (optax.EmptyState(), optax.ScaleByAdamState(np.int32(seed), moments, jax.tree.map(np.abs, moments))),
        "data_position": rng.integers(0, 1000, (8, 1, 2)).astype(np.int32),
    }


def spec_of(value):
    """A partition for arrays of each rank that uses every mesh axis."""
    return {0: P(), 1: P("data"), 2: P("fsdp", "tensor"), 3: P(("data", "fsdp"), None, None)}[np.ndim(value)]


def place(values, mesh, spec=spec_of):
    """The values as global arrays; every process has all of them and places its devices' parts."""

    def put(value):
        value = np.asarray(value)
        sharding = NamedSharding(mesh, spec_for(value, mesh, spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(put, values)


def spec_for(value, mesh, spec):
    """`spec(value)` where the mesh divides the array's dims, else replicated."""
    wanted = spec(value)
    try:
        NamedSharding(mesh, wanted).shard_shape(value.shape)
    except ValueError:
        return P()
    return wanted


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def same(state, values):
    """Whether a state's containers, dtypes and bits are those of `values`."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(values), strict=True)
    return jax.tree.structure(state) == jax.tree.structure(values) and all(
        x.dtype == value.dtype and np.asarray(x).tobytes() == value.tobytes() for x, value in pairs
    )
