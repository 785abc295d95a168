"""One job of two processes with four devices each: the run of one process with eight, and either goes on with both."""

import contextlib
import hashlib
import json
import re
import shutil
import signal
import time

import numpy as np
import pytest

from src.system.errors import UserError
from tests import runs

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def keys_of(folder, corpus, steps, **more):
    """The keys of a run that saves every other step and ends at `steps` of 6."""
    keys = {
        "base_output_directory": folder.parent,
        "run_name": folder.name,
        "dataset_path": corpus,
        "steps": steps,
        "learning_rate_schedule_steps": STEPS,
        "checkpoint_period": 2,
        "max_num_checkpoints_to_keep": -1,
        "eval_interval": 2,
    }
    return {**keys, **more}


def start_two(logs, keys):
    """Two processes of a job, each with its log and its keys."""
    address = runs.free_address()
    return [
        runs.start(log, devices=4, **own, coordinator_address=address, num_processes=2, process_id=process)
        for process, (log, own) in enumerate(zip(logs, keys, strict=True))
    ]


def run_on_two(folder, corpus, steps):
    """Runs up to `steps` as two processes; returns their outputs."""
    logs = [folder.parent / f"{steps}_{process}.log" for process in range(2)]
    processes = start_two(logs, 2 * [keys_of(folder, corpus, steps, per_device_batch_size=1, sample_length=8)])
    with runs.ended(*processes):
        return [runs.finish(process, log) for process, log in zip(processes, logs, strict=True)]


@pytest.fixture(scope="module")
def one(tmp_path_factory, corpus):
    """The folder of the run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    runs.run_here(**keys_of(folder, corpus, STEPS))
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory, corpus):
    """The folder of the run that had one process to step 2, then two to step 4, then one again; the outputs of two."""
    folder = tmp_path_factory.mktemp("both") / "run"
    runs.run_here(**keys_of(folder, corpus, 2))
    outputs = run_on_two(folder, corpus, 4)
    runs.run_here(**keys_of(folder, corpus, STEPS))
    return folder, outputs


def test_losses_are_those_of_one_process(both, one):
    folder, _ = both
    steps, losses = zip(*runs.losses(folder), strict=True)
    assert steps == tuple(range(1, STEPS + 1))
    np.testing.assert_allclose(losses, [loss for _, loss in runs.losses(one)], rtol=1e-5)
    steps, losses = zip(*runs.evaluations(folder), strict=True)
    assert steps == (2, 4, 6)
    np.testing.assert_allclose(losses, [loss for _, loss in runs.evaluations(one)], rtol=1e-5)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_examples_go_on_where_they_were(step, both, one):
    folder, _ = both
    expected = runs.saved_arrays(one, step)["data_position"]
    np.testing.assert_array_equal(runs.saved_arrays(folder, step)["data_position"], expected)
    assert expected.any()


def test_process_0_alone_speaks_and_writes(both):
    _, (first, second) = both
    assert "8 x cpu, processes: 2" in first
    assert "resumed from step 2" in first
    assert "\nstep " in first
    assert "\nstep " not in second
    assert "report" not in second
    assert "sample:" in first


@pytest.mark.long
def test_a_batch_that_grows_goes_on_with_the_same_rows(tmp_path, corpus):
    """Of 4 rows in two steps, of 8 in one and then of 12, in four shards, of which each process has two."""
    mesh, of_one = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, {"ici_data_parallelism": 2}
    sizes = {"per_device_batch_size": 1.5, "per_device_batch_size_start": 0.5, "per_device_batch_size_increment": 0.5}
    ramp = {"enable_rampup_batch_size": True, **sizes, "global_rampup_samples": 16, "eval_interval": -1, **mesh}
    ramp["checkpoint_period"] = 1
    whole, both = tmp_path / "whole" / "run", tmp_path / "both" / "run"
    runs.run_here(**keys_of(whole, corpus, STEPS, **ramp, **of_one))
    both.parent.mkdir()
    for steps in (2, 4):
        logs = [tmp_path / f"{steps}_{process}.log" for process in range(2)]
        processes = start_two(logs, 2 * [keys_of(both, corpus, steps, **ramp)])
        with runs.ended(*processes):
            outputs = [runs.finish(process, log) for process, log in zip(processes, logs, strict=True)]
    assert "resumed from step 2" in outputs[0]
    runs.run_here(**keys_of(both, corpus, STEPS, **ramp, **of_one))
    np.testing.assert_allclose(*(np.array(runs.losses(folder)) for folder in (both, whole)), rtol=1e-5)
    for step in range(1, STEPS + 1):
        positions = [runs.saved_arrays(folder, step)["data_position"] for folder in (both, whole)]
        np.testing.assert_array_equal(*positions)


def ends_of_two(folder, corpora):
    """The exit codes of two processes with data of their own, and what they wrote."""
    logs = [folder / f"{process}.log" for process in range(2)]
    keys = [keys_of(folder / "run", corpus, 10, per_device_batch_size=1, eval_interval=-1) for corpus in corpora]
    processes = start_two(logs, keys)
    with runs.ended(*processes):
        codes = [process.wait(timeout=100) for process in processes]
    return codes, [log.read_text() for log in logs]


@pytest.mark.long  # other data of the user's code: test_processes_with_other_code_of_the_user_s_are_told_so
def test_hosts_with_other_data_are_told_so(tmp_path, corpus):
    other = runs.write_corpus(tmp_path / "other", documents=30)
    codes, outputs = ends_of_two(tmp_path, [corpus, other])
    assert codes == [2, 2]
    for output in outputs:
        assert "process 1 reads different data or code from process 0" in output
        assert "source documents: 60 in process 0, 30 in process 1" in output


OWN_CODE = """
def documents(config, split):
    return [str(n) * 50 for n in range({first}, 40 + {first})]


