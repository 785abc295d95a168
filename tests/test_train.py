"""A whole run, as the user of `train.main` sees it: what it returns, prints and leaves behind."""

import contextlib
import html
import io
import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from src import train
from src.extras.pages import live
from src.run.resolve_config import load
from src.run.run import Run
from tests import runs

STEPS = 12
KEYS = {"steps": STEPS, "checkpoint_period": 5, "eval_interval": 5, "sample_length": 16, "log_period": 4}
LAYERS = 2


def run_here(**keys):
    """A run of the model of all runs here, whose programs are compiled once."""
    return runs.run_here(base_num_decoder_layers=LAYERS, **keys)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """(the folder of a run, what it returned, what it printed)."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        result = run_here(base_output_directory=folder.parent, dataset_path=corpus, **KEYS)
    return folder, result, output.getvalue()


def no_sum_and_count(logits, batch):
    return {"mean": logits.mean()}


def mistyped(logits, batch):
    return {"mean": (jnp.summ(logits), 1)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_sum_and_count", "eval_metrics must return {name: (sum, count)}"),
        ("mistyped", "eval_metrics raised AttributeError: module 'jax.numpy' has no attribute 'summ' ("),
    ],
)
def test_a_mistake_in_eval_metrics_is_found_before_the_first_step(name, message, tmp_path, corpus, monkeypatch, capsys):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "eval_metrics": f"{__name__}:{name}"}
    assert message in runs.refusal(monkeypatch, capsys, runs.arguments(**{**KEYS, **keys}))
    assert not list(tmp_path.glob("*/metrics.jsonl"))


# ---- What it returns


def test_the_result_is_the_last_state_and_its_metrics(run):
    folder, result, _ = run
    assert int(result.state.step) == STEPS
    train_lines = [line for line in runs.lines(folder) if "loss" in line]
    assert result.metrics == train_lines[-1]
    assert runs.evaluations(folder)[-1] == (STEPS, result.eval_metrics["eval_loss"])
    saved = runs.saved_arrays(folder, STEPS)
    np.testing.assert_array_equal(result.state.weights.trainable["embedding"], saved["trainable.embedding"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.weights.trainable))


def test_it_learns(run):
    folder, _, _ = run
    losses = [loss for _, loss in runs.losses(folder)]
    assert abs(losses[0] - math.log(258)) < 0.5, "an untrained model is about as good as a guess"
    assert losses[-1] < 0.7 * losses[0]
    assert runs.evaluations(folder)[-1][1] < 0.7 * losses[0]


# ---- What it prints


def test_the_header_says_what_was_chosen(run):
    folder, _, output = run
    first, *header = output.partition("\nstep  1/")[0].split("\n")
    assert re.fullmatch(r"MinText \d+\.\d+\.\d+", first)
    rows = dict(re.match(r"(\S+(?: \S+)*) {2,}(.*)", line).groups() for line in header if not line.startswith(" "))
    assert rows["run"] == f"{folder} (run_name={folder.name} resumes it)"
    assert rows["devices"] == "8 x cpu, processes: 1"
    assert rows["mesh"] == "fsdp 8"
    # Embedding and output of 384 rows (258 padded), two layers of attention, feed-forward and two norms, a norm.
    parameters = int(rows["model"].split()[0].replace(",", ""))
    assert parameters == 2 * 258 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert rows["step"] == "8 rows x 64 = 512 tokens"
    assert "float32" in rows["precision"]
    assert rows["attention"] == "dot_product"
    assert rows["data"].startswith("text: ")
    assert rows["tokenizer"] == "byte, 258 ids"
    assert rows["vocabulary"] == "258"
    assert rows["order"] == "shuffled by seed 0, packed"
    assert rows["steps"] == f"0 to {STEPS}"
    assert rows["TensorBoard"] == f"tensorboard --logdir {folder / 'tensorboard'} (after pip install tensorboard)"
    assert any(line.strip() == "base_emb_dim: 32 (default 2048)" for line in header)


def test_a_line_for_each_period_and_evaluation(run):
    _, _, output = run
    lines = [line for line in output.split("\n") if line.startswith("step ") and "/12" in line]
    assert [int(line[4:].split("/")[0]) for line in lines if " loss " in line] == [1, 4, 8, 12]
    assert [int(line[4:].split("/")[0]) for line in lines if " eval " in line] == [5, 10, 12]
    assert all("ETA" in line for line in lines if " loss " in line and not line.startswith("step  1/"))


def test_it_ends_with_a_sample_and_the_report(run):
    folder, _, output = run
    sample, report = output.rpartition("sample:\n")[2].rpartition("report: ")[::2]
    assert sample.startswith("  def ")
    assert report.startswith(f"{folder / 'report.html'}\n")


def is_plain(text):
    return all(character.isprintable() or character in "\n\t" for character in text)


def test_a_log_has_no_control_characters(run, tmp_path, corpus, capsys):
    _, _, output = run
    assert is_plain(output)
    # A model of bytes that has learned nothing says any of them.
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 1, "learning_rate": 1e-30}
    result = run_here(**keys, sample_length=58, decode_sampling_temperature=1)
    assert int(result.state.step) == 1
    sample = capsys.readouterr().out.rpartition("sample:\n")[2]
    assert len(sample) > 58
    assert is_plain(sample)


# ---- What it leaves behind


def test_metrics_have_their_keys_in_every_line(run):
    folder, _, _ = run
    train_keys = "step loss perplexity grad_norm learning_rate step_time_seconds data_wait_seconds tokens_per_second"
    train_keys += " tflops_per_device"
    eval_keys = "step eval_loss eval_perplexity"
    lines = runs.lines(folder)
    # No MFU: no peak rate of a CPU is known.
    assert [" ".join(line) for line in lines if "loss" in line] == [train_keys] * STEPS
    assert [" ".join(line) for line in lines if "eval_loss" in line] == [eval_keys] * 3
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 12]
    for line in lines:
        if "loss" in line:
            assert line["perplexity"] == math.exp(line["loss"])
            assert line["tokens_per_second"] == pytest.approx(512 / line["step_time_seconds"])


def test_the_folder_is_as_documented(run):
    folder, _, _ = run
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.yml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "tensorboard",
        "report.html",
        "sample.txt",
    }
    assert runs.steps_saved(folder) == [5, 10, 12]
    assert json.loads((folder / "environment.json").read_text())["devices"] == "8 x cpu"
    report = (folder / "report.html").read_text()
    first, sample = (folder / "sample.txt").read_text().split("\n", 1)
    assert first == f"after step {STEPS}"
    for shown in ("eval", html.escape(sample), "parameters, 2 layers", "fsdp 8", "started", str(folder)):
        assert shown in report
    assert list((folder / "tensorboard").iterdir())


def test_its_config_makes_the_same_run(run, tmp_path):
    folder, _, _ = run
    config = str(folder / "config.yml")
    assert load([config])["base_output_directory"] == str(folder.parent)
    runs.main([config, f"base_output_directory={tmp_path}"])
    assert runs.losses(tmp_path / "run") == runs.losses(folder)
    assert runs.evaluations(tmp_path / "run") == runs.evaluations(folder)
    assert runs.bits(runs.saved_arrays(tmp_path / "run", STEPS)) == runs.bits(runs.saved_arrays(folder, STEPS))


# ---- The same command once more


class KilledBeforeItsReport(Exception):
    pass


def test_a_finished_run_says_so_and_gives_the_same_result(run, tmp_path, corpus, capsys):
    folder, result, output = run
    again = shutil.copytree(folder, tmp_path / "run")
    for name in ("report.html", "sample.txt"):
        (again / name).unlink()
    before = runs.contents(again)
    repeated = run_here(base_output_directory=tmp_path, dataset_path=corpus, **KEYS)
    printed = capsys.readouterr().out
    assert "finished: this run has made its 12 steps. To continue, raise steps." in printed
    sample = output.rpartition("sample:\n")[2].rpartition("report: ")[0]
    assert f"sample:\n{sample}report: {again / 'report.html'}\n" in printed
    assert (repeated.metrics, repeated.eval_metrics, repeated.stopped_by) == (result.metrics, result.eval_metrics, 0)
    jax.tree.map(np.testing.assert_array_equal, repeated.state, result.state)
    written = runs.contents(again)
    assert written.pop("sample.txt") == (folder / "sample.txt").read_bytes()
    assert f"Finished, step {STEPS} of {STEPS}" in written.pop("report.html").decode()
    assert written == before


def test_a_kill_before_the_report_leaves_one_and_the_next_start_finishes_it(tmp_path, corpus, monkeypatch):
    def killed(*arguments):
        raise KilledBeforeItsReport

    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 2, "checkpoint_period": 1}
    with monkeypatch.context() as patch:
        patch.setattr(Run, "conclude", killed)
        with pytest.raises(KilledBeforeItsReport):
            run_here(**keys)
    assert re.search(r"At step 1 of 2|Finished, step 2 of 2", (tmp_path / "run" / "report.html").read_text())
    assert int(run_here(**keys).state.step) == 2
    assert "Finished, step 2 of 2" in (tmp_path / "run" / "report.html").read_text()


def test_a_report_that_can_not_be_written_fails_no_run(tmp_path, corpus, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live, "page", full)
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 1}
    assert int(run_here(**keys).state.step) == 1
    (said,) = re.findall("report: .*", capsys.readouterr().out)
    assert said.startswith("report: not written")
    assert "No space left on device" in said
    assert "python -m src.report" in said


def test_a_quiet_run_prints_its_last_step_alone(tmp_path, corpus, capsys):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 3, "eval_interval": 1, "eval_steps": 1}
    run_here(**keys, quiet="true")
    version, last, evaluation, report = capsys.readouterr().out.splitlines()
    assert version.startswith("MinText ")
    assert last.startswith("step 3/3  loss")
    assert evaluation.startswith("step 3/3  eval")
    assert report == f"report: {tmp_path / 'run' / 'report.html'}"
    assert len(runs.lines(tmp_path / "run")) == 6


# ---- Other runs


def test_without_checkpoints_a_run_starts_afresh(tmp_path, corpus):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "enable_checkpointing": "false"}
    for _ in range(2):
        run_here(**keys, steps=2)
        assert [step for step, _ in runs.losses(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_without_a_name_gets_a_dated_one(tmp_path, corpus):
    run_here(base_output_directory=tmp_path, dataset_path=corpus, steps=1, run_name="")
    (folder,) = tmp_path.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    assert runs.steps_saved(folder) == [1]


def test_synthetic_data_need_no_tokenizer(tmp_path):
    keys = {"base_output_directory": tmp_path, "dataset_type": "synthetic", "eval_steps": 2, "sample_length": 4}
    result = run_here(**keys, steps=2, eval_interval=2)
    assert result.eval_metrics["eval_loss"] == pytest.approx(math.log(258), abs=1)


def test_a_profile_has_the_steps_that_it_says(tmp_path):
    keys = {"base_output_directory": tmp_path, "dataset_type": "synthetic", "profiler": "xplane"}
    run_here(**keys, steps=3, profiler_steps=1)
    (file,) = (tmp_path / "run" / "tensorboard").rglob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    marks = [dict(event.stats) for line in lines for event in line.events if event.name == "train"]
    assert [mark["step_num"] for mark in marks] == [2]


@pytest.mark.parametrize(("length", "is_said"), [(59, False), (60, True)])
def test_a_sample_that_ends_before_its_length_is_announced(length, is_said, tmp_path, corpus, capsys):
    """The prompt has five tokens and a row 64: nothing slides on, as nanoGPT's window does."""
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 1, "log_period": 2}
    run_here(**keys, sample_length=length)
    line = f"sample_length={length}: prompt and text are limited to max_target_length=64 tokens\n"
    assert (line in capsys.readouterr().out) == is_said


def test_help_returns_without_a_run(capsys):
    assert train.main(["--help", "learning_rate"]) is None
    assert "learning_rate: 3.0e-4" in capsys.readouterr().out


# ---- An end before the last step


def test_a_run_ends_at_its_target_loss_and_goes_on_when_it_is_lowered(tmp_path, corpus, run, capsys):
    keys = {**KEYS, "base_output_directory": tmp_path, "dataset_path": corpus, "checkpoint_period": 100}
    losses = dict(runs.evaluations(run[0]))
    target = (losses[5] + losses[10]) / 2
    ended = run_here(**keys, target_eval_loss=target)
    assert int(ended.state.step) == 10
    assert runs.steps_saved(tmp_path / "run") == [10]
    assert f"eval_loss {losses[10]:.4f} after step 10 reached target_eval_loss={target:g}" in capsys.readouterr().out
    again = run_here(**keys, target_eval_loss=target)
    assert int(again.state.step) == 10
    assert "finished: eval_loss" in capsys.readouterr().out
    on = run_here(**keys, target_eval_loss=losses[10] / 2)
    assert on.metrics["loss"] == run[1].metrics["loss"]
    assert int(on.state.step) == STEPS
