"""What surrounds the steps of a run: no failure of an evaluation, of data or of a user's code loses what is trained."""

import json
import signal
import sys
from typing import ClassVar

import pytest

from src.checkpoint.run_folder import RunFolder
from src.run.evaluator import Evaluator
from src.run.metrics import MetricsLog
from src.run.preemption import Preemption
from src.system.errors import UserError
from tests import runs

STEPS = 8
KEYS = {"steps": STEPS, "eval_interval": 2, "eval_steps": 2, "checkpoint_period": 100, "eval_mode": "rolling"}
TEXTS = [f"text {n} " + "word " * (n * 7 % 50) for n in range(300)]
DATA = {"dataset_type": "custom", "dataset_factory": f"{__name__}:texts"}


class Texts:
    """A source one of whose texts can't be read while `broken` is its number."""

    broken: ClassVar[int | None] = None
    seen: ClassVar[dict[int, bool]] = {}  # in the order they were read

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, n):
        Texts.seen[n] = True
        if n == Texts.broken:
            raise ValueError(f"text {n} is damaged")
        return TEXTS[n]


def texts(config, split):
    return Texts()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    Texts.seen.clear()
    runs.run_here(**KEYS, **DATA, base_output_directory=folder)
    return folder / "run"


def start(folder, **keys):
    return runs.run_here(**{**KEYS, **DATA, "base_output_directory": folder, **keys})


def without_times(folder):
    return [
        {key: value for key, value in line.items() if "second" not in key and "flops" not in key}
        for line in runs.lines(folder)
    ]


def assert_same(folder, whole, steps=STEPS):
    """Every line of metrics.jsonl once and in order, and every bit of the last state, those of the other run."""
    assert without_times(folder) == without_times(whole)
    assert runs.bits(runs.saved_arrays(folder, steps)) == runs.bits(runs.saved_arrays(whole, steps))


class Killed(BaseException):
    """As SIGKILL, after which nothing more is written."""


def failing(at, error, patched=Evaluator, name="run"):
    """In place of a method: it raises the error when it is called for the time `at` (from 1)."""
    calls, method = [], getattr(patched, name)

    def run(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise error
        return method(*arguments)

    return run


# ---- Evaluations


@pytest.mark.parametrize("loss", [0.0, -0.5])
def test_no_loss_ends_a_run_without_a_target(loss, tmp_path, monkeypatch):
    """A DPO loss rounds to 0 once every margin is large, and the weights of a batch_transform may be negative."""
    monkeypatch.setattr(Evaluator, "run", lambda *_: {"eval_loss": loss, "eval_perplexity": 1.0})
    assert int(start(tmp_path).state.step) == STEPS


# ---- Errors


@pytest.mark.parametrize(("at", "period", "saved"), [(4, 100, 8), (2, 100, 4), (2, 4, 4)])
def test_an_evaluation_that_fails_loses_no_step(at, period, saved, tmp_path, whole, monkeypatch):
    """The last one, one without a checkpoint, and one with; the same command makes it, and goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run", failing(at, RuntimeError("RESOURCE_EXHAUSTED: 12345678 bytes")))
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as raised:
            start(tmp_path, checkpoint_period=period)
    assert runs.steps_saved(tmp_path / "run") == [saved]
    assert raised.value.latest_checkpoint == (
        f"the state after step {saved} is saved in {tmp_path / 'run'}: run the same command with run_name=run to resume"
    )
    assert [step for step, _ in runs.evaluations(tmp_path / "run")] == list(range(2, saved, 2))
    result = start(tmp_path, checkpoint_period=period)
    assert_same(tmp_path / "run", whole)
    assert result.eval_metrics["eval_loss"] == runs.evaluations(whole)[-1][1]


def test_a_text_that_cannot_be_read_in_mid_run_ends_it_with_a_checkpoint(tmp_path, whole, monkeypatch, capsys):
    """The same command ends at the same step as long as the text can't be read, and goes on from there once it can."""
    monkeypatch.setattr(Texts, "broken", list(Texts.seen)[30])
    argv = runs.arguments(**{**KEYS, **DATA, "base_output_directory": tmp_path})
    for _ in range(2):
        said = runs.refusal(monkeypatch, capsys, argv)
        assert f"text {Texts.broken} is damaged" in said
        (reached,) = runs.steps_saved(tmp_path / "run")
        assert 0 < reached < STEPS, "choose another text"
        assert said.splitlines()[-1].endswith(
            f"; the state after step {reached} is saved in {tmp_path / 'run'}: run the same command with run_name=run "
            "to resume"
        )
    monkeypatch.setattr(Texts, "broken", None)
    start(tmp_path)
    assert_same(tmp_path / "run", whole)


def test_a_state_that_is_not_good_is_not_saved(tmp_path, monkeypatch):
    """Metrics that are not on disk would be missing from the resumed run."""
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(MetricsLog, "write", failing(5, full, MetricsLog, "write"))
    with pytest.raises(OSError, match="No space") as raised:
        start(tmp_path)
    assert raised.value.latest_checkpoint == "there is no checkpoint"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_writes_checkpoints_is_missing_at_the_first_step_not_at_the_first_checkpoint(tmp_path, monkeypatch):
    """Its files may be edited, or its package be replaced, during the steps before."""
    monkeypatch.setitem(sys.modules, "src.checkpoint.orbax_manager", None)  # as Python marks what cannot be imported
    with pytest.raises(ModuleNotFoundError, match="orbax_manager"):
        start(tmp_path)
    assert len(runs.lines(tmp_path / "run")) <= 1
    start(tmp_path / "without", enable_checkpointing="false")


def test_without_checkpoints_an_error_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluator, "run", failing(1, UserError("no")))
    with pytest.raises(UserError) as raised:
        start(tmp_path, enable_checkpointing="false")
    assert not hasattr(raised.value, "latest_checkpoint")
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---- Kills


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_killed_between_a_checkpoint_and_what_came_of_its_evaluation_goes_on(
    moment, tmp_path, whole, monkeypatch, capsys
):
    """Killed in the last evaluation, or when it is in metrics.jsonl and not yet beside the checkpoint."""
    with monkeypatch.context() as patch:
        if moment == "before":
            patch.setattr(Evaluator, "run", failing(4, Killed()))
        else:
            text = RunFolder.write_text
            patch.setattr(
                *(RunFolder, "write_text"),
                lambda self, name, *rest: die() if "evaluations" in name else text(self, name, *rest),
            )
        with pytest.raises(Killed):
            start(tmp_path)
    assert [step for step, _ in runs.evaluations(tmp_path / "run")] == [2, 4, 6, 8][: 3 + (moment == "after")]
    capsys.readouterr()
    start(tmp_path)
    assert "step 8/8  eval" in capsys.readouterr().out
    assert_same(tmp_path / "run", whole)
    # Then what came of it is on record.
    start(tmp_path)
    assert "step 8/8  eval" not in capsys.readouterr().out
    assert_same(tmp_path / "run", whole)


