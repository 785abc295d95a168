"""`report_to`: what Weights & Biases and MLflow get, by stand-ins; end_to_end/trackers.sh has the real ones."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest

from src.checkpoint.run_folder import RunFolder
from src.config import load as configuration
from src.config.schema import Config
from src.extras import trackers
from src.extras.trackers import Tracking
from src.system.errors import TransientError, UserError
from tests import runs
from tests import trackers as stand_ins

BOTH = {"report_to": "[wandb,mlflow]"}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    return stand_ins.install(tmp_path, monkeypatch)


def expected(folder):
    """Step -> its scalars, of metrics.jsonl, whose lists this file's runs do not have."""
    steps = {}
    for line in runs.lines(folder):
        step = line.pop("step")
        named = {f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}": line[key] for key in line}
        steps.setdefault(step, {}).update(named)
    return list(steps.items())


def test_both_get_every_step_evaluation_and_sample_once_and_again_after_a_resume(tmp_path, calls, capsys):
    keys = {"base_output_directory": tmp_path, "eval_interval": 3, "eval_steps": 1, "checkpoint_period": 4, **BOTH}
    keys |= {"learning_rate_schedule_steps": 10}  # what another number of steps does not change
    runs.run_here(**keys, steps=6, sample_length=4)
    folder = tmp_path / "run"
    first = expected(folder)
    assert [step for step, _ in first] == [1, 2, 3, 4, 5, 6]
    assert {"eval/loss", "train/loss", "train/tokens_per_second"} <= first[2][1].keys()
    assert stand_ins.sent(calls) == {"wandb": first, "mlflow": first}
    ((_, init),) = stand_ins.calls_of(calls, "init")
    assert (init["id"], init["name"], init["config"]["steps"], init["dir"]) == (None, "run", 6, str(folder))
    assert init["config"]["logical_axis_rules"]["mlp"] == ["tensor"]
    assert init["settings"] == {"console": "off", "silent": True, "init_timeout": 20, "finish_timeout": 15}
    assert stand_ins.calls_of(calls, "start_run") == [([], {"run_name": "run"})]
    batches = stand_ins.calls_of(calls, "MlflowClient.log_batch")
    params = dict(param for _, kwargs in batches for param in kwargs.get("params", ()))
    assert (params["steps"], params["learning_rate"], params["prompt"]) == ("6", "0.01", init["config"]["prompt"])
    assert max(len(kwargs.get("params", ())) for _, kwargs in batches) == 100
    sample = (folder / "sample.txt").read_text()
    assert stand_ins.calls_of(calls, "summary") == [(["sample", sample], {})]
    assert stand_ins.calls_of(calls, "MlflowClient.set_tag") == [(["id1", "sample", sample], {})]
    assert stand_ins.calls_of(calls, "Run.finish") == [([], {"exit_code": 0})]
    assert stand_ins.calls_of(calls, "end_run") == [(["FINISHED"], {})]
    assert "wandb: https://wandb.test/run" in capsys.readouterr().out

    shutil.rmtree(folder / "checkpoints" / "6")  # as after a kill: it goes back to step 4
    runs.run_here(**keys, steps=8)
    assert "resumed from step 4" in capsys.readouterr().out
    whole = first + expected(folder)[6:]
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stand_ins.sent(calls) == {"wandb": whole, "mlflow": whole}
    assert [kwargs["id"] for _, kwargs in stand_ins.calls_of(calls, "init")] == [None, "id1"]
    assert stand_ins.calls_of(calls, "init")[1][1]["resume"] == "allow"
    assert stand_ins.calls_of(calls, "start_run")[1] == ([], {"run_id": "id1"})
    tags = [tag for _, kwargs in stand_ins.calls_of(calls, "MlflowClient.log_batch") for tag in kwargs.get("tags", ())]
    assert ["steps", "8"] in tags  # a parameter of MLflow cannot change

    shutil.rmtree(folder / "checkpoints")  # nothing to go on from: another run
    runs.run_here(**keys, steps=2)
    assert stand_ins.sent(calls)["wandb"][8:] == expected(folder)
    assert stand_ins.calls_of(calls, "init")[2][1]["id"] is None
    saved = json.loads((folder / "wandb.json").read_text())
    assert (saved["id"], saved["step"], saved["since"]) == ("id3", 2, 0)
    assert stand_ins.calls_of(calls, "start_run")[2] == ([], {"run_name": "run"})


