"""The training step on every mesh, its micro-batches, and what an update that is not finite leaves behind."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from src.model.forward_context import ForwardContext
from src.model.params import Weights, by_path
from src.step.loss import next_token_loss
from src.step.optimizer import hparams_at, learning_rate
from src.step.state import abstract_state, batch_sharding
from src.step.train_step import train_step, with_dropout_keys
from src.system.errors import UserError
from tests.tiny import GPT3, LENGTH, Trainer, assert_close, make, packed_rows, tree_bits

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


EVERYTHING = {
    **GPT3,
    "gradient_accumulation_steps": 2,
    "num_vocab_tiling": 4,
    "z_loss_multiplier": 1e-3,
    "remat_policy": "full",
}


def run(**overrides):
    """Initial weights, the losses of 20 steps, and the trainer."""
    trainer = Trainer(**EVEN, **overrides)
    weights = jax.device_get(trainer.state.weights.trainable)
    return weights, [trainer.step(packed_rows(step), step)["loss"] for step in range(STEPS)], trainer


# Of a projection [layers, embed, heads, head_dim] and its moments: how many devices share them out.
SHARDS = {"data": 1, "fsdp": 8, "tensor": 8, "cube": 4}


@pytest.fixture(scope="module")
def one_device():
    return run(**EVERYTHING)


def assert_a_mesh_gives_the_losses(of_one_device, mesh, capfd, **overrides):
    weights, losses, _ = of_one_device
    sharded_weights, sharded_losses, trainer = run(devices=8, **MESHES[mesh], **overrides)
    assert tree_bits(sharded_weights) == tree_bits(weights)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-4)
    # XLA warns so where it could only change a sharding by copying the whole array to every device.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    # One program for 20 learning rates.
    assert trainer.train_step._cache_size() == 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state):
        if "'query'" in jax.tree_util.keystr(path) and leaf.ndim == 4:
            assert leaf.addressable_shards[0].data.size * SHARDS[mesh] == leaf.size


def test_a_mesh_gives_the_losses_of_one_device_with_everything_switched_on(one_device, capfd):
    assert_a_mesh_gives_the_losses(one_device, "cube", capfd, **EVERYTHING)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_gives_the_losses_of_one_device(mesh, capfd):
    assert_a_mesh_gives_the_losses(run(), mesh, capfd)


def test_dropout_differs_from_step_to_step_and_evaluation_has_none():
    trainer = Trainer(initial=False, dropout_rate=0.5, learning_rate=1e-30)
    batch = packed_rows(0, rows=2)
    first, second = (trainer.step(batch, step)["loss"] for step in range(2))
    assert abs(first - second) > 1e-3
    _, plain = make()
    evaluated = trainer.eval_step(trainer.state.weights, jax.device_put(batch, trainer.plan.layout.sharding(())))
    expected = jax.jit(lambda weights: next_token_loss(plain.decoder(weights), batch, plain).loss)(
        trainer.state.weights
    )
    assert evaluated["loss_sum"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert evaluated["tokens"].item() == batch["loss_mask"].sum()


def test_dropout_is_independent_of_the_initial_weights_and_of_itself():
    """At every width the sign of a weight, drawn with a mask's key, would be the mask."""
    D = 64
    adapted = {"lora_rank": 4, "lora_parameters": "[attention.*]", "load_parameters_path": "elsewhere"}
    _, plan = make(base_emb_dim=D, dropout_rate=0.5, **adapted)
    draws = {}

    @jax.jit
    def masks(step):
        batch = with_dropout_keys({"tokens": jnp.zeros((1, 4), jnp.int32)}, step, plan)
        context = ForwardContext(None, None, plan.layout, "", False, batch["dropout_keys"])
        return [context.dropout(jnp.ones((1, 4, D)), 0.5, site)[0] > 0 for site in range(4)]

    for step in range(4):
        for site, mask_TD in enumerate(jax.device_get(masks(jnp.int32(step)))):
            draws |= {("mask", step, site, token): mask for token, mask in enumerate(mask_TD)}
    weights = jax.device_get(jax.jit(plan.init_weights)())
    for path, leaf in by_path(weights.merged()).items():
        stacked = leaf.reshape(-1, leaf[0].size) if path[0] in ("segments", "lora") else leaf.reshape(1, -1)
        draws |= {
            (path, layer): values[:D] > 0 for layer, values in enumerate(stacked) if len(set(values.tolist())) > 1
        }
    signs = 2.0 * np.array([*draws.values()]) - 1
    assert signs.shape[0] > 64 + 20
    correlations = signs @ signs.T / D - np.eye(len(signs))
    worst = np.unravel_index(np.abs(correlations).argmax(), correlations.shape)
    assert np.abs(correlations).max() < 0.7, [list(draws)[index] for index in worst]  # 5.6 standard deviations


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
    weights = jax.device_get(trainers[0].state.weights.trainable)
    tokens = batch["loss_mask"].sum()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean(weights):
        sums = next_token_loss(trainers[0].plan.decoder(Weights(weights)), batch, trainers[0].plan)
        return (sums.loss + 0.1 * sums.z) / tokens, sums.loss / tokens

    (_, loss), gradients = mean(weights)
    for trainer in trainers:
        metrics = trainer.step(batch, 0)
        assert metrics["tokens"] == tokens
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(optax.tree.norm(gradients).item(), rel=1e-5)
        rate = learning_rate(trainer.config.step, trainer.config.run.steps, 0)
        expected = jax.tree.map(lambda weight, gradient, rate=rate: weight - rate * gradient, weights, gradients)
        assert_close(trainer.state.weights.trainable, expected, 1e-5)


