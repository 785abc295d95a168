"""Runs that commit f47738a began continue as with that commit: the same batches to the byte, the same losses.

tests/old_runs/make.py made them, and recorded what the commit made of each after it was stopped.
"""

import contextlib
import json
import shutil
import sys

import jax.numpy as jnp
import pytest

from src.checkpoint import run_rules
from src.checkpoint.checkpointer import Checkpointer
from src.data.rules import PRESENT_RULES
from src.data.types import InputSpec
from src.extras.datasets import inspect_data
from src.extras.evaluation import evaluate
from src.extras.preferences import train_dpo
from src.run import resolve_config
from src.system.errors import UserError
from tests.old_runs import make
from tests.runs import BASE, ROOT, ended, finish, free_address, lines, main, start_command

pytestmark = pytest.mark.usefixtures("steps_built_once")

EXPECTED = json.loads((make.FOLDER / "expected.json").read_text())
# What that commit kept no digest of, if anything.
LACKS = {
    **dict.fromkeys(("few", "one_line", "unpacked", "odd_files"), "evaluation"),
    **dict.fromkeys(("chats", "pairs_of_text"), "source lines"),
    "few_chats": "source lines, evaluation",
    "mixture": "source ids contents, evaluation",
    **dict.fromkeys(("tokens", "tokens_unpacked"), "source contents"),
    "custom": "source code old_run_data",
    "transformed": "code batch_transform old_run_data",
}
NEEDS = {"parquet": "pyarrow", "parquet_book": "pyarrow", "mixture": "pyarrow"}


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """Puts a case's run and its data into a folder, which becomes the current one; returns the run's folder."""

    def place(case):
        if case in NEEDS:
            pytest.importorskip(NEEDS[case], reason="bash setup.sh data installs it")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(make.FOLDER)
        shutil.copytree(make.FOLDER / "data", tmp_path / "data", symlinks=True)
        for name in (case, *["chats"] * (case == "preferences")):  # which is the reference of these
            shutil.unpack_archive(make.FOLDER / f"{name}.zip", tmp_path / "runs" / name)
        return tmp_path / "runs" / case

    return place


def resumed(folder, **keys):
    """What the rest of a run did."""
    with make.recording() as recorded:
        run = train_dpo.main if folder.name == "preferences" else main
        result = run([BASE, *make.arguments(folder.name, checkpoint_period=100, **keys)])
    return make.outcome(result.state, folder, *recorded)


@pytest.mark.parametrize("case", make.CASES)
def test_an_old_run_continues_as_it_began(old_run, case, capsys):
    outcome, expected = resumed(old_run(case)), EXPECTED[case]
    lacking = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    assert lacking == [f"not compared, because the checkpoint lacks it: {LACKS.get(case)}"] * (case in LACKS)
    assert outcome["batches"] == expected["batches"]
    assert outcome["eval_batches"] == expected["eval_batches"]
    assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert [each[:2] for each in outcome["evaluations"]] == [each[:2] for each in expected["evaluations"]]
    losses = [each[2] for each in expected["evaluations"]]
    assert [each[2] for each in outcome["evaluations"]] == pytest.approx(losses, rel=1e-5)
    assert outcome["weights"] == pytest.approx(expected["weights"], rel=1e-5)


# ---- Which rules of data a run has

KEPT = "the run keeps its data rules, version 1"


def rules_saved(folder, step):
    """The version that a checkpoint names."""
    return json.loads((folder / f"checkpoints/{step}/meta/metadata").read_text())["meta"]["data"].get("data rules")


def test_an_old_run_keeps_its_rules_however_often_it_is_resumed(old_run, capsys):
    folder = old_run("few")
    assert rules_saved(folder, 2) is None
    for last in (4, make.STEPS):
        main([BASE, *make.arguments("few", steps=last, learning_rate_schedule_steps=make.STEPS)])
        assert capsys.readouterr().out.count(KEPT) == 1
        assert rules_saved(folder, last) == 1
    assert [line["loss"] for line in lines(folder) if "loss" in line][2:] == pytest.approx(EXPECTED["few"]["losses"])


def test_a_run_of_the_state_of_an_old_one_keeps_its_rules(old_run, capsys):
    old = old_run("few")
    keys = {"run_name": "other", "load_full_state_path": "runs/few"}
    with make.recording() as (batches, _):
        main([BASE, *make.arguments("few", **keys)])
    assert KEPT in capsys.readouterr().out
    assert batches[: make.STEPS - make.STOP] == EXPECTED["few"]["batches"]
    assert rules_saved(old.parent / "other", make.STEPS) == 1