@pytest.mark.parametrize(
    ("package", "functions"),
    [("wandb", ("setup", "init", "Run.")), ("mlflow", ("start_run", "end_run", "MlflowClient."))],
)
def test_the_calls_fit_the_installed_packages(package, functions, tmp_path, calls):
    """By their signatures, in a process without the stand-ins."""
    try:
        metadata.version("wandb" if package == "wandb" else "mlflow-skinny")
    except metadata.PackageNotFoundError:
        pytest.skip("bash setup.sh trackers installs it")
    runs.run_here(base_output_directory=tmp_path, steps=2, sample_length=2, **BOTH)
    script = f"""
import functools, inspect, json, sys, {package} as package
for name, args, kwargs in map(json.loads, open(sys.argv[1])):
    if name.startswith({functions!r}):
        function = functools.reduce(getattr, name.split("."), package)
        inspect.signature(function).bind(*([None] if "." in name else []), *args, **kwargs)
        if "settings" in kwargs:
            package.Settings(**kwargs["settings"])
        print(name)
if package.__name__ == "mlflow":
    from mlflow.entities import Metric, Param, RunData, RunTag
    for entity, count in ((Metric, 4), (Param, 2), (RunTag, 2)):
        inspect.signature(entity).bind(*range(count))
    assert RunData([Metric("a", 1.0, 2, 3)]).to_proto().metrics[0].step == 3
else:
    assert all(hasattr(package.Run, name) for name in ("offline", "url", "dir", "id", "starting_step"))
"""
    done = subprocess.run([sys.executable, "-c", script, calls], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) >= 4


def followed(folder, lines=(), resume_step=None, error=None, stopped_by=0, names=("wandb", "mlflow"), **keys):
    """Tracks a run with these lines of metrics.jsonl, which ends as told."""
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "config.yml").write_text(configuration.to_yaml(Config.of({"run_name": "run", **keys})))
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    with Tracking(names) as tracking:
        tracking.start(RunFolder(str(folder), "run"), resume_step)
        tracking.stopped_by = stopped_by
        if error:
            raise error


def line(step, **more):
    return {"step": step, "loss": 1 / step, "learning_rate": 0.1, **more}


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ({}, 0, "FINISHED"),
        ({"stopped_by": signal.SIGTERM}, 143, "KILLED"),
        ({"error": KeyboardInterrupt()}, 130, "KILLED"),
        ({"error": UserError("a mistake")}, 2, "FAILED"),
        ({"error": TransientError("a store")}, 75, "FAILED"),
        ({"error": ValueError("a fault")}, 1, "FAILED"),
    ],
)
def test_it_is_closed_with_the_status_of_the_run(ending, code, status, tmp_path, calls):
    error = ending.get("error")
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        followed(tmp_path, [line(1), {"step": 1, "eval_loss": 2.0}, line(2)], **ending)
    assert stand_ins.calls_of(calls, "Run.finish") == [([], {"exit_code": code})]
    assert stand_ins.calls_of(calls, "end_run") == [([status], {})]
    # An error may have come before the step's evaluation: then the resumed run sends that step.
    steps = [1] if error else [1, 2]
    assert [step for step, _ in stand_ins.sent(calls)["wandb"]] == steps
    assert stand_ins.sent(calls)["wandb"] == stand_ins.sent(calls)["mlflow"]
    followed(tmp_path, [{"step": 2, "eval_loss": 3.0}] * bool(error), resume_step=2)
    assert [step for step, _ in stand_ins.sent(calls)["mlflow"]] == [1, 2]
    if error:
        assert stand_ins.sent(calls)["wandb"][1][1]["eval/loss"] == 3.0