def die():
    raise Killed


def test_a_target_that_was_reached_before_a_kill_ends_the_resumed_run(tmp_path, whole, monkeypatch, capsys):
    losses = dict(runs.evaluations(whole))
    keys = {"target_eval_loss": (losses[2] + losses[4]) / 2, "checkpoint_period": 4}
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "run", failing(2, Killed()))
        with pytest.raises(Killed):
            start(tmp_path, **keys)
    for _ in range(2):
        capsys.readouterr()
        assert int(start(tmp_path, **keys).state.step) == 4
        assert f"finished: eval_loss {losses[4]:.4f} after step 4 reached" in capsys.readouterr().out
    assert runs.evaluations(tmp_path / "run") == runs.evaluations(whole)[:2]
    start(tmp_path)
    assert_same(tmp_path / "run", whole)


def test_a_signal_at_an_evaluation_delays_it_to_the_resumed_run(tmp_path, whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Preemption, "reached", lambda self, step: step == 4)
        assert start(tmp_path).stopped_by == signal.SIGTERM
    assert [step for step, _ in runs.evaluations(tmp_path / "run")] == [2]
    start(tmp_path)
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, 0])
def test_the_end_of_a_run_is_told_before_its_data_are_waited_for(stopped_by, tmp_path, monkeypatch, capsys):
    """They may be slow, or hang: threads make rows of later steps."""
    said = []

    def train_batches(*arguments, original=runs.src_run.train_batches, **keywords):
        try:
            yield from original(*arguments, **keywords)
        finally:
            said.append(capsys.readouterr().out)

    monkeypatch.setattr(runs.src_run, "train_batches", train_batches)
    monkeypatch.setattr(Preemption, "reached", lambda self, step: stopped_by and step == 4)
    assert start(tmp_path).stopped_by == stopped_by
    assert f"report: {tmp_path / 'run' / 'report.html'}" in said[0]
    assert ("stopped by SIGTERM after step 4" in said[0]) == bool(stopped_by)


def test_what_came_of_another_checkpoint_is_not_taken(tmp_path, whole):
    """Nor a file that is none of ours: then the evaluation is made again, with the same result."""
    start(tmp_path, steps=4, learning_rate_schedule_steps=STEPS)
    file = tmp_path / "run" / "checkpoints" / "evaluations.json"
    (of_step_4,) = json.loads(file.read_text()).values()
    for content in (json.dumps({"1": {**of_step_4, "eval_loss": 0.1}}), "[1]", "{", "5", '{"1": 2}'):
        file.write_text(content)
        start(tmp_path, steps=4, learning_rate_schedule_steps=STEPS, target_eval_loss=0.2)
        assert list(json.loads(file.read_text()).values())[-1] == of_step_4
    start(tmp_path, learning_rate_schedule_steps=STEPS)
    assert without_times(tmp_path / "run") == without_times(whole)


@pytest.mark.long
def test_a_real_kill_in_an_evaluation_beside_a_checkpoint(tmp_path, monkeypatch):
    """A command of its own, killed by its own metric in the evaluation after step 6, and then started again."""
    code = "import os, signal\n\nseen = []\n\ndef measure(lines):\n    seen.append(1)\n"
    code += "    if len(seen) == 3 and os.path.exists('FLAG'):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "    return {'texts': len(lines)}\n"
    (tmp_path / "my_kill.py").write_text(code.replace("FLAG", str(tmp_path / "flag")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = {**KEYS, "dataset_path": corpus, "base_output_directory": tmp_path, "async_checkpointing": "false"}
    keys |= {"decode_metrics": "my_kill:measure", "decode_prompt_tokens": 3, "decode_num_prompts": 2}
    keys |= {"sample_length": 3, "checkpoint_period": 6}
    log = tmp_path / "log"
    runs.finish(runs.start(log, **keys, run_name="whole"), log)
    (tmp_path / "flag").touch()
    runs.finish(runs.start(log, **keys, run_name="killed"), log, code=-signal.SIGKILL)
    (tmp_path / "flag").unlink()
    assert "resumed from step 6" in runs.finish(runs.start(log, **keys, run_name="killed"), log)
    assert_same(tmp_path / "killed", tmp_path / "whole")
