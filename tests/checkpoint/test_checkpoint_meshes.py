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


def job_on(model, mesh):
    devices, keys = devices_and_keys(mesh)
    return Job(model, devices, **keys)


# Every other one takes its turn with the long tests.
CASES = [pytest.param(*pair, marks=pytest.mark.long if index % 2 else ()) for index, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("model", "saved_on", "restored_on"), CASES)
def test_a_checkpoint_goes_on_with_another_mesh(model, saved_on, restored_on, tmp_path):
    before, after = job_on(model, saved_on), job_on(model, restored_on)
    before.step(0)
    saver = Checkpointer(tmp_path, max_to_keep=1, async_save=False)
    saver.save(1, vars(before.trainer.state), {})
    saver.close()
    parts, _, messages = Checkpointer(tmp_path, max_to_keep=1, async_save=False).restore_latest(
        vars(after.trainer.abstract)
    )
    restored = TrainState(**parts)
    assert messages == []
    jax.tree.map(np.testing.assert_array_equal, whole(restored), whole(before.trainer.state))
    after.trainer.state = restored
    losses = [[job.step(number)["loss"] for number in (1, 2)] for job in (before, after)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