def test_a_file_that_is_replaced_in_mid_run_is_opened_again(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.1)
    followed(tmp_path, [line(1)], names=())
    metrics = tmp_path / "run" / "metrics.jsonl"
    with Tracking(["wandb"]) as tracking:
        tracking.start(RunFolder(str(tmp_path), "run"), None)
        while not stand_ins.sent(calls).get("wandb"):
            with metrics.open("a") as file:
                file.write(json.dumps(line(2)) + "\n")
            time.sleep(0.1)
        metrics.rename(tmp_path / "old")
        metrics.write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3, 4)))
    assert [step for step, _ in stand_ins.sent(calls)["wandb"]] == [1, 2, 3, 4]
    assert "metrics.jsonl was deleted or replaced" in capsys.readouterr().out


def test_lists_nulls_and_odd_lines(tmp_path, calls):
    odd = line(1, expert_load_max=[1.0, None, 3.0], grad_norm=None, **{"a%b": 2.0})
    followed(tmp_path, [odd, {"step": "x"}, [1], line(2)])
    (_, first), (_, second) = stand_ins.sent(calls)["wandb"]
    load = {"train/expert_load_max/min": 1.0, "train/expert_load_max/mean": 2.0, "train/expert_load_max/max": 3.0}
    assert first == {"train/loss": 1.0, "train/learning_rate": 0.1, "train/a%b": 2.0, **load}
    assert second == {"train/loss": 0.5, "train/learning_rate": 0.1}
    assert stand_ins.sent(calls)["mlflow"][0][1].keys() == (first.keys() - {"train/a%b"}) | {"train/a_b"}


def test_a_run_that_was_not_tracked_before_is_sent_whole(tmp_path, calls):
    followed(tmp_path, [line(1), line(2)], names=())
    followed(tmp_path, [line(3)], resume_step=2)
    assert [step for step, _ in stand_ins.sent(calls)["wandb"]] == [1, 2, 3]
    assert stand_ins.calls_of(calls, "init")[0][1]["id"] is None


@pytest.mark.parametrize("function", ["init", "Run.log", "start_run", "MlflowClient.log_batch", "end_run"])
def test_one_that_is_down_is_said_once_and_the_run_goes_on(function, tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    monkeypatch.setenv("FAILS", function)
    result = runs.run_here(base_output_directory=tmp_path, steps=3, checkpoint_period=3, **BOTH)
    assert result.metrics["step"] == 3
    printed = capsys.readouterr().out
    name, other = ("wandb", "mlflow") if function in ("init", "Run.log") else ("mlflow", "wandb")
    message = f"{name} failed, and the run continues without it: OSError: {function} is out of reach. metrics.jsonl has"
    assert printed.count(message) == 1
    assert f"{other} failed" not in printed
    assert stand_ins.sent(calls)[other] == expected(tmp_path / "run")


def test_one_that_comes_back_gets_what_it_missed(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    monkeypatch.setenv("FAILS", "start_run")
    monkeypatch.setenv("TIMES", "2")
    with Tracking(("mlflow",)) as tracking:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yml").write_text("steps: 5\n")
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2)))
        tracking.start(RunFolder(str(tmp_path), "run"), None)
        tracking._followers[0].join(0.5)
    assert [step for step, _ in stand_ins.sent(calls, "id3")["mlflow"]] == [1, 2]
    assert capsys.readouterr().out.count("mlflow failed") == 1


