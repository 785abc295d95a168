"""Spikes of loss and gradient norm: the rule in plain Python, and what a step does about them."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src.step.spikes import empty_window, skip_spikes
from tests import tiny

INTERVAL, FACTOR = 6, 2.0


def expected(losses, norms):
    """Whether each update is made: the rule over lists."""
    seen, made = [], []
    for pair in zip(losses, norms, strict=True):
        finite = all(map(math.isfinite, pair))
        window = seen[-INTERVAL:]
        spike = (
            finite
            and len(window) >= INTERVAL // 2
            and any(
                value > statistics.fmean(past) + FACTOR * statistics.stdev(past)
                for value, past in zip(pair, zip(*window, strict=True), strict=True)
            )
        )
        made.append(finite and not spike)
        seen += [pair] if finite else []
    return made


def test_a_spike_is_far_above_the_mean_of_the_last_finite_steps():
    rng = np.random.default_rng(0)
    losses, norms = rng.normal(3.0, 0.1, 60), rng.normal(1.0, 0.2, 60)
    losses[[1, 20, 21, 40]] = 9.0  # the first where too few came before to judge
    norms[[30, 50]] = 30.0
    losses[[10, 51]], norms[33] = math.nan, math.inf
    window, made = empty_window(INTERVAL), []
    step = jax.jit(lambda window, loss, norm: skip_spikes(window, loss, norm, jnp.isfinite(loss + norm), FACTOR))
    for loss, norm in zip(np.float32(losses), np.float32(norms), strict=True):
        one, window, metrics = step(window, loss, norm)
        made.append(bool(one))
    assert made == expected(losses, norms)
    assert not {20, 30, 40, 50} & set(np.flatnonzero(made)), "spikes"
    assert int(metrics["updates_skipped"]) == made.count(False)


def test_a_step_leaves_a_spike_out_and_counts_it():
    keys = {"skip_step_on_spikes": True, "skip_step_interval": 4, "skip_step_scaling_factor": 1.0}
    trainer = tiny.Trainer(initial=False, base_num_decoder_layers=1, **keys)
    plain = tiny.Trainer(initial=False, base_num_decoder_layers=1)
    usual, other = tiny.packed_rows(0), tiny.packed_rows(1)
    for number in range(4):
        metrics = trainer.step(usual, number)
        assert metrics["loss"] == pytest.approx(plain.step(usual, number)["loss"])
        assert (metrics["spike"], metrics["updates_skipped"]) == (False, 0)
    before = jax.device_get(trainer.state)
    metrics = trainer.step(other, 4)  # which it has not learnt yet
    assert (metrics["spike"], metrics["updates_skipped"], metrics["finite"]) == (True, 1, True)
    after = jax.device_get(trainer.state)
    for part in ("weights", "opt"):
        assert tiny.tree_bits(getattr(after, part)) == tiny.tree_bits(getattr(before, part))
    assert after.spikes["loss"][0] == np.float32(metrics["loss"]), "it took the place of the oldest"
    assert (trainer.step(usual, 5)["spike"], int(trainer.state.step)) == (False, 6)
    assert tiny.tree_bits(jax.device_get(trainer.state).weights) != tiny.tree_bits(after.weights)
