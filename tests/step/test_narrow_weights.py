"""Weights in 16 bits that updates of the learning rate cannot change: what is said of them is what bfloat16 does."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from src.run.narrow_weights import NarrowWeights
from tests import runs
from tests.tiny import Trainer


def state_of(trainer, value):
    weights = trainer.state.weights
    trainable = jax.tree.map(lambda w: jnp.full(w.shape, value, w.dtype), weights.trainable)
    return trainer.state.__class__(trainer.state.step, weights.__class__(trainable), {})


@pytest.mark.parametrize(("value", "rate", "kept"), [(1.0, 1e-3, True), (1.0, 1e-2, False), (0.01, 1e-5, True)])
def test_a_learning_rate_below_half_the_spacing_of_numbers_changes_nothing(value, rate, kept):
    """Below 1, bfloat16's numbers are 2^-8 apart, and those near 0.01 are 2^-14 apart (IEEE 754 with 8 bits)."""
    trainer = Trainer(devices=4, initial=False, weight_dtype="bfloat16", learning_rate=rate)
    state = state_of(trainer, value)
    narrow = NarrowWeights(trainer.plan, state, 3)
    assert bool(narrow.messages) == kept
    if kept:
        assert "100.0% of the weights are so large" in narrow.messages[0]
        assert narrow.after(2, state) == []
        assert narrow.after(3, state) == ["step 3: 0.0% of the weights (in a sample) have changed so far"]
        assert "100.0% of the weights (in" in narrow.after(3, state_of(trainer, 2 * value))[0]


def test_weights_in_float32_are_not_looked_at():
    trainer = Trainer(initial=False, learning_rate=1e-9)
    assert NarrowWeights(trainer.plan, trainer.state, 1).messages == []


def test_a_run_says_how_many_weights_moved_as_its_checkpoints_show(tmp_path, capsys):
    """The share of all elements, from the checkpoint of the first step: the sample comes within a few percent."""
    corpus = runs.write_corpus(tmp_path / "corpus", documents=20)
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "checkpoint_period": 1, "log_period": 2}
    keys |= {"weight_dtype": "bfloat16", "learning_rate": 1e-4, "warmup_steps_fraction": 0, "steps": 3}
    runs.run_here(**keys, max_num_checkpoints_to_keep=-1)
    printed = capsys.readouterr().out
    (kept,) = re.findall(r"weight_dtype=bfloat16: ([\d.]+)% of the weights are so large that an update of", printed)
    (moved,) = re.findall(r"step 2: ([\d.]+)% of the weights", printed)
    runs.run_here(**{**keys, "run_name": "start", "steps": 1, "learning_rate": 1e-30})
    arrays = [runs.saved_arrays(tmp_path / name, step) for name, step in (("start", 1), ("run", 2))]
    names = [name for name in arrays[0] if name.startswith("trainable.")]
    before, after = ([each[name].view(ml_dtypes.bfloat16) for name in names] for each in arrays)
    sizes = [x.size for x in before]
    actual = np.average([np.mean(a != b) for a, b in zip(before, after, strict=True)], weights=sizes)
    assert float(moved) / 100 == pytest.approx(actual, abs=0.05)
    stuck = [np.mean((np.float32(w) + 1e-4).astype(ml_dtypes.bfloat16) == w) for w in before]
    assert float(kept) / 100 == pytest.approx(np.average(stuck, weights=sizes), abs=0.05)
