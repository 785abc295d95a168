"""Updates against PyTorch's optimizers, and the schedules' closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from src.step.adafactor import clip_matrices
from src.step.matrices import MatrixDims
from src.step.optimizer import clip, learning_rate
from src.step.state import state_shardings
from tests.step.updates import our_updates, problem, pytorchs_updates
from tests.tiny import assert_close, load, make


@pytest.mark.parametrize("threshold", [1.0, 0.0])
def test_adamw_equals_pytorchs_with_decoupled_decay_and_clipping(threshold):
    weights, decays, gradients = problem()

    def adamw(decaying, other):
        groups = [{"params": [decaying], "weight_decay": 0.3}, {"params": [other], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)

    ours, _ = our_updates("adamw", weights, decays, gradients, gradient_clipping_threshold=threshold)
    assert_close(ours, pytorchs_updates(adamw, weights, gradients, threshold), 1e-5)


def test_sgd_equals_pytorchs():
    weights, decays, gradients = problem()

    def sgd(decaying, other):
        groups = [{"params": [decaying], "weight_decay": 0.3}, {"params": [other], "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)  # its decay, too, is scaled by the learning rate

    ours, state = our_updates("sgd", weights, decays, gradients)
    assert_close(ours, pytorchs_updates(sgd, weights, gradients, 1.0), 1e-5)
    assert jax.tree.leaves(state) == []


def test_the_first_moment_has_mu_dtype():
    weights, decays, gradients = problem()
    exact, _ = our_updates("adamw", weights, decays, gradients)
    rounded, state = our_updates("adamw", weights, decays, gradients, mu_dtype="bfloat16")
    (moments,) = [part for part in state if isinstance(part, optax.ScaleByAdamState)]
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.mu)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.nu)} == {jnp.dtype("float32")}
    assert_close(rounded, exact, 1e-2)


def test_norms_and_biases_do_not_decay_however_they_are_stacked():
    _, plan = make(normalization="layer", attention_bias="true", mlp_bias="true", position_type="learned")
    decays = {jax.tree_util.keystr(path): decay for path, decay in jax.tree_util.tree_leaves_with_path(plan.decays)}
    exempt = {path.rpartition("['")[2].removesuffix("']") for path, decay in decays.items() if not decay}
    decaying = {path.rpartition("['")[2].removesuffix("']") for path, decay in decays.items() if decay}
    biases = {f"{name}_bias" for name in ("query", "key", "value", "out", "wi", "wo")}
    assert exempt == biases | {"scale", "bias"}
    assert decaying == {"embedding", "position_embedding", "output", "query", "key", "value", "out", "wi", "wo"}


def rates(steps, **overrides):
    config = load(steps=steps, learning_rate=2.0, learning_rate_final_fraction=0.25, **overrides)
    return [learning_rate(config.step, config.run.steps, step) for step in range(steps)], config


def test_cosine_schedule():
    rate, config = rates(110, warmup_steps_fraction=10 / 110)
    np.testing.assert_allclose(rate[:10], 2.0 * np.arange(1, 11) / 10)
    assert rate[10] == 2.0
    assert rate[60] == pytest.approx(2.0 * (1 + 0.25) / 2)  # half way down: the mean of both ends
    assert rate[109] == pytest.approx(2.0 * (0.25 + 0.75 * (1 + np.cos(np.pi * 99 / 100)) / 2))
    assert learning_rate(config.step, config.run.steps, 110) == 0.0


def test_wsd_schedule():
    rate, config = rates(100, warmup_steps_fraction=0.05, lr_schedule_type="wsd", wsd_decay_steps_fraction=0.2)
    np.testing.assert_allclose(rate[:5], 2.0 * np.arange(1, 6) / 5)
    np.testing.assert_allclose(rate[5:81], 2.0)
    np.testing.assert_allclose(rate[80:], 2.0 - 1.5 * np.arange(20) / 20)
    assert learning_rate(config.step, config.run.steps, 100) == 0.0


def test_schedules_are_optaxs():
    """Which compute in float32, so that the last bits differ: why ours are not theirs."""
    steps, warmup, peak, final = 200, 20, 2.0, 0.25
    decay = steps - warmup
    stable_then_line = [optax.constant_schedule(peak), optax.linear_schedule(peak, peak * final, 40)]
    for kind, theirs in {
        "cosine": optax.cosine_decay_schedule(peak, decay, final),
        "exponential": optax.exponential_decay(peak, decay, final),
        "wsd": optax.join_schedules(stable_then_line, [decay - 40]),
    }.items():
        keys = {"wsd_decay_steps_fraction": 0.2} if kind == "wsd" else {}
        ours, _ = rates(steps, warmup_steps_fraction=warmup / steps, lr_schedule_type=kind, **keys)
        expected = [optax.linear_schedule(0.0, peak, warmup)(step + 1) for step in range(warmup)]
        expected += [theirs(step) for step in range(decay)]
        np.testing.assert_allclose(ours, expected, rtol=2e-6, err_msg=kind)


def test_clipping_is_optaxs():
    _, _, gradients = problem()
    for threshold in (0.5, 3.0, 1e9):
        for gradient in gradients:
            expected, _ = optax.clip_by_global_norm(threshold).update(gradient, None)
            assert_close(clip(gradient, optax.tree.norm(gradient), np.float32(threshold)), expected, 1e-6)


def test_adams_updates_are_clipped_as_optax_clips_blocks():
    """Each layer's matrix and vector by itself, and of a vocabulary's table the rows that there are."""
    rng = np.random.default_rng(0)
    shapes = {"bias": (2, 4), "kernel": (2, 3, 4), "table": (6, 4)}
    updates = {name: rng.normal(0, 3, shape).astype(np.float32) for name, shape in shapes.items()}
    updates["table"][5] = 0.0
    matrices = {
        "bias": MatrixDims((0,), (), (1,), hidden=False),
        "kernel": MatrixDims((0,), (1,), (2,), hidden=True),
        "table": MatrixDims((), (0,), (1,), hidden=False, vocab=(0, 5)),
    }
    chosen = {"bias": True, "kernel": True, "table": True}
    clipped, _ = clip_matrices(matrices, chosen, 1.0).update(updates, None)
    theirs = optax.clip_by_block_rms(1.0)
    for name in ("bias", "kernel"):
        expected = np.stack([theirs.update(layer, None)[0] for layer in updates[name]])
        np.testing.assert_allclose(clipped[name], expected, rtol=1e-6)
    np.testing.assert_allclose(clipped["table"][:5], theirs.update(updates["table"][:5], None)[0], rtol=1e-6)
    weights, decays, gradients = problem()
    plain, _ = our_updates("adamw", weights, decays, gradients[:1], adam_weight_decay=0)
    halved, _ = our_updates("adamw", weights, decays, gradients[:1], adam_weight_decay=0, adam_clip_threshold=0.5)
    for name in weights:  # Adam's first update has a root mean square of 1
        np.testing.assert_allclose(
            2 * (halved[name] - weights[name]), plain[name] - weights[name], rtol=1e-3, atol=1e-6
        )


def test_a_schedule_may_be_longer_or_shorter_than_the_run():
    long = load(steps=10, learning_rate_schedule_steps=1000, warmup_steps_fraction=0.01)
    short = load(steps=10, learning_rate_schedule_steps=5, warmup_steps_fraction=0.2)
    assert learning_rate(long.step, long.run.steps, 9) == long.step.learning_rate
    assert learning_rate(short.step, short.run.steps, 0) == short.step.learning_rate
    assert [learning_rate(short.step, short.run.steps, step) for step in range(5, 10)] == [0.0] * 5


def test_without_warm_up_a_schedule_starts_at_its_peak():
    rate, _ = rates(10, warmup_steps_fraction=0)
    assert rate[0] == 2.0


def test_a_state_of_another_rank_lies_as_its_weights_dims_do():
    """As of Shampoo and SOAP, which keep square matrices of a weight's sides."""
    mesh = jax.make_mesh((2, 2, 2), ("layers", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    at = NamedSharding(mesh, PartitionSpec("layers", "fsdp", "tensor"))
    shapes = {"mlp": {"wi": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)}}
    sizes = {
        "moment": ((4, 8, 16), ("layers", "fsdp", "tensor")),
        "row mean": ((4, 1, 16), ("layers", None, "tensor")),
        "row mean, dim left out": ((4, 16), ("layers", "tensor")),
        "left": ((4, 8, 8), ("layers", "fsdp", None)),
        "right": ((4, 1, 16, 16), ("layers", None, "tensor", None)),
        "count": ((4,), ("layers",)),
        "norm": ((), ()),
    }
    opt = [{"mlp": {"wi": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in sizes.items()}}}]
    opt += [{"by name": {"mlp": {"wi": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)}}, "count": shapes["mlp"]["wi"]}]
    copy = NamedSharding(mesh, PartitionSpec())
    of_weight, others = state_shardings(opt, shapes, {"mlp": {"wi": at}}, copy)
    assert {name: found.spec for name, found in of_weight["mlp"]["wi"].items()} == {
        name: PartitionSpec(*axes) for name, (_, axes) in sizes.items()
    }
    assert others == {"by name": {"mlp": {"wi": at}}, "count": copy}


def test_a_bfloat16_moment_decays_with_what_is_not_refused():
    """The bound stands where rounding to nearest stops: below it a moment reaches a hundredth, above it never moves."""
    for b2, ends_below in ((0.996, True), (0.9985, False)):
        adam = optax.scale_by_adam(b2=b2)
        state = adam.init({"w": jnp.zeros(1, jnp.bfloat16)})
        state = state._replace(nu={"w": jnp.ones(1, jnp.bfloat16)})
        update = jax.jit(lambda state, adam=adam: adam.update({"w": jnp.zeros(1, jnp.bfloat16)}, state)[1])
        for _ in range(2000):
            state = update(state)
        assert (float(state.nu["w"][0]) < 0.01) == ends_below