@pytest.mark.parametrize("is_lost", [False, True])  # with W&B's own process, as after it was killed
def test_steps_that_wandb_did_not_take_come_again(is_lost, tmp_path, calls, monkeypatch):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    import wandb

    log, finish, steps, ends = wandb.Run.log, wandb.Run.finish, [], []

    def failing(run, values, step):
        steps.append(step)
        if steps == [1, 2]:
            raise OSError("gone")
        log(run, values, step=step)

    def lost(run, **kwargs):
        ends.append(kwargs)
        if is_lost and len(ends) == 1:
            raise OSError("gone")
        finish(run, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", failing)
    monkeypatch.setattr(wandb.Run, "finish", lost)
    followed(tmp_path, [line(step) for step in (1, 2, 3)], names=("wandb",))
    assert stand_ins.sent(calls)["wandb"] == expected(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["step"] == 3
    assert [kwargs["id"] for _, kwargs in stand_ins.calls_of(calls, "init")] == [None, "id1"]
    assert ends == [{}, {"exit_code": 0}]
    assert len(stand_ins.calls_of(calls, "teardown")) == is_lost


@pytest.mark.parametrize("order", [("loss", "grad_norm", "learning_rate"), ("learning_rate", "loss", "grad_norm")])
@pytest.mark.parametrize("there", [0, 1, 2, 3, 200])
def test_what_mlflow_did_not_take_of_a_batch_comes_again_once(there, order, tmp_path, calls, monkeypatch):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    import mlflow

    log_batch, tries = mlflow.MlflowClient.log_batch, []

    def failing(client, *args, **kwargs):
        if "metrics" in kwargs:
            tries.append(len(kwargs["metrics"]))
            if len(tries) == 2:  # a part of it is there, as in a folder
                log_batch(client, *args, metrics=kwargs["metrics"][:there])
                raise OSError("502")
        log_batch(client, *args, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", failing)
    lines = [{"step": step, **dict.fromkeys(order, step / 8)} for step in range(1, 401)]
    followed(tmp_path, lines, names=("mlflow",))
    assert stand_ins.sent(calls)["mlflow"] == expected(tmp_path / "run")  # which refuses what came twice
    assert tries == [1000, 200, 200 - there][: 2 if there == 200 else 3]


def test_a_step_with_more_metrics_than_mlflow_takes_at_once_is_sent_in_parts(tmp_path, calls):
    followed(tmp_path, [line(1, **{f"m{n}": n for n in range(2500)}), line(2)], names=("mlflow",))
    assert stand_ins.sent(calls)["mlflow"] == expected(tmp_path / "run")
    counts = [len(kwargs.get("metrics", ())) for _, kwargs in stand_ins.calls_of(calls, "MlflowClient.log_batch")]
    assert [count for count in counts if count] == [1000, 1000, 504]


def cut_back(folder, step):
    """Leaves the lines up to a step, as a resumed run does."""
    path = folder / "run" / "metrics.jsonl"
    kept = [each for each in path.read_text().splitlines() if json.loads(each)["step"] <= step]
    path.write_text("".join(f"{each}\n" for each in kept))


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ({}, False),
        ({"learning_rate": 0.5}, True),
        ({"steps": 7}, True),  # the length of the schedule
        ({"gradient_accumulation_steps": 2}, True),
        ({"per_device_batch_size": 6.0, "gradient_accumulation_steps": 2}, False),  # as many rows
        ({"remat_policy": "none", "log_period": 10}, False),
    ],
)
def test_steps_made_again_with_other_settings_are_another_tracked_run(changed, is_another, tmp_path, calls, capsys):
    followed(tmp_path, [line(step) for step in (1, 2, 3, 4)])
    cut_back(tmp_path, 2)
    followed(tmp_path, [line(step, grad_norm=9.0) for step in (3, 4, 5)], resume_step=2, **changed)
    steps, run = ([1, 2, 3, 4, 5], "id2") if is_another else ([5], "id1")
    sent = stand_ins.sent(calls, run)
    assert sent["wandb"][4:] == expected(tmp_path / "run")[-len(steps) :]
    assert sent["mlflow"][-len(steps) :] == expected(tmp_path / "run")[-len(steps) :]
    assert capsys.readouterr().out.count("run has steps after 2 with other settings") == 2 * is_another
    assert stand_ins.calls_of(calls, "init")[1][1]["id"] == (None if is_another else "id1")


def test_settings_changed_where_nothing_is_made_again_go_on_in_the_tracked_run_until_it_goes_behind(tmp_path, calls):
    followed(tmp_path, [line(step) for step in (1, 2, 3)])
    followed(tmp_path, [line(4)], resume_step=3, learning_rate=0.5)
    cut_back(tmp_path, 3)
    followed(tmp_path, [line(4), line(5)], resume_step=3, learning_rate=0.5)
    assert [step for step, _ in stand_ins.sent(calls)["mlflow"]] == [1, 2, 3, 4, 5]
    cut_back(tmp_path, 1)  # steps 2 and 3 there are of the first settings
    followed(tmp_path, [line(2), line(3)], resume_step=1, learning_rate=0.5)
    assert [kwargs["id"] for _, kwargs in stand_ins.calls_of(calls, "init")] == [None, "id1", "id1", None]


def test_another_count_of_rows_by_the_devices_is_another_way_to_train(tmp_path, calls, monkeypatch):
    followed(tmp_path, [line(1), line(2)], names=("mlflow",))
    monkeypatch.setattr(trackers.jax, "device_count", lambda: 3)
    followed(tmp_path, [line(2)], resume_step=1, names=("mlflow",))
    assert len(stand_ins.sent(calls, "id2")["mlflow"]) == 2


@pytest.mark.parametrize(("text", "sample_length", "is_sent"), [("3", 8, True), ("2", 8, False), ("3", 0, False)])
def test_a_sample_of_an_earlier_start_is_not_sent(text, sample_length, is_sent, tmp_path, calls):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sample.txt").write_text(f"after step {text}\ndef f\n")
    followed(tmp_path, [line(step) for step in (1, 2, 3)], sample_length=sample_length)
    sample = f"after step {text}\ndef f\n"
    assert stand_ins.calls_of(calls, "summary") == [(["sample", sample], {})] * is_sent
    assert stand_ins.calls_of(calls, "MlflowClient.set_tag") == [(["id1", "sample", sample], {})] * is_sent


def test_an_mlflow_tag_goes_back_with_its_key(tmp_path, calls):
    for done, steps in enumerate((6, 8, 6, 6)):
        followed(tmp_path, [line(done + 1)], resume_step=done or None, names=("mlflow",), steps=steps)
    batches = [kwargs.get("tags", ()) for _, kwargs in stand_ins.calls_of(calls, "MlflowClient.log_batch")]
    assert [list(batch) for batch in batches if batch] == [[["steps", "8"]], [["steps", "6"]]]


def test_more_changed_keys_than_mlflow_takes_at_once_are_all_tags(tmp_path, calls, monkeypatch):
    names = [f"key_{n}" for n in range(250)]
    for value in (1, 2):
        monkeypatch.setattr(trackers, "from_yaml", lambda text, value=value: dict.fromkeys(names, value))
        followed(tmp_path, [line(value)], resume_step=value - 1 or None, names=("mlflow",))
    batches = [kwargs.get("tags", ()) for _, kwargs in stand_ins.calls_of(calls, "MlflowClient.log_batch")]
    assert [len(batch) for batch in batches if batch] == [100, 100, 50]
    assert dict(tag for batch in batches for tag in batch) == dict.fromkeys(names, "2")


@pytest.mark.parametrize("function", ["init", "Run.log", "Run.finish"])
def test_one_that_hangs_is_waited_for_a_while_at_the_end_alone(function, tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "END_SECONDS", 0.3)
    monkeypatch.setenv("HANGS", function)
    followed(tmp_path, [line(1)])
    assert "wandb did not receive everything within 0.3 s; metrics.jsonl has it" in capsys.readouterr().out
    assert [step for step, _ in stand_ins.sent(calls)["mlflow"]] == [1]


def test_what_is_missing_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    keys = {"base_output_directory": tmp_path / "out", "steps": 2}
    for name in ("wandb", "mlflow"):
        message = runs.refusal(monkeypatch, capsys, runs.arguments(**keys, report_to=f"[{name}]"))
        assert f"report_to={name} needs a package that is not installed: bash setup.sh trackers" in message
    monkeypatch.undo()
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)  # what an offline run leaves is no package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"setup\.sh trackers"):
        Tracking(("wandb",))
    assert not (tmp_path / "out").exists()


def test_mlflow_needs_an_address(calls, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI, such as http://HOST:5000"):
        Tracking(("mlflow",))


@pytest.mark.parametrize("value", ["wandb", "[tensorboard]", "[wandb,wandb.ai]", "[[wandb]]", "[1]", "[null]", "{}"])
def test_other_values_are_refused(value, monkeypatch, capsys):
    message = runs.refusal(monkeypatch, capsys, runs.arguments(report_to=value))
    assert "report_to" in message
    assert "[wandb]" in message or "wandb, mlflow" in message
