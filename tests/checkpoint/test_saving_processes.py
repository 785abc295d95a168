"""Saves in processes of their own: one is killed, two save together and end together."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from src.checkpoint.checkpointer import Checkpointer
from tests import quick_compilation
from tests.checkpoint.arrays import abstract, make_mesh, make_values, place, same

REPOSITORY = Path(__file__).parents[2]

KILLED_IN_A_SAVE = """
    import os, signal, sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from src.checkpoint.checkpointer import Checkpointer
    from tests.checkpoint.arrays import make_mesh, make_values, place

    mesh = make_mesh((2, 2, 2))
    saver = Checkpointer(sys.argv[1], max_to_keep=1, async_save=True)
    saver.save(10, place(make_values(10, embed=4096), mesh), {})
    saver.wait()
    saver.save(20, place(make_values(20, embed=4096), mesh), {})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_IN_A_SAVE), str(tmp_path)]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stderr == ""  # Nor do the libraries talk to the user.
    unfinished = [path for path in tmp_path.iterdir() if path.name != "10"]
    assert len(unfinished) == 1  # It was killed in the middle, not before or after.
    assert not unfinished[0].name.isdigit()

    values, mesh = make_values(10, embed=4096), make_mesh((2, 2, 2))
    resumed = Checkpointer(tmp_path, max_to_keep=1, async_save=True)
    state, _, messages = resumed.restore_latest(abstract(place(values, mesh)))
    assert same(state, values)
    assert messages == []
    resumed.save(20, state, {})
    resumed.wait()
    resumed.prune()
    resumed.close()
    assert [path.name for path in tmp_path.iterdir()] == ["20"]


def test_two_processes_agree_on_checkpoints_and_on_when_to_stop(tmp_path):
    """Saved by two processes of 4 devices, restored there and by this one; see the worker for what it asserts."""
    worker = [sys.executable, "-m", "tests.checkpoint.saving_process", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **quick_compilation.ENVIRONMENT}
    workers = [
        subprocess.Popen(
            [*worker, str(process)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in workers]
    finally:
        for process in workers:
            process.kill()
    assert [process.returncode for process in workers] == [0, 0], "\n".join(errors)
    values, saver = make_values(30), Checkpointer(tmp_path / "checkpoints", max_to_keep=3, async_save=True)
    state, _, messages = saver.restore_latest(abstract(place(values, make_mesh((2, 2, 2)))))
    assert same(state, values)
    assert messages == []
    stopped_at = [(tmp_path / f"stopped_{process}").read_text() for process in range(2)]
    assert stopped_at[0] == stopped_at[1]
