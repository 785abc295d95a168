"""The training step on every mesh, its micro-batches, and what an update that is not finite leaves behind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import LENGTH, Trainer, assert_close, make, packed_rows, tree_bits

from src.step.optimizer import hyper_parameters, learning_rate
from src.step.state import abstract_state, batch_sharding, state_weights
from src.step.train_step import loss_sums, train_step

# Heads, widths and rows that divide by eight.
EVEN = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 4}
STEPS = 20


def sizes(data=1, fsdp=1, tensor=1):
    return {"ici_data_parallelism": data, "ici_fsdp_parallelism": fsdp, "ici_tensor_parallelism": tensor}


MESHES = {
    "data": sizes(data=8),
    "fsdp": sizes(fsdp=8),
    "tensor": sizes(tensor=8),
    "cube": sizes(data=2, fsdp=2, tensor=2),
}


def run(**overrides):
    """Initial weights, the losses of 20 steps, and the trainer."""
    trainer = Trainer(**EVEN, **overrides)
    weights = jax.device_get(trainer.state.trainable)
    return weights, [trainer.step(packed_rows(step), step)["loss"] for step in range(STEPS)], trainer


# Of a projection [layers, embed, heads, head_dim] and its moments: how many devices share them out.
SHARDS = {"data": 1, "fsdp": 8, "tensor": 8, "cube": 4}


@pytest.fixture(scope="module")
def one_device():
    return run()


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_gives_the_losses_of_one_device(one_device, mesh, capfd):
    weights, losses, _ = one_device
    sharded_weights, sharded_losses, trainer = run(devices=8, **MESHES[mesh])
    assert tree_bits(sharded_weights) == tree_bits(weights)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-4)
    # XLA warns so where it could only change a sharding by copying the whole array to every device.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    # One program for 20 learning rates.
    assert trainer.train_step._cache_size() == 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state):
        if "'query'" in jax.tree_util.keystr(path):
            assert leaf.addressable_shards[0].data.size * SHARDS[mesh] == leaf.size


def test_a_mesh_gives_the_losses_of_one_device_with_everything_switched_on(capfd):
    settings = {
        **EVEN,
        "position_type": "learned",
        "normalization": "layer",
        "mlp_activations": "[gelu]",
        "mlp_bias": "true",
        "attention_bias": "true",
        "logits_via_embedding": "true",
        "gradient_accumulation_steps": 2,
        "num_vocab_tiling": 4,
        "z_loss_multiplier": 1e-3,
        "remat_policy": "full",
    }
    losses = []
    for devices, mesh in ((1, {}), (8, MESHES["cube"])):
        trainer = Trainer(devices=devices, initial=False, **settings, **mesh)
        losses.append([trainer.step(packed_rows(step), step)["loss"] for step in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_dropout_differs_from_step_to_step_and_evaluation_has_none():
    trainer = Trainer(rows=2, initial=False, dropout_rate=0.5, learning_rate=1e-30)
    batch = packed_rows(0, rows=2)
    first, second = (trainer.step(batch, step)["loss"] for step in range(2))
    assert abs(first - second) > 1e-3
    _, plain = make()
    placed = {name: batch[name] for name in batch if name != "data_position"}
    evaluated = trainer.eval_step(
        state_weights(trainer.state), jax.device_put(placed, trainer.plan.layout.sharding(()))
    )
    expected, *_ = jax.jit(lambda weights: loss_sums(plain.decoder(weights), batch, plain))(trainer.state.trainable)
    assert evaluated["loss_sum"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert evaluated["tokens"].item() == batch["loss_mask"].sum()


def test_the_gradient_is_of_the_mean_over_all_tokens_however_micro_batches_share_them_out():
    batch = packed_rows(0)
    batch["loss_mask"] *= np.arange(8)[:, None] % 4 >= np.arange(LENGTH) % 4  # one to four quarters of a row
    settings = {
        "opt_type": "sgd",
        "learning_rate": 1.0,
        "adam_weight_decay": 0,
        "gradient_clipping_threshold": 0,
        "z_loss_multiplier": 0.1,
    }
    trainers = [Trainer(initial=False, gradient_accumulation_steps=count, **settings) for count in (1, 4)]
    weights = jax.device_get(trainers[0].state.trainable)
    tokens = batch["loss_mask"].sum()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean(weights):
        loss, squares, *_ = loss_sums(trainers[0].plan.decoder(weights), batch, trainers[0].plan)
        return (loss + 0.1 * squares) / tokens, loss / tokens

    (_, loss), gradients = mean(weights)
    for trainer in trainers:
        metrics = trainer.step(batch, 0)
        assert metrics["tokens"] == tokens
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(optax.tree.norm(gradients).item(), rel=1e-5)
        rate = learning_rate(trainer.config, 0)
        expected = jax.tree.map(lambda weight, gradient, rate=rate: weight - rate * gradient, weights, gradients)
        assert_close(trainer.state.trainable, expected, 1e-5)


def test_an_update_that_is_not_finite_changes_no_weight_and_no_moment(one_device):
    _, _, trainer = one_device
    before = jax.device_get(trainer.state)
    broken = packed_rows(1000)
    broken["loss_mask"][3, 4] = np.inf
    metrics = trainer.step(broken, 0)
    assert metrics["finite"] is False
    assert not np.isfinite(metrics["loss"])
    assert tree_bits((trainer.state.trainable, trainer.state.opt)) == tree_bits((before.trainable, before.opt))
    assert trainer.state.step == before.step + 1
    np.testing.assert_array_equal(trainer.state.data_position, broken["data_position"])

    metrics = trainer.step(packed_rows(1001), 0)
    assert metrics["finite"] is True
    assert tree_bits(trainer.state.trainable) != tree_bits(before.trainable)


def test_hyper_parameters_change_without_another_compilation(one_device):
    _, _, trainer = one_device
    batch = jax.device_put(packed_rows(0), batch_sharding(trainer.plan.layout))
    before = jax.device_get(trainer.state.trainable)
    hyper = hyper_parameters(trainer.config, 5)
    for name in hyper:
        hyper[name] = hyper[name] * np.float32(0.5)
        trainer.state, _ = trainer.train_step(trainer.state, batch, hyper)
    assert trainer.train_step._cache_size() == 1
    hyper["learning_rate"] = np.float32(0.0)
    rested = jax.device_get(trainer.state.trainable)
    assert tree_bits(rested) != tree_bits(before)
    trainer.state, _ = trainer.train_step(trainer.state, batch, hyper)
    assert tree_bits(trainer.state.trainable) == tree_bits(rested)


def test_an_update_that_makes_weights_of_no_use_says_so(one_device):
    """Where nothing finite can be computed with them, though every weight is finite."""
    _, _, trainer = one_device
    batch = jax.device_put(packed_rows(0), batch_sharding(trainer.plan.layout))
    usable, finite = [], []
    for exponent in (-2, *range(0, 16), 30):
        hyper = hyper_parameters(trainer.config, 5) | {"learning_rate": np.float32(10.0**exponent)}
        state, metrics = trainer.train_step(jax.tree.map(jnp.copy, trainer.state), batch, hyper)
        assert metrics["finite"]
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.trainable))
        usable.append(bool(metrics["usable"]))
        finite.append(bool(jnp.isfinite(trainer.train_step(state, batch, hyper)[1]["loss"])))
    assert usable[:6] == [True] * 6  # up to 1e4, far beyond what anybody trains with
    assert not any(usable[11:])
    assert all(after for before, after in zip(usable, finite, strict=True) if before)
    assert not all(finite)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mu_dtype", ["", "bfloat16", "float32"])
@pytest.mark.parametrize("opt_type", ["adamw", "sgd"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_a_step_keeps_the_dtypes_of_its_state(weight_dtype, opt_type, mu_dtype, micro_batches):
    config, plan = make(
        weight_dtype=weight_dtype, opt_type=opt_type, mu_dtype=mu_dtype, gradient_accumulation_steps=micro_batches
    )
    state = abstract_state(plan, config, (8, 1, 2))
    updated, _ = jax.eval_shape(
        functools.partial(train_step, plan=plan), state, packed_rows(0), hyper_parameters(config, 0)
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(updated)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    if opt_type == "adamw":
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt[0].mu)} == {jnp.dtype(mu_dtype or weight_dtype)}
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt[0].nu)} == {jnp.dtype(weight_dtype)}
