"""`python -m src.train_dpo` as whole runs: it learns what is preferred, resumes exactly, refuses what has no sense."""

import itertools
import json
import math
import random
import re

import numpy as np
import pytest

from src import train
from src.checkpoint.run_folder import RunFolder
from src.config.load import load
from src.config.yaml import dump
from src.extras.generation import decode
from src.extras.preferences import train_dpo
from src.extras.preferences.reference import saved_reference
from src.run.evaluator import Evaluator
from src.system.errors import UserError
from tests import runs
from tests import trackers as stand_ins

pytestmark = pytest.mark.usefixtures("steps_built_once")

WORDS = ("red", "green", "blue", "black", "white", "gold", "pink", "grey", "cyan", "teal", "navy", "lime", "plum")


def write_colours(folder, count, seed=0):
    """Chats that answer three colours by the first or the last of them, and pairs that prefer the last.

    No three come twice, so that what is held out of either is in nothing that was trained on.
    """
    draw = random.Random(seed)
    chats, pairs = [], []
    for first, middle, last in draw.sample(list(itertools.permutations(WORDS, 3)), count):
        prompt = f"{first} {middle} {last}:"
        chats.append({"prompt": prompt, "completion": f" {draw.choice((first, last))}"})
        pairs.append({"prompt": prompt, "chosen": f" {last}", "rejected": f" {first}"})
    for name, lines in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Chats, pairs with the same two answers to each prompt, and in `base` a model of the chats, hardly trained."""
    folder = write_colours(tmp_path_factory.mktemp("dpo"), 60)
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    lines = [json.dumps({**pair, "chosen": " a yes", "rejected": " no"}) for pair in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    chats = {"use_sft": True, "dataset_path": folder / "chats.jsonl", "steps": 2, "quiet": True}
    runs.run_here(base_output_directory=folder, **{**chats, "run_name": "base"})
    return folder


def keys_of(folder, run_name="dpo", **keys):
    settings = {"dataset_path": folder / "pairs.jsonl", "load_parameters_path": folder / "base", "run_name": run_name}
    settings |= {
        "quiet": True,
        "base_output_directory": folder,
        "eval_interval": 3,
        "eval_fraction": 0.2,
        "dpo_beta": 0.5,
    }
    return runs.arguments(**settings | {"steps": 6, "checkpoint_period": 3, "adam_weight_decay": 0, **keys})


@pytest.fixture(scope="module")
def trained(folder):
    return train_dpo.main(keys_of(folder))


def without_times(folder):
    return [
        {key: line[key] for key in line if "second" not in key and "flops" not in key} for line in runs.lines(folder)
    ]


def test_it_begins_at_the_reference_and_prefers_what_is_chosen(folder, trained):
    train_lines = [line for line in runs.lines(folder / "dpo") if "loss" in line]
    evaluations = [line for line in runs.lines(folder / "dpo") if "eval_loss" in line]
    np.testing.assert_allclose(train_lines[0]["loss"], np.log(2), rtol=1e-4)
    assert abs(train_lines[0]["margin"]) < 1e-3
    assert [line["step"] for line in evaluations] == [3, 6]
    assert evaluations[1]["eval_loss"] == trained.eval_metrics["eval_loss"] < np.log(2)
    assert evaluations[1]["eval_margin"] > evaluations[0]["eval_margin"] > 0
    for line, of in ((train_lines[-1], ""), (evaluations[-1], "eval_")):
        rewards = line[f"{of}reward_chosen"] - line[f"{of}reward_rejected"]
        np.testing.assert_allclose(line[f"{of}margin"], rewards, atol=1e-5)
        assert 0 <= line[f"{of}accuracy"] <= 1
    header = (folder / "dpo" / "environment.json").read_text()
    assert "DPO, dpo_beta 0.5" in header
    assert "one pair per row" in header
    (reference,) = (folder / "dpo").glob("reference-*.json")
    # Log-probabilities are kept as they are: those that a pair had at the first step.
    assert all(len(pair) == 2 and max(pair) < 0 for pair in json.loads(reference.read_text())["log_probs"].values())


def test_a_run_that_stopped_ends_with_the_same_losses(folder, trained, capsys, tmp_path, monkeypatch):
    calls = stand_ins.install(tmp_path, monkeypatch)
    half = {"run_name": "halves", "learning_rate_schedule_steps": 6, "report_to": "[wandb,mlflow]"}
    train_dpo.main(keys_of(folder, **half, steps=3))
    (reference,) = (folder / "halves").glob("reference-*.json")
    computed = reference.stat().st_mtime_ns
    capsys.readouterr()
    train_dpo.main(keys_of(folder, **half))
    printed = capsys.readouterr().out
    assert "resumed from step 3" in printed
    assert "reference: " not in printed
    assert reference.stat().st_mtime_ns == computed
    expected = without_times(folder / "dpo")
    assert without_times(folder / "halves") == expected
    assert runs.bits(runs.saved_arrays(folder / "halves", 6)) == runs.bits(runs.saved_arrays(folder / "dpo", 6))
    for tracked in stand_ins.sent(calls).values():
        assert [step for step, _ in tracked] == [1, 2, 3, 4, 5, 6]
        assert {"train/margin", "eval/margin", "eval/accuracy"} <= tracked[2][1].keys()
    assert stand_ins.calls_of(calls, "end_run") == [(["FINISHED"], {})] * 2
    again = train_dpo.main(keys_of(folder, **half))
    assert (again.metrics["step"], again.eval_metrics["eval_loss"]) == (6, expected[-1]["eval_loss"])
    reference.unlink()
    with pytest.raises(UserError, match=r"not in the run's folder \(reference-\*.json\)"):
        train_dpo.main(keys_of(folder, **half, steps=7))


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset_path": "more.jsonl", "accept_changes": "[dataset_path]"},
        pytest.param({"matmul_precision": "high"}, marks=pytest.mark.long),
    ],
)
def test_a_start_that_the_reference_does_not_fit_changes_nothing(folder, changed):
    pairs = (folder / "pairs.jsonl").read_text()
    (folder / "more.jsonl").write_text(pairs.replace("a yes", "yes"))
    keys = {"run_name": f"refused-{next(iter(changed))}", "eval_interval": -1}
    if "dataset_path" in changed:
        changed = {**changed, "dataset_path": folder / "more.jsonl"}
    train_dpo.main(keys_of(folder, **keys, steps=3))

    def contents():
        files = [file for file in (folder / keys["run_name"]).iterdir() if file.is_file()]
        return {file.name: file.read_text() for file in files}

    before = contents()
    with pytest.raises(
        UserError, match=r"for these pairs, .*: give the original ones \(accept_changes does not help\)"
    ):
        train_dpo.main(keys_of(folder, **keys, **changed))
    assert contents() == before
    assert train_dpo.main(keys_of(folder, **keys, steps=4)).metrics["step"] == 4


def test_an_evaluation_that_fails_at_the_end_loses_nothing(folder, trained, monkeypatch):
    evaluate, calls = Evaluator.run, []

    def run(self, state):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a fault")
        return evaluate(self, state)

    monkeypatch.setattr(Evaluator, "run", run)
    with pytest.raises(RuntimeError, match="a fault"):
        train_dpo.main(keys_of(folder, "failed", checkpoint_period=100))
    assert runs.steps_saved(folder / "failed") == [6]
    result = train_dpo.main(keys_of(folder, "failed", checkpoint_period=100))
    assert result.eval_metrics["eval_loss"] == trained.eval_metrics["eval_loss"]
    assert without_times(folder / "failed") == without_times(folder / "dpo")


def test_an_evaluation_that_is_not_finite_is_recorded_as_none(folder, monkeypatch):
    run = Evaluator.run
    monkeypatch.setattr(Evaluator, "run", lambda self, state: {**run(self, state), "eval_loss": math.nan})
    result = train_dpo.main(keys_of(folder, run_name="nan", steps=3, ema_decay=0.5))
    assert result.eval_metrics["eval_ema_loss"] > 0  # of the averaged weights, on the same pairs
    (of_step_3,) = json.loads((folder / "nan" / "checkpoints" / "evaluations.json").read_text()).values()
    assert of_step_3["eval_loss"] is None


def test_a_reference_is_kept_for_its_own_facts_and_checked(tmp_path):
    folder, computed = RunFolder(str(tmp_path), "run"), []

    def compute():
        computed.append(len(computed))
        return {"pair": [-1.5, computed[-1]]}

    assert [saved_reference(folder, facts, compute) for facts in ("a", "a", "b", "a")] == [
        *({"pair": [-1.5, of]} for of in (0, 0, 1, 0))
    ]
    for file in (tmp_path / "run").glob("reference-*.json"):
        file.write_text(file.read_text().replace("-1.5", "-1.6"))
    with pytest.raises(UserError, match=r"reference-\w+.json is damaged: restore it"):
        saved_reference(folder, "a", compute)


@pytest.mark.long
def test_adapters_begin_at_the_same_reference(folder, trained):
    lora = {"lora_rank": 2, "run_name": "lora", "steps": 1, "eval_interval": -1}
    result = train_dpo.main(keys_of(folder, **lora))
    np.testing.assert_allclose(result.metrics["loss"], np.log(2), rtol=1e-4)
    # Of the model that the adapters change nothing of yet: the file of the run of all weights, to rounding.
    kept = [
        json.loads(next((folder / name).glob("reference-*.json")).read_text())["log_probs"] for name in ("lora", "dpo")
    ]
    assert kept[0].keys() == kept[1].keys()
    np.testing.assert_allclose(*(np.array([each[key] for key in kept[0]]) for each in kept), rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"load_parameters_path": ""}, "src.train_dpo needs load_parameters_path, which is the reference"),
        ({"dataset_path": ""}, "src.train_dpo needs dataset_path, a .jsonl file of pairs"),
        ({"mtp_num_layers": 1, "loss": "a:b"}, "does not support mtp_num_layers=1, loss=a:b"),
        ({"dropout_rate": 0.1}, "dropout_rate and capacity_factor would make a reward random"),
        ({"dpo_label_smoothing": 0.5}, "dpo_label_smoothing.*at least 0 and less than 0.5"),
    ],
)
def test_what_has_no_sense_is_refused(folder, keys, message):
    with pytest.raises(UserError, match=message):
        train_dpo.main(keys_of(folder, **keys))


@pytest.mark.parametrize("key", ["use_sft=true", "sample_length=5", "max_document_bytes=256", "packing=false"])
def test_what_pairs_have_no_use_for_is_refused_where_it_is_typed(folder, key):
    with pytest.raises(UserError, match=rf"^{key} .* has no effect: it is for src.train, and this is src.train_dpo$"):
        train_dpo.main([*keys_of(folder), key])


def test_a_config_file_of_src_train_is_taken_with_a_list_of_what_is_unused(folder, tmp_path, capsys):
    unused = {"use_sft": True, "sft_train_on_completion_only": False, "sample_length": 120, "max_document_bytes": 256}
    unused |= {"packing": False, "long_documents": "truncate"}
    file = tmp_path / "mine.yml"
    file.write_text("base_config: base.yml\n" + "".join(f"{key}: {json.dumps(unused[key])}\n" for key in unused))
    steps = {"run_name": "of-a-file", "steps": 1, "eval_interval": -1, "quiet": False}
    _, *words = keys_of(folder, **steps)
    assert train_dpo.main([str(file), *words]).metrics["step"] == 1
    printed = capsys.readouterr().out
    listed = ", ".join(f"{key}={dump(value)}" for key, value in unused.items())
    assert f"{listed} (in {file}) have no effect: they are for src.train, and" in printed
    assert "one pair per row" in printed
    assert printed.index("restored the weights") < printed.index("reference: computing log-prob"), (
        "which these weights give"
    )
    assert "sample:" not in printed
    assert load([str(folder / "of-a-file")]).batch.packing, "cuDNN's kernel takes rows without it for one segment each"
    # What trains another model is refused there too.
    file.write_text("base_config: base.yml\nquantization: int8\n")
    with pytest.raises(UserError, match=r"src\.train_dpo does not support quantization=int8"):
        train_dpo.main([str(file), *words])


def test_why_it_is_finished_is_said_where_no_step_was_made_or_the_target_reached(folder, capsys):
    keys = {"run_name": "ends", "steps": 2, "eval_interval": 1, "checkpoint_period": 2}
    train_dpo.main(keys_of(folder, **keys))
    assert "finished:" not in capsys.readouterr().out  # as src.train: the last step's line says so
    train_dpo.main(keys_of(folder, **keys))
    assert "finished: this run has made its 2 steps. To continue, raise steps." in capsys.readouterr().out
    train_dpo.main(keys_of(folder, **keys | {"run_name": "target", "target_eval_loss": 5}))
    assert re.search(r"finished: eval_loss .* after step 1 reached target_eval_loss=5", capsys.readouterr().out)


def test_other_commands_refuse_its_keys(folder):
    with pytest.raises(
        UserError, match=r"dpo_beta=0.2 .* has no effect: it is for src.train_dpo, and this is src.train"
    ):
        train.main(runs.arguments(dpo_beta=0.2))


@pytest.mark.long
def test_two_hundred_steps_make_held_out_pairs_certain(tmp_path):
    write_colours(tmp_path, 1_700)
    size = {"base_emb_dim": 64, "base_mlp_dim": 128, "base_num_decoder_layers": 2, "learning_rate": 3e-3}
    chats = {**size, "use_sft": True, "dataset_path": tmp_path / "chats.jsonl", "steps": 400}
    runs.run_here(base_output_directory=tmp_path, **{**chats, "run_name": "base"})
    result = train_dpo.main(
        keys_of(tmp_path, steps=200, **{**size, "quiet": False, "learning_rate": 1e-4, "eval_interval": 100})
    )
    assert result.eval_metrics["eval_accuracy"] > 0.95
    assert re.search("red|blue", decode.main([str(tmp_path / "dpo"), "prompt=red green blue:", "sample_length=8"])[0])
