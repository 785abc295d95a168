"""A step that hangs is written about by each process, and nothing else is taken for one."""

import re
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from src.checkpoint.run_folder import RunFolder
from src.config.command_keys import Diagnostics
from src.run import diagnostics as module
from src.run.diagnostics import TIMED_STEPS, Watchdog
from src.run.evaluator import Evaluator
from tests import runs

POSITIONS = np.array([[[3, 17], [0, 5]], [[4, 0], [9, 9]]], np.int32)
# After step 16 the thread that makes batches waits: until the file has its stack, or in process 1 for minutes.
DATA = """
import pathlib, time
import jax

folder, begun = pathlib.Path({folder!r}), []

def written():
    return any("Device memory" in file.read_text() for file in folder.glob("hang-*"))

def a_source_that_blocks(rows):
    metrics = folder / "metrics.jsonl"
    if jax.process_index() == {process} and not begun and metrics.exists() and '{{"step": 16,' in metrics.read_text():
        begun.append(time.monotonic())
        while ({process} or not written()) and time.monotonic() < begun[0] + 120:
            time.sleep(0.01)
    return rows
"""


@pytest.mark.usefixtures("steps_built_once")
def test_a_hang_is_written_about_once_and_slow_evaluations_and_saves_are_none(tmp_path, monkeypatch, write, capsys):
    folder = tmp_path / "run"
    write("data_that_blocks.py", DATA.format(process=0, folder=str(folder)))
    monkeypatch.syspath_prepend(tmp_path)
    evaluate = Evaluator.run
    monkeypatch.setattr(Evaluator, "run", lambda *arguments: time.sleep(1) or evaluate(*arguments))
    runs.run_here(
        base_output_directory=tmp_path, dataset_path=runs.write_corpus(tmp_path / "corpus"), steps=30,
        batch_transform="data_that_blocks:a_source_that_blocks", hang_after_steps=2, hang_after_seconds=0.5,
        eval_interval=14, eval_steps=1, checkpoint_period=14,
    )  # fmt: skip
    (file,) = folder.glob("hang-*.txt")
    assert file.name.endswith("-process-0.txt")
    text = file.read_text()
    ended, dispatched = map(int, re.search(r"^Step (\d+) has ended, step (\d+) was dispatched;", text, re.M).groups())
    assert 16 < dispatched == ended + 1 < 30
    assert "a_source_that_blocks" in text, "the thread that makes batches"
    assert re.search(r"in train$", text, re.MULTILINE), "the main thread"
    assert f"The run has taken {dispatched * runs.GLOBAL_BATCH} rows" in text
    assert len(re.findall(r"^  row \d: document \d+, token \d+$", text, re.MULTILINE)) == runs.GLOBAL_BATCH
    assert text.partition("Device memory")[2].count("not reported") == 8, "which CPUs do not"
    output = capsys.readouterr().out
    begins, ends = [line for line in output.splitlines() if re.match(r"process 0: no|step \d+ ended", line)]
    assert re.fullmatch(rf"process 0: no step has ended for \d+ s: stacks, .* are in {re.escape(str(file))}", begins)
    assert re.fullmatch(rf"step {dispatched} ended after \d+ s: it was slow, not a hang", ends)