@pytest.mark.long
def test_two_processes_keep_the_rules_of_an_old_run(old_run, tmp_path, monkeypatch):
    folder = old_run("few")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keys, logs = {"coordinator_address": free_address(), "num_processes": 2}, [tmp_path / "0.log", tmp_path / "1.log"]
    commands = [
        [sys.executable, "-m", "src.train", BASE, *make.arguments("few", **keys, process_id=process)]
        for process in range(2)
    ]
    processes = [start_command(command, log, 4, tmp_path) for command, log in zip(commands, logs, strict=True)]
    with ended(*processes):
        said = [finish(process, log) for process, log in zip(processes, logs, strict=True)]
    assert KEPT in said[0]
    assert rules_saved(folder, make.STEPS) == 1
    found = [line["loss"] for line in lines(folder) if "loss" in line][make.STOP :]
    assert found == pytest.approx(EXPECTED["few"]["losses"], rel=1e-5)


def test_a_new_run_and_one_that_accepts_them_have_the_present_rules(old_run, capsys):
    folder = old_run("text")
    main([BASE, *make.arguments("text", run_name="new")])
    said = capsys.readouterr().out
    main([BASE, *make.arguments("text", accept_changes="[data_rules]")])
    accepting = capsys.readouterr().out
    assert "accepted: data rules: 1 -> 2" in accepting
    assert KEPT not in said + accepting
    assert rules_saved(folder.parent / "new", make.STEPS) == rules_saved(folder, make.STEPS) == PRESENT_RULES
    main([BASE, *make.arguments("text", steps=8)])  # which need not accept them again
    resumed = capsys.readouterr().out
    assert "data rules" not in resumed


def test_rules_of_a_later_version_are_refused(old_run, monkeypatch):
    old_run("text")
    main([BASE, *make.arguments("text", accept_changes="[data_rules]")])
    monkeypatch.setattr(run_rules, "PRESENT_RULES", PRESENT_RULES - 1)
    with pytest.raises(UserError, match=rf"data rules of version {PRESENT_RULES}: use the MinText that wrote it"):
        main([BASE, *make.arguments("text", steps=8)])


def test_a_checkpoint_of_weights_from_elsewhere_has_the_present_rules(tmp_path):
    with contextlib.closing(Checkpointer(tmp_path / "out", max_to_keep=1, async_save=False)) as checkpointer:
        checkpointer.save(0, {"trainable": {"x": jnp.zeros(3)}}, {"vocab_size": 3, "tokenizer": None})
    config = resolve_config.load([BASE, f"load_full_state_path={tmp_path}/out"])
    assert run_rules.run_rules(config.run, config.checkpoint) == PRESENT_RULES


def test_evaluations_and_inspections_of_a_run_have_its_rules(old_run, monkeypatch):
    folder, seen = old_run("text"), []

    def of(config, tokenizer, rules, original=InputSpec.of):
        seen.append(rules)
        return original(config, tokenizer, rules)

    monkeypatch.setattr(InputSpec, "of", of)
    evaluate.main([str(folder)])
    inspect_data.main([str(folder)])
    inspect_data.main([BASE, *make.arguments("text", run_name="")])
    assert seen == [1, 1, PRESENT_RULES]


@pytest.mark.parametrize("case", ["text", "tokens", "pairs_of_text"])
def test_a_new_run_on_data_that_no_rule_alters_has_the_same_batches(old_run, case):
    old_run(case)
    with make.recording() as (batches, _):
        main([BASE, *make.arguments(case, run_name="new", eval_interval=6)])
    assert batches[make.STOP :] == EXPECTED[case]["batches"]


@pytest.mark.parametrize(
    ("case", "count"),
    [("few", 3), *(pytest.param(*each, marks=pytest.mark.long) for each in (("unpacked", 3), ("custom", 2)))],
)
def test_a_new_run_on_fewer_documents_than_rows_has_others(old_run, case, count, capsys):
    old_run(case)
    with make.recording() as (batches, _):
        main([BASE, *make.arguments(case, run_name="new", eval_interval=-1)])
    assert not set(batches[make.STOP :]) & set(EXPECTED[case]["batches"])
    shared = f"{count} documents for 8 rows: rows that share one begin at different places in it"
    assert shared in capsys.readouterr().out
    inspect_data.main(["runs/new"])
    assert shared in capsys.readouterr().out
