"""Looking up rows of tables that devices share, against NumPy, with gradients added up in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.model import lookup
from src.parallel.mesh import make_layout
from src.step.trace import trace_train_step
from tests.compilers import SMALL, needs_libtpu
from tests.tiny import TINY, Trainer, load, packed_rows

MESHES = {
    "fsdp": {},
    "fsdp, tensor": {"ici_tensor_parallelism": 2},
    "data, fsdp": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp, context, expert": {"ici_context_parallelism": 2, "ici_expert_parallelism": 2},
    "fsdp, context": {"ici_context_parallelism": 2},
    "tensor": {"ici_tensor_parallelism": 8},
}
V, D, ROWS, LENGTH = 160, 32, 8, 6


def problem(length=LENGTH):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(V, D)).astype(np.float32)
    ids = rng.integers(0, V, (ROWS, length))
    ids[:, 0] = 7  # a frequent token, which all devices have
    return table, ids, rng.normal(size=(*ids.shape, D)).astype(np.float32)


@pytest.fixture
def narrow_blocks(monkeypatch):
    """A block of columns may have as few as 8."""
    monkeypatch.setattr(lookup, "LANES", 8)


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("length", [LENGTH, 40])  # 40: devices have so many tokens that they gather the table
def test_rows_and_their_gradients_are_those_of_the_whole_table(mesh, length):
    layout = make_layout(load(**MESHES[mesh]).mesh, jax.devices())
    table, ids, weights = problem(length)
    at = layout.sharding(("vocab", "embed")), layout.sharding(("batch", "length"))

    def weighted(table, ids):
        found = lookup.look_up(table, ids, layout, "vocab")
        return jnp.sum(found * weights), found

    step = jax.jit(jax.value_and_grad(weighted, has_aux=True), in_shardings=at)
    (_, found), gradient = step(table, ids)
    np.testing.assert_array_equal(found, table[ids])
    expected = np.zeros((V, D))
    np.add.at(expected, ids, weights.astype(np.float64))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("narrow_blocks")
def test_what_a_device_moves_is_its_tokens_rows_and_never_the_table():
    """Of 8 devices pairs gather 8 of 32 columns, and four exchange 48 tokens a row."""
    layout = make_layout(load().mesh, jax.devices())
    table, ids, _ = problem()
    at = layout.sharding(("vocab", "embed")), layout.sharding(("batch", "length"))
    step = jax.jit(lambda table, ids: lookup.look_up(table, ids, layout, "vocab"), in_shardings=at)
    text = step.lower(table, ids).compile().as_text()
    assert "all-to-all" in text
    assert f"f32[{V},8]" in text
    assert f"f32[{V},{D}]" not in text


@pytest.mark.parametrize("case", ["exchanged", "one device", *MESHES])
def test_gradients_of_a_frequent_token_are_added_up_in_float32(case, monkeypatch):
    """In bfloat16 a sum of ones stays at 256."""
    monkeypatch.setattr(lookup, "LANES", 8 if case == "exchanged" else D)
    devices = jax.devices()[: 1 if case == "one device" else None]
    layout = make_layout(load(**MESHES.get(case, {})).mesh, devices)
    vocab, length = (8 * V, 64) if case == "exchanged" else (V, 512)
    table, ids = jnp.zeros((vocab, D), jnp.bfloat16), np.full((ROWS, length), 7)
    at = layout.sharding(("vocab", "embed")), layout.sharding(("batch", "length"))

    def total(table, ids):
        return jnp.sum(lookup.look_up(table, ids, layout, "vocab").astype(jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(total), in_shardings=at)(table, ids), np.float32)
    np.testing.assert_array_equal(gradient[7], ids.size)
    assert np.count_nonzero(gradient) == D


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize(
    "mesh", ["data, fsdp", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("fsdp, tensor", "fsdp, context"))]
)
def test_steps_are_those_of_one_device(mesh, monkeypatch):
    """With micro-batches, so that over data the lookup is within another map."""
    losses = []
    for devices, keys in ((1, {}), (8, MESHES[mesh])):
        blocks = []
        counted = lookup._column_blocks
        monkeypatch.setattr(lookup, "_column_blocks", lambda *a, f=counted, b=blocks: b.append(f(*a)) or b[-1])
        trainer = Trainer(devices, initial=False, gradient_accumulation_steps=2, vocab_size=512, **keys)
        losses.append([trainer.step(packed_rows(number, rows=16), number)["loss"] for number in range(3)])
        monkeypatch.setattr(lookup, "_column_blocks", counted)
        assert min(blocks) > 1 if devices > 1 else max(blocks) == 1
    np.testing.assert_allclose(*losses, rtol=1e-5)


@needs_libtpu
def test_exchanged_rows_of_micro_batches_compile_for_tpus():
    """As all optimisations leave them: libtpu 0.0.42 and 0.0.48 did not compile the sum of the table's gradients."""
    sizes = dict(pair.split("=") for pair in SMALL) | {"base_num_decoder_layers": 1, "head_dim": 128}
    config = load(
        **{**TINY, **sizes, "dtype": "bfloat16", "per_device_batch_size": 1, "gradient_accumulation_steps": 2}
    )
    step = trace_train_step(config, abstract_devices(parse_topology("v5e-8", 1)))
    text = step.jax_traced.lower().compile().as_text()
    assert "embedding/shard_map/all_to_all" in text
