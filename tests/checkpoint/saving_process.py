"""One of two processes that checkpoint together: `python -m tests.checkpoint.saving_process FOLDER PROCESS`."""

import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from src.checkpoint.checkpointer import Checkpointer
from src.checkpoint.load_weights import load_weights
from src.run.preemption import Preemption
from src.system.errors import UserError
from tests.checkpoint.arrays import abstract, make_mesh, make_values, place, restore_step


def main(folder: Path, process: int):
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(free_address(folder, process), num_processes=2, process_id=process)
    mesh = make_mesh((2, 2, 2))
    wanted = abstract(place(make_values(0), mesh))
    directory = folder / "checkpoints"

    saver = Checkpointer(directory, max_to_keep=3, async_save=True)
    for step in (10, 20, 30):
        saver.save(step, place(make_values(step), mesh), {"step": step})
    saver.close()
    assert restored(directory, wanted) == (30, {"step": 30}, 0)

    # Process 1 alone sees damage, in a copy of its own: process 0 has to give that checkpoint up too.
    view = Path(shutil.copytree(directory, folder / f"seen_by_{process}"))
    if process == 1:
        (view / "30" / "state" / "manifest.ocdbt").unlink()
    state, meta, messages = Checkpointer(view, max_to_keep=3, async_save=True).restore_latest(wanted)
    assert meta == {"step": 20}
    assert int(state["step"].addressable_data(0)) == 20
    assert messages[0].startswith("checkpoint 30 is passed over: it cannot be read: ")
    assert ("process 1 failed" in messages[0]) == (process == 0)

    # A checkpoint that process 1 does not see, or sees another in its place, is no damage: nobody goes on.
    view = Path(shutil.copytree(directory, folder / f"stale_{process}"))
    if process == 1:
        shutil.rmtree(view / "30")
    unseen = "a checkpoint: True in process 0, False in process 1"
    assert unseen in refusal(lambda: restored(view, wanted))
    assert unseen in refusal(lambda: restore_step(view, {"stats": wanted["stats"]}))
    if process == 1:
        shutil.copytree(view / "20", view / "30")
    assert "process 1 reads different contents in" in refusal(lambda: restored(view, wanted))
    # Where process 0 does not see it, all take what process 0 sees.
    if process == 0:
        shutil.rmtree(view / "30")
    assert restored(view, wanted) == (20, {"step": 20}, 0)

    # Hugging Face folders that differ.
    hf = folder / f"hf_{process}"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "model.safetensors").write_bytes(bytes([process]))
    assert "process 1 reads different weights in" in refusal(lambda: load_weights(str(hf), {}))

    # A damaged checkpoint that both see is saved again.
    multihost_utils.sync_global_devices("copied")
    if process == 0:
        (directory / "30" / "state" / "manifest.ocdbt").unlink()
    multihost_utils.sync_global_devices("damaged")
    resumed = Checkpointer(directory, max_to_keep=3, async_save=True)
    assert resumed.restore_latest(wanted)[1] == {"step": 20}
    resumed.save(30, place(make_values(30), mesh), {"step": 30})
    resumed.close()
    assert restored(directory, wanted) == (30, {"step": 30}, 0)

    # One process is told to end, and both end after the same step.
    preemption = Preemption()
    step = 0
    while not preemption.reached(step):
        step += 1
        if step == 5 and process == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert step < 2000
        time.sleep(0.02)
    preemption.close()
    (folder / f"stopped_{process}").write_text(str(step))
    multihost_utils.sync_global_devices("end")


def refusal(read):
    """The message of the UserError that a read ends with."""
    try:
        result = read()
    except UserError as error:
        return str(error)
    raise AssertionError(f"not refused: {result}")


def restored(directory, wanted):
    state, meta, messages = Checkpointer(directory, max_to_keep=3, async_save=True).restore_latest(wanted)
    return int(state["step"].addressable_data(0)), meta, len(messages)


def free_address(folder, process):
    """host:port that process 0 chooses and process 1 reads."""
    file = folder / "address"
    if process == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(f"127.0.0.1:{probe.getsockname()[1]}")
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.05)
    return file.read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
