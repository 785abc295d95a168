"""A checkpoint of one mesh goes on with any other: the same bits in its weights, the same losses after."""

import jax
import numpy as np
import pytest

from src.checkpoint.checkpointer import Checkpointer
from src.step.state import TrainState
from tests.parallel.axes import Job, whole
from tests.parallel.test_axes import devices_and_keys

TURNS = "stage 2, layers in turns"
PAIRS = [
    ("dense", "fsdp 8", TURNS),
    ("dense", TURNS, "data 2 fsdp 2 tensor 2"),
    ("windowed", "stage 2 fsdp 2", "context 2 tensor 2"),
    ("gpt3", "fsdp 2 tensor 4", "stage 4"),
    ("latent experts", "expert 4 tensor 2", "stage 2 fsdp 2"),
    ("latent experts", "stage 2 expert 2", "fsdp 2 context 4"),
]
# Stages in turns are in the next test, which begins with the same.
QUICK = (PAIRS[3],)


def job_on(model, mesh):
    devices, keys = devices_and_keys(mesh)
    return Job(model, devices, **keys)


def pass_on(before, after, folder):
    """Saves the state of one job and restores it for the other: all the same bits."""
    saver = Checkpointer(folder, max_to_keep=1, async_save=False)
    saver.save(int(before.trainer.state.step), vars(before.trainer.state), {})
    saver.close()
    restorer = Checkpointer(folder, max_to_keep=1, async_save=False)
    parts, _, messages = restorer.restore_latest(vars(after.trainer.abstract))
    after.trainer.state = TrainState(**parts)
    assert messages == []
    jax.tree.map(np.testing.assert_array_equal, whole(after.trainer.state), whole(before.trainer.state))


@pytest.mark.parametrize(
    ("model", "saved_on", "restored_on"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.long) for pair in PAIRS],
)
def test_a_checkpoint_has_the_same_bits_on_another_mesh(model, saved_on, restored_on, tmp_path):
    before, after = job_on(model, saved_on), job_on(model, restored_on)
    rng = np.random.default_rng(0)
    before.trainer.state = jax.tree.map(
        lambda leaf: jax.device_put((100 * rng.random(leaf.shape)).astype(leaf.dtype), leaf.sharding),
        before.trainer.state,
    )
    pass_on(before, after, tmp_path)


@pytest.mark.parametrize(
    ("model", "saved_on", "restored_on"),
    [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS[1:])],
)
def test_a_checkpoint_goes_on_with_another_mesh(model, saved_on, restored_on, tmp_path):
    before, after = job_on(model, saved_on), job_on(model, restored_on)
    before.step(0)
    pass_on(before, after, tmp_path)
    losses = [[job.step(number)["loss"] for number in (1, 2)] for job in (before, after)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
