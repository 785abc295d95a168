"""Odd things found by trying to break runs: each gets an answer, and loses nothing."""

import contextlib
import json
import os
import shutil
import signal

import jax
import pytest

from src import train
from src.checkpoint import restore
from src.checkpoint.run_folder import RunFolder
from src.config import load as configuration
from src.data.readers import text_check
from src.data.readers.text import TextSource
from src.run import resolve_config, run
from src.system.errors import UserError
from tests import runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    """The folder of a run of 4 steps, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    runs.run_here(base_output_directory=folder.parent, dataset_path=corpus, steps=4, checkpoint_period=2)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def resumed(folder, corpus, **keys):
    keys = {"base_output_directory": folder.parent, "dataset_path": corpus, "steps": 6, "checkpoint_period": 2, **keys}
    return runs.arguments(**keys)


# ---- Data


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"broken\.txt can't be read: No such file"):
        TextSource(str(tmp_path), max_document_bytes=1024)


def test_a_file_name_need_not_be_utf8(tmp_path):
    name = os.path.join(os.fsencode(tmp_path), b"\xff\xfe.txt")
    try:
        with open(name, "w") as file:
            file.write("text")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    source = TextSource(str(tmp_path), max_document_bytes=1024)
    assert source[0] == "text"
    assert source.fingerprint()["files"] == 1


# ---- What lies in a run's folder


def test_what_is_no_checkpoint_is_let_be(folder, corpus, capsys):
    strangers = ("004", "²", "4.bak", "best")
    for name in strangers:
        shutil.copytree(folder / "checkpoints" / "4", folder / "checkpoints" / name)
    runs.main(resumed(folder, corpus))
    assert "resumed from step 4" in capsys.readouterr().out
    assert {*strangers, "6"} <= {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_missing_config_is_said(folder, corpus, capsys):
    (folder / "config.yml").unlink()
    runs.main(resumed(folder, corpus))
    assert "config.yml is missing" in capsys.readouterr().out


def test_a_config_of_bytes_is_an_error(folder, corpus, monkeypatch, capsys):
    (folder / "config.yml").write_bytes(b"\xff\xfe\x00: [")
    assert "config.yml" in runs.refusal(monkeypatch, capsys, resumed(folder, corpus))


@pytest.mark.parametrize("strange", ["not JSON\n", "[1]\n"])
def test_a_strange_line_of_metrics_is_left_out_with_a_word(folder, corpus, strange):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], strange, *lines[1:]]))
    runs.main(resumed(folder, corpus))
    assert file.read_text().startswith(lines[0] + strange + lines[1])
    page = (folder / "report.html").read_text()
    assert "1 line of metrics.jsonl without the metrics" in page
    assert "Finished, step 6 of 6" in page


# ---- What is said


class TerminatedAfterStep2:
    """In place of Preemption, which waits for a signal."""

    signal = signal.SIGTERM

    def __init__(self, folder):
        pass

    def waits_for_data(self):
        return contextlib.nullcontext()

    def reached(self, step):
        return step == 2

    def close(self):
        pass


def test_a_run_without_checkpoints_does_not_promise_to_go_on(tmp_path, corpus, monkeypatch, capsys):
    monkeypatch.setattr(run, "Preemption", TerminatedAfterStep2)
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 4, "enable_checkpointing": "false"}
    runs.run_here(**keys)
    output = capsys.readouterr().out
    assert "stopped by SIGTERM after step 2; there is no checkpoint" in output
    assert "run the same command" not in output


def test_names_in_other_alphabets_stay_legible():
    config = resolve_config.load([runs.BASE, "dataset_path=мой текст/ü"])
    assert "dataset_path: мой текст/ü\n" in configuration.to_yaml(config)


# ---- Other runs


def test_a_folder_takes_one_process_at_a_time(folder, corpus, monkeypatch, capsys):
    here = RunFolder(str(folder.parent), folder.name)
    here.lock()
    assert "another process is running" in runs.refusal(monkeypatch, capsys, resumed(folder, corpus))
    here.close()

    def compared(*args):
        other = RunFolder(str(folder.parent), folder.name)
        with pytest.raises(UserError, match="another process is running"):
            other.lock()
        other.close()
        return compare_configs(*args)

    # Or the other process could finish the run after this one has read where to go on.
    compare_configs = run.compare_configs
    monkeypatch.setattr(run, "compare_configs", compared)
    assert int(runs.main(resumed(folder, corpus)).state.step) == 6


def test_weights_of_another_vocabulary_are_refused_though_padding_hides_it(
    finished, corpus, tmp_path, monkeypatch, capsys
):
    argv = resumed(tmp_path / "other", corpus, load_parameters_path=finished, vocab_size=300)
    message = runs.refusal(monkeypatch, capsys, argv)
    assert "258" in message
    assert "300" in message
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(folder, corpus, monkeypatch, capsys):
    before = runs.contents(folder)

    def denied(step_folder):
        raise PermissionError(f"no access to {step_folder}")

    monkeypatch.setattr(restore, "is_unfinished", denied)
    assert "no access" in runs.refusal(monkeypatch, capsys, resumed(folder, corpus))
    assert runs.contents(folder) == before


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"logical_axis_rules.length": "[fsdp]", "logical_axis_rules.batch": "[]", "max_target_length": 60},
            "max_target_length=60 does not divide into 16 parts",
        ),
        ({"logical_axis_rules.activation_embed": "[fsdp]"}, "mesh axis fsdp"),
    ],
)
def test_activations_that_do_not_fit_the_mesh_are_refused_before_anything_is_written(
    keys, words, corpus, tmp_path, monkeypatch, capsys
):
    assert words in runs.refusal(monkeypatch, capsys, resumed(tmp_path / "run", corpus, **keys))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_saves_reports_and_the_same_command_goes_on(tmp_path, corpus, monkeypatch, capsys):
    original = train.hparams_at

    def interrupted_in_step_2(keys, steps, step):
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return original(keys, steps, step)

    monkeypatch.setattr(train, "hparams_at", interrupted_in_step_2)
    command = runs.arguments(base_output_directory=tmp_path, dataset_path=corpus, steps=4)
    assert runs.main(command).exit_code == 130
    intact = (
        f"the checkpoint of step 2 in {tmp_path / 'run'} is intact; run the same command with run_name=run to resume"
    )
    assert f"stopped by Ctrl-C after step 2; {intact}" in capsys.readouterr().out
    assert runs.steps_saved(tmp_path / "run") == [2]
    assert (tmp_path / "run" / "report.html").exists()
    monkeypatch.undo()
    assert runs.main(command).exit_code == 0
    assert [step for step, _ in runs.losses(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_first_update_that_ruins_the_weights_names_no_checkpoint_that_is_not_there(
    tmp_path, corpus, monkeypatch, capsys
):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 4}
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys, learning_rate=1e20, gradient_clipping_threshold=0))
    assert said.endswith("Try a smaller learning_rate or gradient_clipping_threshold. There is no checkpoint.\n")


def test_a_run_may_turn_evaluation_off_only_knowingly(folder, corpus, monkeypatch, capsys):
    """What is held out for it would be trained on."""
    evaluated = folder.parent / "evaluated"
    keys = {"run_name": evaluated.name, "eval_fraction": 0.1, "eval_steps": 1}
    runs.main(resumed(folder, corpus, **keys, eval_interval=2, steps=2))
    message = runs.refusal(monkeypatch, capsys, resumed(folder, corpus, **keys, eval_interval=-1, steps=4))
    assert "accept_changes=[eval_interval]" in message
    accepted = resumed(folder, corpus, **keys, eval_interval=-1, steps=4, accept_changes="[eval_interval]")
    assert int(runs.main(accepted).state.step) == 4


@pytest.mark.long
def test_a_bad_line_that_is_mended_in_its_place_moves_no_document(tmp_path, monkeypatch):
    monkeypatch.setattr(text_check, "_CHECKED_SECONDS", 0.0)  # as of data that take longer to check
    lines = [json.dumps({"text": f"line {n} " + "alpha beta " * (n % 20)}) for n in range(400)]
    bad = lines[133][:-1] + ","  # which no early step reads
    keys = {"steps": 12, "checkpoint_period": 2, "eval_interval": 6, "eval_steps": 1, "base_output_directory": tmp_path}

    def written(file, *content):
        (tmp_path / file).write_text("\n".join(content))
        return {**keys, "dataset_path": tmp_path / file}

    whole = runs.run_here(**written("a.jsonl", *lines), run_name="whole")
    broken = written("a.jsonl", *lines[:133], bad, *lines[134:])
    with pytest.raises(UserError, match=r"a\.jsonl, line 134: not JSON"):
        runs.run_here(**broken, run_name="broken")
    mended = written("a.jsonl", *lines)
    with pytest.raises(UserError, match=r"accept_changes=\[dataset_path\]"):
        runs.run_here(**mended, run_name="broken")
    after = runs.run_here(**mended, run_name="broken", accept_changes="[dataset_path]")
    same = jax.tree.map(lambda a, b: bool((a == b).all()), after.state.weights.merged(), whole.state.weights.merged())
    assert all(jax.tree.leaves(same))
    assert after.eval_metrics == whole.eval_metrics