def changed(batch):
    return batch
"""


def test_processes_with_other_code_of_the_user_s_are_told_so(tmp_path, monkeypatch):
    """The data would be as many documents of the same class, and the traced step is the same."""
    address, logs, processes = runs.free_address(), [tmp_path / "0.log", tmp_path / "1.log"], []
    keys = keys_of(tmp_path / "run", "", 2, eval_interval=-1, per_device_batch_size=1, dataset_type="custom")
    keys |= {"dataset_factory": "own_code:documents", "batch_transform": "own_code:changed"}
    with contextlib.ExitStack() as exits:
        for process, log in enumerate(logs):
            folder = tmp_path / f"code_{process}"
            folder.mkdir()
            (folder / "own_code.py").write_text(OWN_CODE.format(first=process))
            monkeypatch.setenv("PYTHONPATH", str(folder))
            own = {"coordinator_address": address, "num_processes": 2, "process_id": process}
            processes.append(runs.start(log, devices=4, **keys, **own))
            exits.enter_context(runs.ended(processes[-1]))
        assert [process.wait(timeout=100) for process in processes] == [2, 2]
    first, second = (
        hashlib.sha256((tmp_path / f"code_{process}" / "own_code.py").read_bytes()).hexdigest()[:8]
        for process in range(2)
    )
    for log in logs:
        output = log.read_text()
        assert "process 1 reads different data or code from process 0" in output
        for entry in ("source code own_code", "code batch_transform own_code"):
            assert f"  {entry}: {first} in process 0, {second} in process 1" in output
    assert not (tmp_path / "run").exists()


def test_processes_with_other_keys_or_code_are_told_so(tmp_path):
    """Before it is known who is wrong: a differing mesh has the others wait for ever, another rate says nothing."""
    copy = tmp_path / "copy"
    for name in ("src", "configs"):
        shutil.copytree(runs.ROOT / name, copy / name)  # with bytecode, which Python compares with the files' times
    shutil.copy(runs.ROOT / "pyproject.toml", copy)
    changed = copy / "src" / "step" / "optimizer.py"
    code = changed.read_text()
    assert code.count('"learning_rate": learning_rate(keys, steps, step)') == 1
    changed.write_text(code.replace("learning_rate(keys, steps, step)", "10 * learning_rate(keys, steps, step)"))

    logs = [tmp_path / f"{process}.log" for process in range(2)]
    other = {"learning_rate": 0.02, "ici_tensor_parallelism": 2, "jax_cache_dir": tmp_path, "root": copy}
    processes = start_two(logs, [{"dataset_type": "synthetic", "steps": 1, **more} for more in ({}, other)])
    with runs.ended(*processes):
        assert [process.wait(timeout=100) for process in processes] == [2, 2]
    here, there = (hashlib.sha256(text.encode()).hexdigest()[:8] for text in (code, changed.read_text()))
    for log in logs:
        output = log.read_text()
        assert "waiting for 2 processes at 127.0.0.1:" in output
        assert output.partition("different configurations, code or packages")[2].splitlines()[1:] == [
            "  learning_rate: 0.01 in process 0; 0.02 in process 1",
            "  ici_tensor_parallelism: 1 in process 0; 2 in process 1",
            f"  src/step/optimizer.py: {here} in process 0; {there} in process 1",
        ]


@pytest.mark.long  # whoever fails, tests/test_rendezvous.py tells it to all
def test_a_host_that_fails_alone_ends_all_and_says_why(tmp_path):
    """The first lines are whole, so that the run begins; process 1 alone comes to the one that is not."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"text": f"{n} " * 40}) for n in range(24)]
    lines[7] = "x" * len(lines[7])
    (folder / "lines.jsonl").write_text("\n".join(lines))
    codes, outputs = ends_of_two(tmp_path, [folder, folder])
    assert codes == [2, 2]
    last = [output.splitlines()[-1] for output in outputs]
    failed = [line for line in last if line.startswith("error: ")]
    assert failed
    assert all("lines.jsonl, line 8: not JSON" in line for line in last)
    assert all(
        line.startswith(("error: ", "process 0 of this job ended: ", "process 1 of this job ended: ")) for line in last
    )