def test_an_update_that_is_not_finite_changes_no_weight_and_no_moment(one_device):
    _, _, trainer = one_device
    before = jax.device_get(trainer.state)
    broken = packed_rows(1000)
    broken["loss_mask"][3, 4] = np.inf
    metrics = trainer.step(broken, 0)
    assert metrics["finite"] is False
    assert not np.isfinite(metrics["loss"])
    assert tree_bits((trainer.state.weights.trainable, trainer.state.opt)) == tree_bits(
        (before.weights.trainable, before.opt)
    )
    assert trainer.state.step == before.step + 1

    metrics = trainer.step(packed_rows(1001), 0)
    assert metrics["finite"] is True
    assert tree_bits(trainer.state.weights.trainable) != tree_bits(before.weights.trainable)


def test_the_average_of_the_weights_is_optaxs(one_device):
    """float32 whatever the weights are, from the initial ones on; a skipped update leaves it."""
    trainer = Trainer(initial=False, base_num_decoder_layers=1, ema_decay=0.75, weight_dtype="bfloat16")
    expected = jax.tree.map(lambda w: np.float32(w), jax.device_get(trainer.state.weights.trainable))
    trainer.state = dataclasses.replace(trainer.state, ema=jax.device_put(expected))
    for number in range(3):
        trainer.step(packed_rows(number), number)
        weights = jax.tree.map(lambda w: np.float32(w), jax.device_get(trainer.state.weights.trainable))
        expected = jax.tree.map(lambda e, w: 0.75 * e + 0.25 * w, expected, weights)
        jax.tree.map(lambda e, a: np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7), expected, trainer.state.ema)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trainer.state.ema)} == {"float32"}


def test_hyper_parameters_change_without_another_compilation(one_device):
    _, _, trainer = one_device
    batch = jax.device_put(packed_rows(0), batch_sharding(trainer.plan.layout))
    before = jax.device_get(trainer.state.weights.trainable)
    hparams = trainer.hparams(5)
    for name in hparams:
        hparams[name] = hparams[name] * np.float32(0.5)
        trainer.state, _ = trainer.train_step(trainer.state, batch, hparams)
    assert trainer.train_step._cache_size() == 1
    hparams["learning_rate"] = np.float32(0.0)
    rested = jax.device_get(trainer.state.weights.trainable)
    assert tree_bits(rested) != tree_bits(before)
    trainer.state, _ = trainer.train_step(trainer.state, batch, hparams)
    assert tree_bits(trainer.state.weights.trainable) == tree_bits(rested)


