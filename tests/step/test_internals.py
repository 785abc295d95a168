"""Norms that `log_internals` reports: those of the arrays, layer by layer, on any mesh; and a loss's own metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.model.params import by_path, dotted
from src.step.loss import next_token_loss
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests import tiny

KEYS = {"log_internals": 1, "optimizer_rules": '[{match: "*.scale", opt_type: sgd}]'}
SEVERAL = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
STAGES = {"ici_pipeline_parallelism": 2, "ici_data_parallelism": 4, "ici_fsdp_parallelism": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def internals(devices=1, **overrides):
    """Of two updates of random weights, and the weights before and after the second."""
    trainer = tiny.Trainer(devices, initial=False, **{**KEYS, **overrides})
    trainer.step(tiny.packed_rows(0), 0)
    before = jax.device_get(trainer.state.weights.trainable)
    placed = {name: jnp.asarray(array) for name, array in tiny.packed_rows(1).items()}
    trainer.state, metrics = trainer.train_step(trainer.state, placed, trainer.hparams(1))
    after = jax.device_get(trainer.state.weights.trainable)
    return jax.device_get(metrics), before, after


def layer_norms(tree):
    """By dotted name; of each layer where a segment has several."""
    return {
        dotted(path): np.sqrt(np.sum(np.square(x, dtype=np.float64), axis=tuple(range(path[0] == "segments", x.ndim))))
        for path, x in by_path(tree).items()
    }


def test_norms_are_those_of_the_arrays():
    metrics, before, after = internals()
    told = metrics["internals"]
    updates = jax.tree.map(lambda new, old: new - old, after, before)
    for kind, expected in (("weight", layer_norms(after)), ("update", layer_norms(updates))):
        assert {name for name in told if name.startswith(kind)} == {f"{kind}_norm/{name}" for name in expected}
        for name, norm in expected.items():
            np.testing.assert_allclose(told[f"{kind}_norm/{name}"], np.atleast_1d(norm), rtol=1e-3, err_msg=name)
    squares = [np.sum(np.square(norm)) for name, norm in told.items() if name.startswith("gradient_norm")]
    np.testing.assert_allclose(np.sqrt(np.sum(squares)), metrics["grad_norm"], rtol=1e-5)
    assert told["activation_rms"].shape == (2,)


def test_activations_are_what_the_layers_return():
    """An identity: with layers that add nothing the outputs are the embeddings of the tokens that are no padding."""
    trainer = tiny.Trainer(initial=False, **KEYS)
    trainable = jax.tree.map_with_path(
        lambda path, w: jnp.zeros_like(w) if path[-1].key in ("out", "wo") else w, trainer.state.weights.trainable
    )
    table = np.asarray(trainable["embedding"])
    trainer.state.weights.trainable.update(trainable)
    batch = tiny.packed_rows(0)
    _, metrics = trainer.train_step(trainer.state, batch, trainer.hparams(0))
    embedded = table[batch["tokens"][batch["segment_ids"] > 0]]
    expected = np.sqrt(np.mean(np.square(embedded)))
    np.testing.assert_allclose(metrics["internals"]["activation_rms"], [expected] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ({}, {**SEVERAL, "gradient_accumulation_steps": 2}),
        pytest.param({}, STAGES, marks=pytest.mark.long),
        pytest.param(EXPERTS, STAGES, marks=pytest.mark.long),
    ],
)
def test_a_mesh_tells_what_one_device_tells(model, mesh):
    expected, _, _ = internals(**model)
    told, _, _ = internals(8, **model, **mesh)
    assert told["internals"].keys() == expected["internals"].keys()
    for name, value in expected["internals"].items():
        if "update" not in name:  # Adam makes a sign of a gradient that is all but zero
            np.testing.assert_allclose(told["internals"][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def accuracy(model, batch, plan):
    """The next-token loss, and how many rows and tokens it saw."""
    sums = next_token_loss(model, batch, plan)
    tokens = jnp.sum(batch["loss_mask"])
    per_row = tokens, jnp.float32(batch["tokens"].shape[0])
    nothing = jnp.float32(0), jnp.float32(0)
    return sums._replace(metrics={"tokens_per_row": per_row, "nats": (sums.loss, tokens), "nothing": nothing})


def wrong(model, batch, plan):
    return next_token_loss(model, batch, plan)._replace(metrics={"nats": jnp.zeros(())})


def test_a_losss_own_metrics_are_means_over_the_whole_batch():
    config = tiny.load(loss=f"{__name__}:accuracy", gradient_accumulation_steps=2, per_device_batch_size=4)
    step = trace_train_step(config, jax.devices()[:1])
    trainer = tiny.Trainer(initial=False)
    batch = tiny.packed_rows(0)
    _, metrics = step.train(trainer.state, batch, trainer.hparams(0))
    own = metrics["user_metrics"]
    np.testing.assert_allclose(own["nats"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(own["tokens_per_row"], batch["loss_mask"].sum() / 8)
    assert np.isnan(own["nothing"])
    assert metrics["finite"], "a mean of nothing stops no run"
    with pytest.raises(UserError, match=r"its metrics, must return \{name: \(sum, count\)\}"):
        trace_train_step(tiny.load(loss=f"{__name__}:wrong"), jax.devices()[:1])
