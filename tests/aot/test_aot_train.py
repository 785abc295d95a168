"""Runs whose step is loaded from a file: the runs that compile it, bit for bit."""

import sys

import jax
import numpy as np
import pytest

from src.run.resolve_config import load
from src.run.run_setup import configure_jax
from src.step.trace import trace_train_step
from tests import runs
from tests.aot.save_step import save

STEPS = 6
# Off: a compiled step that is kept between runs would make every test of loading one pass.
NO_CACHE = {"jax_cache_dir": ""}
# With names that Python puts into another order in each process.
MODEL = {"remat_policy": "minimal", "base_num_decoder_layers": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def start_saving(module, log, devices=8, **keys):
    """Starts a process that compiles the step of a run and saves it."""
    command = [sys.executable, "-m", module, *runs.arguments(devices, **MODEL, **keys)]
    return runs.start_command(command, log, devices)


# ---- Processes of their own; tests/step/test_user_loss.py has two of the quick ones


RAMP = {"enable_rampup_batch_size": True, "per_device_batch_size_start": 1, "per_device_batch_size_increment": 1}
RAMP |= {"global_rampup_samples": 16, "per_device_batch_size": 2}  # two steps of 8 rows, then of 16


@pytest.mark.long
@pytest.mark.parametrize("ramp", [{}, RAMP], ids=["", "ramp"])
def test_a_run_that_loads_its_step_is_the_run_that_compiles_it(tmp_path, corpus, ramp):
    file, logs = tmp_path / "step", [tmp_path / f"{name}.log" for name in ("saving", "compiled", "loaded")]
    keys = {**MODEL, **NO_CACHE, **ramp, "dataset_path": corpus, "steps": STEPS, "eval_interval": 3}
    compiling = {**keys, "base_output_directory": tmp_path / "compiled"}
    aot = {"compile_topology": "cpu-8", "compiled_trainstep_file": file, **ramp}
    saving = start_saving("src.train_compile", logs[0], **aot)
    compiled = runs.start(logs[1], devices=8, **compiling)
    with runs.ended(saving, compiled):
        assert ("the full batch; src.train also compiles a step for each" in runs.finish(saving, logs[0])) == bool(ramp)
        output = runs.finish(compiled, logs[1])
    assert "compiled by this run" in output

    loading = {**keys, "base_output_directory": tmp_path / "loaded", "compiled_trainstep_file": file}
    output = runs.finish(runs.start(logs[2], devices=8, **loading), logs[2])
    assert f"loaded from {file}" in output

    folders = [tmp_path / name / "run" for name in ("compiled", "loaded")]
    expected, found = map(runs.losses, folders)
    assert len(expected) == STEPS
    assert found == expected
    assert runs.evaluations(folders[1]) == runs.evaluations(folders[0])
    arrays = [runs.bits(runs.saved_arrays(folder, STEPS)) for folder in folders]
    assert arrays[1] == arrays[0]


@pytest.mark.long
def test_each_process_of_a_job_loads_the_file(tmp_path, corpus):
    file, keys = tmp_path / "step", {**MODEL, "dataset_path": corpus, "steps": 3}

    def on_two(start, name):
        """Runs two processes of four devices each; returns what they printed."""
        job = {"coordinator_address": runs.free_address(), "num_processes": 2, "per_device_batch_size": 1}
        logs = [tmp_path / f"{name}{process}.log" for process in range(2)]
        processes = [start(log=log, devices=4, **job, process_id=process) for process, log in enumerate(logs)]
        with runs.ended(*processes):
            return [runs.finish(process, log) for process, log in zip(processes, logs, strict=True)]

    step = {"compiled_trainstep_file": file}
    on_two(lambda log, **job: start_saving("tests.aot.save_step", log, **step, **job), "saving")
    loading = {**keys, **step, "base_output_directory": tmp_path / "loaded"}
    outputs = on_two(lambda log, **job: runs.start(log, **{**loading, **job}), "loaded")
    assert f"loaded from {file}" in outputs[0]
    runs.run_here(**keys, base_output_directory=tmp_path / "one")
    steps, losses = zip(*runs.losses(tmp_path / "loaded" / "run"), strict=True)
    assert steps == (1, 2, 3)
    np.testing.assert_allclose(losses, [loss for _, loss in runs.losses(tmp_path / "one" / "run")], rtol=1e-5)


# ---- In this process


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus):
    """A file of the step that runs here compile."""
    path = tmp_path_factory.mktemp("saved") / "step"
    config = load(runs.arguments(**MODEL, dataset_path=corpus, compiled_trainstep_file=path))
    configure_jax(config.step)
    save(config, trace_train_step(config, jax.devices()))
    return path


def test_what_enters_at_run_time_may_change(tmp_path, corpus, saved):
    keys = {**MODEL, "dataset_path": corpus, "enable_checkpointing": "false"}
    changed = {
        "steps": 5,
        "learning_rate": 3e-2,
        "lr_schedule_type": "wsd",
        "warmup_steps_fraction": 0.5,
        "adam_b1": 0.5,
        "adam_b2": 0.6,
        "adam_eps": 1e-2,
        "adam_weight_decay": 0.5,
        "gradient_clipping_threshold": 0.1,
    }
    for name, more in (("compiled", {}), ("loaded", {"compiled_trainstep_file": saved})):
        runs.run_here(**keys, **changed, **more, base_output_directory=tmp_path / name)
    assert runs.losses(tmp_path / "loaded" / "run") == runs.losses(tmp_path / "compiled" / "run")
    assert len(runs.losses(tmp_path / "loaded" / "run")) == 5


def test_a_topology_to_compile_for_is_not_what_a_run_is_on(tmp_path, corpus, capsys):
    keys = {**MODEL, "dataset_path": corpus, "enable_checkpointing": "false", "steps": 1}
    runs.run_here(**keys, base_output_directory=tmp_path, compile_topology="v5e-4")
    said = (
        "compile_topology=v5e-4 (on the command line) has no effect: it is for src.train_compile, and this is src.train"
    )
    assert said in capsys.readouterr().out


def test_a_run_goes_on_with_or_without_the_file(tmp_path, corpus, saved):
    keys = {**MODEL, "dataset_path": corpus, "learning_rate_schedule_steps": 9}
    runs.run_here(**keys, base_output_directory=tmp_path / "whole", steps=9)
    for steps, more in ((3, {}), (6, {"compiled_trainstep_file": saved}), (9, {})):
        runs.run_here(**keys, **more, base_output_directory=tmp_path / "parts", steps=steps)
    assert runs.losses(tmp_path / "parts" / "run") == runs.losses(tmp_path / "whole" / "run")


def test_another_run_than_it_was_compiled_for_is_refused(tmp_path, corpus, saved, monkeypatch, capsys):
    keys = {**MODEL, "dataset_path": corpus, "base_output_directory": tmp_path, "compiled_trainstep_file": saved}
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**{**keys, "per_device_batch_size": 2, "vocab_size": 300}))
    assert f"compiled_trainstep_file={saved} was compiled for a different run" in said
    assert "\n  per_device_batch_size: 1.0 in the file, 2.0 here\n" in said
    assert "\n  vocab_size: 258 in the file, 300 here\n" in said
    assert "\n  batch.targets: int32[8, 64] sharded ('fsdp', None) in the file, int32[16, 64] " in said
    assert not (tmp_path / "run").exists()