@pytest.mark.long
def test_each_process_of_a_job_writes_its_own_and_all_end(tmp_path, monkeypatch, write):
    """In process 1 the data hang, so process 0 waits for it in a collective: no Python code of its own runs there."""
    folder = tmp_path / "run"
    write("data_that_blocks.py", DATA.format(process=1, folder=str(folder)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    keys = {
        "base_output_directory": tmp_path, "steps": 40, "batch_transform": "data_that_blocks:a_source_that_blocks",
        "hang_after_seconds": 2, "hang_action": "exit", "num_processes": 2, "coordinator_address": runs.free_address(),
        "per_device_batch_size": 4, "enable_checkpointing": "false",
    }  # fmt: skip
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    processes = [runs.start(log, **keys, process_id=process) for process, log in enumerate(logs)]
    with runs.ended(*processes):
        outputs = [runs.finish(process, log, code=75) for process, log in zip(processes, logs, strict=True)]
    for process, output in enumerate(outputs):
        (file,) = folder.glob(f"hang-*-process-{process}.txt")
        assert f"process {process}: no step has ended for" in output
        assert str(file) in output
        assert ("a_source_that_blocks" in file.read_text()) == (process == 1)
    assert any("hang_action=exit: run the same command to resume" in output for output in outputs)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """(a watchdog for steps of up to 0.2 s, how it ended the process, what lists the files it wrote)."""
    ends = []
    monkeypatch.setattr(module, "end", lambda *arguments, at_once: ends.append(arguments))
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.5)

    def make(action="log"):
        keys = Diagnostics(hang_after_steps=1, hang_after_seconds=0.2, hang_action=action)
        return Watchdog(keys, RunFolder(str(tmp_path), "run"), range(2), ["web", "code"])

    return make, ends, lambda: list((tmp_path / "run").glob("hang-*"))


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come within a minute")


def step_often(watchdog, first=1, last=TIMED_STEPS):
    for step in range(first, last + 1):
        watchdog.step(step, 2 * step, POSITIONS)


def test_the_first_steps_are_not_watched(watched):
    make, _, files = watched
    with make() as watchdog:
        step_often(watchdog)
        time.sleep(0.6)
        assert not files()
        watchdog.step(TIMED_STEPS + 1, 22, POSITIONS)
        wait_for(files)
    wait_for(lambda: "Device memory" in files()[0].read_text())
    text = files()[0].read_text()
    assert "  row 0: web document 3, token 17; code document 0, token 5\n" in text
    assert "  row 1: web document 4, token 0; code document 9, token 9\n" in text


def test_a_pause_is_no_hang_and_what_comes_after_it_is_watched(watched):
    make, _, files = watched
    with make() as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        watchdog.pause()
        time.sleep(0.6)
        assert not files()
        watchdog.resume()
        wait_for(files)


def test_a_hang_ends_the_process_if_that_is_asked_for(watched):
    make, ends, files = watched
    with make("exit") as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        wait_for(lambda: ends)
    assert len(files()) == 1
    ((code, message),) = ends
    assert code == 75
    assert message == "error: a hang, and hang_action=exit: run the same command to resume"


def test_steps_with_a_save_after_each_are_watched_too(watched):
    make, _, files = watched
    with make() as watchdog:
        for step in range(1, TIMED_STEPS + 2):
            watchdog.step(step, 2 * step, POSITIONS)
            watchdog.pause()  # as checkpoint_period=1 and eval_interval=1 have it
            watchdog.resume()
        wait_for(files)


class FailedDevice:
    """A device whose runtime fails, or with `blocks` never answers."""

    def __init__(self, blocks):
        self.blocks = blocks

    def memory_stats(self):
        if self.blocks:
            threading.Event().wait()
        raise jax.errors.JaxRuntimeError("INTERNAL: device failed")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_hang_ends_the_process_though_its_devices_do_not_answer(watched, monkeypatch, blocks):
    make, ends, files = watched
    monkeypatch.setattr(jax, "local_devices", lambda: [FailedDevice(blocks), SimpleNamespace(memory_stats=dict)])
    with make("exit") as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        wait_for(lambda: ends)
    assert [code for code, _ in ends] == [75]
    if not blocks:
        _, lines = files()[0].read_text().split("Device memory\n")
        assert re.search("JaxRuntimeError: INTERNAL: device failed\n.*not reported", lines)


def test_a_folder_that_cannot_be_written_is_said_and_the_stacks_are_on_the_console(watched, tmp_path, capfd):
    make, ends, _ = watched
    (tmp_path / "run").write_text("a file")
    with make("exit") as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        wait_for(lambda: ends)  # all is written then
    said = "".join(capfd.readouterr())
    assert re.search("cannot be written: .*File exists", said)
    assert "Thread" in said
    assert "row 1: web document 4" in said


def test_a_remote_folder_gets_the_file_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_remote", lambda path: True)
    store, local = tmp_path / "store", tmp_path / "local"
    store.mkdir()
    keys = Diagnostics(hang_after_steps=1, hang_after_seconds=0.1)
    with Watchdog(keys, SimpleNamespace(path=store, local=local), range(2), ["web", "code"]) as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        wait_for(lambda: list(store.iterdir()) and "Device memory" in next(store.iterdir()).read_text())


def test_no_thread_watches_where_it_is_switched_off(tmp_path):
    keys, before = Diagnostics(hang_after_steps=0, hang_after_seconds=0.1), set(threading.enumerate())
    with Watchdog(keys, RunFolder(str(tmp_path), "run"), range(2), ["web", "code"]) as watchdog:
        step_often(watchdog, last=TIMED_STEPS + 1)
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "watchdog"]