MEASURE = """
import jax

def on_both(lines):
    raise ValueError("no such word")

def on_one(lines):
    if jax.process_index() == 1:
        raise ValueError("no such word")
    return {}
"""


@pytest.mark.long
@pytest.mark.parametrize("function", ["on_both", "on_one"])
def test_an_error_in_an_evaluation_of_all_processes_saves_and_of_one_ends_all(function, tmp_path, corpus, monkeypatch):
    """One process that fails alone can't save, and the others, which wait for it, learn why it ended."""
    (tmp_path / "my_measure.py").write_text(MEASURE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    logs = [tmp_path / f"{process}.log" for process in range(2)]
    keys = keys_of(tmp_path / "run", corpus, 10, per_device_batch_size=1, checkpoint_period=100, eval_interval=3)
    keys |= {"decode_metrics": f"my_measure:{function}", "decode_prompt_tokens": 3, "decode_num_prompts": 2}
    processes = start_two(logs, 2 * [{**keys, "sample_length": 3}])
    with runs.ended(*processes):
        assert [process.wait(timeout=150) for process in processes] == [2, 2]
    last = [log.read_text().splitlines()[-1] for log in logs]
    assert all("decode_metrics raised ValueError: no such word" in line for line in last)
    note = "the state after step 3 is saved in"
    assert [note in line for line in last] == [function == "on_both"] * 2
    saved = (tmp_path / "run" / "checkpoints").exists() and runs.steps_saved(tmp_path / "run")
    assert saved == ([3] if function == "on_both" else False)


def test_a_killed_process_ends_the_job_and_is_named(tmp_path):
    """In JAX's own words this takes 100 s and a stack trace of 40 lines."""
    logs = [tmp_path / f"{process}.log" for process in range(2)]
    keys = {"dataset_type": "synthetic", "steps": 1_000_000, "base_output_directory": tmp_path}
    processes = start_two(logs, 2 * [keys])
    with runs.ended(*processes):
        runs.wait_until(lambda: "processes: 2" in logs[0].read_text(), processes[0])  # the header: they have talked
        processes[1].kill()
        assert processes[0].wait(timeout=100) == 75
    assert logs[0].read_text().splitlines()[-1].startswith("process 1 of this job was killed, or its machine is lost")


@pytest.mark.long
def test_ctrl_c_in_one_process_has_all_save_and_end(tmp_path):
    logs = [tmp_path / f"{process}.log" for process in range(2)]
    keys = {"dataset_type": "synthetic", "steps": 1_000_000, "base_output_directory": tmp_path}
    processes = start_two(logs, 2 * [keys])
    with runs.ended(*processes):
        runs.wait_until(lambda: runs.last_step(tmp_path / "run") >= 1, processes[0])
        processes[1].send_signal(signal.SIGINT)
        assert [process.wait(timeout=200) for process in processes] == [143, 130]
    assert runs.steps_saved(tmp_path / "run") == [runs.last_step(tmp_path / "run")]


STREAMS = """
import grain
import jax

TEXTS = [f"text {n} " + "word " * (n * 7 % 50) for n in range(300)]


def own(config, split):
    return grain.MapDataset.source(TEXTS)[jax.process_index() :: jax.process_count()].to_iter_dataset()


def same(config, split):
    return grain.MapDataset.source(TEXTS).to_iter_dataset()
"""


@pytest.mark.long
def test_streams_of_two_processes_go_on_exactly_on_two_alone(tmp_path, monkeypatch):
    pytest.importorskip("grain", reason="bash setup.sh dev installs it")
    (tmp_path / "my_streams.py").write_text(STREAMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def job(name, steps, factory="own"):
        keys = keys_of(tmp_path / name, "", steps, eval_interval=-1, per_device_batch_size=1, dataset_type="custom")
        logs = [tmp_path / f"{name}_{steps}_{process}.log" for process in range(2)]
        return logs, start_two(logs, 2 * [{**keys, "dataset_factory": f"my_streams:{factory}"}])

    for name, steps in (("whole", 6), ("parts", 2), ("parts", 6)):
        logs, processes = job(name, steps)
        with runs.ended(*processes):
            outputs = [runs.finish(process, log) for process, log in zip(processes, logs, strict=True)]
        assert "a stream for each host, in its own order: a run can only resume with 2 hosts" in outputs[0]
    assert runs.losses(tmp_path / "parts") == runs.losses(tmp_path / "whole")
    logs, processes = job("same", 2, "same")
    with runs.ended(*processes):
        assert {process.wait(timeout=120) for process in processes} == {2}
    assert "the streams of two processes begin with the same documents" in logs[0].read_text()
    keys = keys_of(tmp_path / "whole", "", 8, eval_interval=-1, dataset_type="custom")
    with pytest.raises(UserError, match="the checkpoint is of 2 processes, and this job has 1"):
        runs.run_here(**keys, dataset_factory="my_streams:own")


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_job_with_a_sentence_unless_it_goes_on_soon(tmp_path, corpus, stopped):
    keys = keys_of(tmp_path / "run", corpus, 100_000, per_device_batch_size=1, eval_interval=-1)
    keys |= {"checkpoint_period": 100_000, "jax_distributed_heartbeat_timeout_seconds": 8}
    logs = [tmp_path / f"{process}.log" for process in range(2)]
    processes = start_two(logs, [keys, keys])
    with runs.ended(*processes):
        runs.wait_until(lambda: re.search(r"\nstep +\d+/", logs[0].read_text()), processes[0])
        for _ in range(2):
            processes[stopped].send_signal(signal.SIGSTOP)
            time.sleep(3)
            processes[stopped].send_signal(signal.SIGCONT)
        time.sleep(3)
        assert [process.poll() for process in processes] == [None, None]
        processes[stopped].send_signal(signal.SIGSTOP)
        assert processes[1 - stopped].wait(60) == 75
        processes[stopped].send_signal(signal.SIGCONT)
        assert processes[stopped].wait(60) == 75
    for log in logs:
        last = log.read_text().splitlines()[-1]
        assert last.startswith(f"process {stopped} of this job has not answered for 8 s")


HANGING = """
import os, time

class Hanging:
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        while os.path.exists(os.environ["HANG_FILE"]):
            time.sleep(1)
        return f"text {i} " * 20

def make(config, split):
    return Hanging()
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_whose_data_do_not_come_ends_when_it_is_asked_to(tmp_path, corpus, monkeypatch, count):
    (tmp_path / "my_hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    keys = keys_of(tmp_path / "run", corpus, 100_000, per_device_batch_size=1, eval_interval=-1)
    del keys["dataset_path"]
    keys |= {"dataset_type": "custom", "dataset_factory": "my_hanging:make", "checkpoint_period": 100_000}
    logs, address, processes = [tmp_path / f"{process}.log" for process in range(count)], runs.free_address(), []
    for process, log in enumerate(logs):
        monkeypatch.setenv("HANG_FILE", str(tmp_path / f"hang{process}"))
        job = {"coordinator_address": address, "num_processes": count, "process_id": process} if count > 1 else {}
        processes.append(runs.start(log, devices=4, **keys, **job))
    with runs.ended(*processes):
        runs.wait_until(lambda: re.search(r"\nstep +\d+/", logs[0].read_text()), processes[0])
        (tmp_path / f"hang{count - 1}").touch()  # of the last process alone
        time.sleep(20)  # until what was read ahead is used up
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [75] * count
    said = "asked to end, but no data has arrived for 15 s: the data reader hangs"
    assert said in logs[0].read_text().splitlines()[-1]
    steps = runs.steps_saved(tmp_path / "run") if (tmp_path / "run" / "checkpoints").exists() else []
    assert len(steps) == (count == 1)  # of several processes the others wait in a step, which no save can interrupt