def test_an_update_that_makes_weights_of_no_use_says_so(one_device):
    """Where nothing finite can be computed with them, though every weight is finite."""
    _, _, trainer = one_device
    batch = jax.device_put(packed_rows(0), batch_sharding(trainer.plan.layout))
    usable, finite = [], []
    for exponent in (-2, *range(0, 16), 30):
        hparams = trainer.hparams(5) | {"learning_rate": np.float32(10.0**exponent)}
        state, metrics = trainer.train_step(jax.tree.map(jnp.copy, trainer.state), batch, hparams)
        assert metrics["finite"]
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.weights.trainable))
        usable.append(bool(metrics["usable"]))
        finite.append(bool(jnp.isfinite(trainer.train_step(state, batch, hparams)[1]["loss"])))
    assert usable[:6] == [True] * 6  # up to 1e4, far beyond what anybody trains with
    assert not any(usable[11:])
    assert all(after for before, after in zip(usable, finite, strict=True) if before)
    assert not all(finite)


# In pairs with each dtype of weights, and with each number of micro-batches.
KEPT = [
    (weight_dtype, *optimizer, micro_batches)
    for index, optimizer in enumerate([("adamw", ""), ("adamw", "bfloat16"), ("adamw", "float32"), ("sgd", "")])
    for weight_dtype, micro_batches in (("float32", 1 + index % 2), ("bfloat16", 2 - index % 2))
]


@pytest.mark.parametrize(("weight_dtype", "opt_type", "mu_dtype", "micro_batches"), KEPT)
def test_a_step_keeps_the_dtypes_of_its_state(weight_dtype, opt_type, mu_dtype, micro_batches):
    config, plan = make(
        weight_dtype=weight_dtype, opt_type=opt_type, mu_dtype=mu_dtype, gradient_accumulation_steps=micro_batches
    )
    state = abstract_state(plan)
    hparams = hparams_at(config.step, config.run.steps, 0)
    updated, _ = jax.eval_shape(functools.partial(train_step, plan=plan), state, packed_rows(0), hparams)
    assert [leaf.dtype for leaf in jax.tree.leaves(updated)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    if opt_type == "adamw":
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt[0].mu)} == {jnp.dtype(mu_dtype or weight_dtype)}
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt[0].nu)} == {jnp.dtype(weight_dtype)}


@pytest.mark.parametrize("trained", ["[]", "[attention.out]"])
def test_adapters_over_bfloat16_weights_have_moments_as_precise_as_they_are(trained):
    keys = {"lora_rank": 2, "load_parameters_path": "elsewhere", "trainable_parameters": trained}
    b2 = 0.999 if trained == "[]" else 0.99
    config, plan = make(weight_dtype="bfloat16", adam_b1=0.997, adam_b2=b2, **keys)
    state = abstract_state(plan)
    hparams = hparams_at(config.step, config.run.steps, 0)
    updated, _ = jax.eval_shape(functools.partial(train_step, plan=plan), state, packed_rows(0), hparams)
    assert [leaf.dtype for leaf in jax.tree.leaves(updated)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    for moments in (state.opt[0].mu["lora"], state.opt[0].nu["lora"]):
        assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}
    if trained != "[]":
        with pytest.raises(UserError, match=r"adam_b2=0\.999 needs a moment in float32"):
            make(weight_dtype="bfloat16", adam_b2=0.999, **keys)


def test_a_profile_reads_like_the_code():
    """The names of the compiled operations, which profilers show, have the step's parts in them."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)  # or an older program's names were read
    try:
        trainer = Trainer(initial=False, gradient_accumulation_steps=2, mtp_num_layers=1)
        batch = jax.device_put(packed_rows(0), batch_sharding(trainer.plan.layout))
        text = trainer.train_step.lower(trainer.state, batch, trainer.hparams(0)).compile().as_text()
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    names = set(re.findall(r'op_name="([^"]*)"', text))
    forward = re.compile(r"jit\(train_step\)/accumulate/.*jvp\(loss\)/cross_entropy/")
    backward = re.compile(r"jit\(train_step\)/accumulate/.*transpose\(jvp\(loss\)\)/cross_entropy/")
    update = re.compile(r"jit\(train_step\)/optimizer/")
    mtp = re.compile(r"jit\(train_step\)/accumulate/.*/mtp/.*attention/")
    for part in (forward, backward, update, mtp):
        assert any(map(part.match, names)), (part, sorted(names))
