"""A run that is interrupted and started again ends as if nothing had happened; what it may change in between."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from src.checkpoint.data_position import Fact, accepted_by, remapped_streams, rows_consumed
from src.checkpoint.load_weights import check_tokenizer
from src.data.open import open_sources
from src.data.tokenizer import ByteTokenizer
from src.data.types import InputSpec
from src.extras.evaluation import evaluate
from src.run import resolve_config
from src.step import train_step
from tests import runs
from tests.data.one_source import train_batches

STEPS = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def assert_same_run(folder, expected, steps):
    """Every step once and in order; each loss and each bit of the last state those of the uninterrupted run."""
    assert [step for step, _ in runs.losses(folder)] == list(range(1, steps + 1))
    assert runs.losses(folder) == runs.losses(expected)
    assert runs.bits(runs.saved_arrays(folder, steps)) == runs.bits(runs.saved_arrays(expected, steps))


# ---- Killed and terminated: commands of their own, the same each time; in long tests compiled as for users


class Command:
    """One command line, started as often as need be, and the same run without an interruption."""

    def __init__(self, place, corpus, devices, steps, checkpoint_period, optimised=True, **mesh):
        self.place, self.steps, self.devices, self.optimised = place, steps, devices, optimised
        self.keys = {"dataset_path": corpus, "steps": steps, "checkpoint_period": checkpoint_period, **mesh}
        place.mkdir(exist_ok=True)
        self.folder = place / "interrupted"
        self.whole = place / "whole"
        runs.finish(self._start(self.whole, "whole.log"), place / "whole.log")

    def start(self, log):
        return self._start(self.folder, log)

    def finish(self):
        return runs.finish(self.start("last.log"), self.place / "last.log")

    def _start(self, folder, log):
        keys = {"base_output_directory": folder.parent, "run_name": folder.name, **self.keys}
        return runs.start(self.place / log, self.devices, optimised=self.optimised, **keys)

    def kill_at_random(self, kills, seed):
        """Starts the run and kills it, so many times; returns the steps that were on file when it died."""
        rng = random.Random(seed)
        reached = [0]
        for kill in range(kills):
            log = self.place / f"{kill}.log"
            process = self.start(log.name)
            with runs.ended(process):
                # At most so far on that the run outlasts all the kills; no step on: as soon as it was restored.
                steps = rng.randint(0, 2 * (self.steps - reached[-1]) // (kills - kill + 1))
                target = min(reached[-1] + steps, self.steps - 1)
                runs.wait_until(lambda at=log: "\nsteps " in at.read_text(), process)
                runs.wait_until(lambda at=target: runs.last_step(self.folder) >= at, process)
                time.sleep(rng.uniform(0, 0.03))
                process.send_signal(signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL, log.read_text()
            reached.append(runs.last_step(self.folder))
        return reached[1:]


MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def test_killed_and_terminated_the_same_command_goes_on(tmp_path, corpus):
    command = Command(tmp_path, corpus, devices=4, steps=40, checkpoint_period=8, optimised=False, **MESH)
    (killed,) = command.kill_at_random(1, seed=23)
    assert killed > 16, "the checkpoint of step 8 may not be whole"
    process = command.start("terminated.log")
    with runs.ended(process):
        runs.wait_until(lambda: runs.last_step(command.folder) > killed, process)
        process.send_signal(signal.SIGTERM)
        output = runs.finish(process, command.place / "terminated.log", code=128 + signal.SIGTERM)
    stopped = runs.last_step(command.folder)
    assert killed < stopped < command.steps
    assert runs.steps_saved(command.folder)[-1] == stopped
    assert "resumed from step" in output
    assert "changed since" not in output
    assert f"stopped by SIGTERM after step {stopped}; the checkpoint of step {stopped} in " in output
    assert (command.folder / "report.html").exists()
    output = command.finish()
    assert f"resumed from step {stopped}" in output
    assert "changed since" not in output
    assert_same_run(command.folder, command.whole, command.steps)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
def test_killed_at_ten_random_moments(tmp_path, corpus, devices):
    command = Command(tmp_path, corpus, devices, steps=200, checkpoint_period=20)
    reached = command.kill_at_random(10, seed=devices)
    command.finish()
    print(f"killed on {devices} devices with these steps on file: {reached}")
    assert_same_run(command.folder, command.whole, command.steps)


@pytest.mark.long  # in one process: test_checkpoint_meshes.py
def test_a_mesh_of_four_devices_gives_the_losses_of_eight(corpus, tmp_path):
    """Here, because other tests of meshes leave most of the compiler's optimisations out."""
    command = Command(tmp_path / "four", corpus, devices=4, steps=40, checkpoint_period=8, **MESH)
    schedule = {"steps": 8, "learning_rate_schedule_steps": command.steps}
    runs.run_here(base_output_directory=tmp_path, dataset_path=corpus, checkpoint_period=8, **schedule)
    _, expected = zip(*runs.losses(tmp_path / "run"), strict=True)
    _, losses = zip(*runs.losses(command.whole)[:8], strict=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < 0.95 * losses[0]


# ---- Stopped at step 20 of 30, in this process


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The folder of a run of 30 steps with all of its checkpoints, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    runs.run_here(**keys_of(folder, corpus))
    return folder


def keys_of(folder, corpus, **changes):
    """The keys of that run in another folder."""
    keys = {
        "base_output_directory": folder.parent,
        "dataset_path": corpus,
        "steps": STEPS,
        "checkpoint_period": 5,
        "max_num_checkpoints_to_keep": -1,
        "eval_interval": STEPS,
        "eval_steps": 2,
    }
    return {**keys, **changes}


@pytest.fixture
def stopped(whole, tmp_path):
    """The folder of the same run as it was killed after step 22, whose last checkpoint is that of step 20."""
    folder = shutil.copytree(whole, tmp_path / "run")
    for step in (25, 30):
        shutil.rmtree(folder / "checkpoints" / str(step))
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:22]) + '{"step": 23, "lo')
    return folder


def test_a_torn_line_and_steps_after_the_checkpoint_are_made_again(stopped, whole, corpus, capsys):
    runs.run_here(**keys_of(stopped, corpus))
    assert "resumed from step 20" in capsys.readouterr().out
    assert_same_run(stopped, whole, STEPS)
    assert runs.evaluations(stopped) == runs.evaluations(whole)


def test_other_code_packages_or_devices_are_named(stopped, whole, corpus, capsys):
    """Of another commit, losses may differ in the last bits; a malformed file says nothing, and is written again."""
    file = stopped / "environment.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "MinText": "0.1.0 (f47738a)", "jax": "0.9.1"}))
    runs.run_here(**keys_of(stopped, corpus, steps=21, learning_rate_schedule_steps=STEPS))
    said = f"changed since the run's last start: MinText 0.1.0 (f47738a) -> {facts['MinText']}, jax 0.9.1 -> "
    output = capsys.readouterr().out
    assert f"{said}{facts['jax']}: losses may differ in the last bits\n" in output
    for steps, content in ((22, file.read_text()), (23, "[")):
        file.write_text(content)
        runs.run_here(**keys_of(stopped, corpus, steps=steps, learning_rate_schedule_steps=STEPS))
        assert "last bits" not in capsys.readouterr().out
    assert json.loads(file.read_text())["MinText"] == facts["MinText"]


def test_harmless_changes_are_named_and_taken(stopped, whole, corpus, capsys):
    result = runs.run_here(**keys_of(stopped, corpus, learning_rate=1e-3, log_period=7))
    output = capsys.readouterr().out
    assert "changed since the run's last start: learning_rate: 0.01 -> 0.001" in output
    assert "changed since the run's last start: log_period: 1 -> 7" in output
    assert result.metrics["learning_rate"] == pytest.approx(runs.lines(whole)[-2]["learning_rate"] / 10)
    assert runs.losses(stopped)[:21] == runs.losses(whole)[:21]
    assert runs.losses(stopped)[21:] != runs.losses(whole)[21:]


def test_a_raised_number_of_steps_goes_on(stopped, whole, corpus):
    """The rate of a schedule that ended is zero, so there is nothing more to learn, and nothing to break."""
    runs.run_here(**keys_of(stopped, corpus, steps=33, learning_rate_schedule_steps=30))
    assert runs.losses(stopped)[:30] == runs.losses(whole)
    assert [step for step, _ in runs.losses(stopped)] == list(range(1, 34))


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"data_shuffle_seed": 1}, "data_shuffle_seed", "data_shuffle_seed: 0 -> 1"),
        (
            {"per_device_batch_size": 2},
            "per_device_batch_size",
            "run had different batches (old -> new):\n  global batch: 8 -> 16\nGive per_device_batch_size, ",
        ),
        ({"max_target_length": 32}, "max_target_length", "max_target_length: 64 -> 32"),
        ({"rope_max_timescale": 500}, "rope_max_timescale", "rope_max_timescale: 10000 -> 500"),
        ({"opt_type": "sgd"}, "opt_type", "opt_type: adamw -> sgd\n"),
        # Documents that were held out would now be trained on.
        ({"eval_interval": -1}, "eval_interval", "source part"),
    ],
)
def test_changes_of_weights_or_data_are_refused(stopped, corpus, changes, key, message, monkeypatch, capsys):
    before = runs.contents(stopped)
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys_of(stopped, corpus, **changes)))
    assert message in said
    assert f"accept_changes=[{key}]" in said
    assert runs.contents(stopped) == before


def test_an_accepted_change_is_taken(stopped, whole, corpus, capsys):
    runs.run_here(**keys_of(stopped, corpus, data_shuffle_seed=1, accept_changes="[data_shuffle_seed]"))
    assert "resumed from step 20" in capsys.readouterr().out
    assert [step for step, _ in runs.losses(stopped)] == list(range(1, STEPS + 1))
    assert runs.losses(stopped)[:20] == runs.losses(whole)[:20]
    assert runs.losses(stopped)[20] != runs.losses(whole)[20]


def test_another_corpus_is_noticed(stopped, corpus, tmp_path, monkeypatch, capsys):
    grown = shutil.copytree(corpus, tmp_path / "grown")
    (grown / "more.txt").write_text("epsilon " * 20)
    # As if the data had grown where they are: the configuration is the same.
    config = stopped / "config.yml"
    config.write_text(config.read_text().replace(str(corpus), str(grown)))
    before = runs.contents(stopped)
    keys = keys_of(stopped, grown)
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert "other data" in said
    assert "source files: 60 -> 61" in said
    assert "source file more.txt: added, 160 bytes" in said
    assert runs.contents(stopped) == before
    runs.run_here(**keys, accept_changes="[dataset_path]")
    assert runs.losses(stopped)[-1][0] == STEPS


def test_a_file_changed_at_the_same_size_is_noticed(stopped, corpus, tmp_path, monkeypatch, capsys):
    changed = shutil.copytree(corpus, tmp_path / "changed")
    file = min(changed.iterdir())
    file.write_text(file.read_text().swapcase())
    config = stopped / "config.yml"
    config.write_text(config.read_text().replace(str(corpus), str(changed)))
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys_of(stopped, changed)))
    assert "other data" in said
    assert "source contents: " in said


def test_an_accepted_global_batch_goes_on_after_as_many_documents(stopped, corpus, tmp_path, capsys):
    taken = int(runs.saved_arrays(stopped, 20)["data_position"][:, 0, 0].sum())
    changes = {"per_device_batch_size": 2, "eval_per_device_batch_size": 1}
    runs.run_here(**keys_of(stopped, corpus, **changes, accept_changes="[per_device_batch_size]"))
    assert f"the global batch changed: the data continue after {taken} documents" in capsys.readouterr().out
    # The ten steps that were left read what comes after the first documents of the stream: as many as were taken.
    config = resolve_config.load(runs.arguments(**keys_of(stopped, corpus, **changes)))
    data, _ = open_sources(InputSpec.of(config, ByteTokenizer()), config.evaluation)
    position = np.array([[[len(range(row, taken, 16)), 0]] for row in range(16)], np.int32)
    batches = train_batches(config, data, ByteTokenizer(), range(16), 16, 20 * 8, position)
    expected = list(itertools.islice(batches, 10))[-1]["data_position"]
    batches.close()
    np.testing.assert_array_equal(runs.saved_arrays(stopped, STEPS)["data_position"], expected)


def test_rolling_evaluations_and_mixtures_go_on_as_without_a_stop(corpus, tmp_path):
    other = runs.write_corpus(tmp_path / "other", seed=5)
    keys = {
        "datasets": f"[{{name: one, weight: 2, dataset_path: {corpus}}}, {{name: two, dataset_path: {other}}}]",
        "eval_datasets": f"[{{name: a, eval_steps: 2, dataset_path: {other}}}, {{name: b, dataset_path: {corpus}}}]",
        "eval_steps": 1,
        "eval_mode": "rolling",
        "eval_interval": 3,
        "checkpoint_period": 5,
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder, steps in ((whole, 12), (halves, 6), (halves, 12)):
        runs.run_here(**keys, steps=steps, learning_rate_schedule_steps=12, base_output_directory=folder)
    evaluations = [[line for line in runs.lines(folder / "run") if "eval_loss/a" in line] for folder in (whole, halves)]
    assert evaluations[0] == evaluations[1]
    assert [line["step"] for line in evaluations[0]] == [3, 6, 9, 12]
    assert_same_run(halves / "run", whole / "run", 12)


def test_each_source_of_a_changed_mixture_goes_on_where_it_was(corpus, tmp_path, capsys):
    """Names say which source a position is of, whatever order they come in; what is new begins at its start."""
    paths = {name: runs.write_corpus(tmp_path / name, seed=seed) for seed, name in enumerate("abc")}

    def keys(**weights):
        entries = (
            f"{{name: {name}, weight: {weight}, dataset_path: {paths[name]}}}" for name, weight in weights.items()
        )
        return {"datasets": f"[{', '.join(entries)}]", "base_output_directory": tmp_path / "runs"}

    runs.run_here(**keys(a=3, b=1), steps=20, checkpoint_period=20, learning_rate_schedule_steps=40)
    before = runs.saved_arrays(tmp_path / "runs" / "run", 20)["data_position"]
    changed = keys(b=1, c=2, a=1)
    accepted = {"steps": 21, "learning_rate_schedule_steps": 40, "accept_changes": "[datasets]"}
    capsys.readouterr()
    runs.run_here(**changed, **accepted)
    said = capsys.readouterr().out
    assert "accepted: source weights: a 3, b 1 -> b 1, c 2, a 1" in said
    assert "the data of c start from the beginning" in said
    after = runs.saved_arrays(tmp_path / "runs" / "run", 21)["data_position"]
    # One more step: eight rows, of which each packing stream took one from one source.
    moved = (after != np.stack([before[:, 1], np.zeros_like(before[:, 0]), before[:, 0]], axis=1)).any(axis=2)
    assert (moved.sum(axis=1) == 1).all()
    assert moved.sum(axis=0).tolist() == [2, 4, 2]


@pytest.mark.parametrize(
    ("entry", "fact", "is_file", "key"),
    [
        ("source files", ("", "files"), False, "dataset_path"),
        ("source file a b.txt", ("", "file a b.txt"), True, "dataset_path"),
        ("source my file x bytes", ("my file x", "bytes"), False, "datasets"),
        ("source a file b contents", ("a", "file b contents"), True, "dataset_path"),
        ("source a b digest", ("a b", "digest"), False, "datasets"),
        ("source chosen by me", ("", "chosen by me"), False, "dataset_path"),  # a fact of a custom source
        ("source weights", (None, "source weights"), False, "datasets"),
        ("chat template", (None, "chat template"), False, "tokenizer_path"),
    ],
)
def test_what_an_entry_of_a_fingerprint_is_about_does_not_hang_on_the_words_in_names(entry, fact, is_file, key):
    read = Fact.of(entry, ["my file x", "a", "a b", ""])
    assert read == fact
    assert read.is_file == is_file
    assert accepted_by(entry, read)[0] == key


def test_rows_of_tokens_go_on_after_a_change_of_weights_batch_and_length():
    weights = {"names": ["a", "b"], "weights": [1.0, 1.0]}
    meta = {
        "data": {"global batch": 8, "max_target_length": 64, "packing": True},
        "mixture": weights,
        "rows_taken": 1000,
        "rows_before": {},
    }
    entries = "[{name: b, weight: 9, dataset_path: x}, {name: a, dataset_path: x}]"
    config = resolve_config.load(runs.arguments(datasets=entries))

    def so_far(meta, **facts):
        return rows_consumed(125, meta, config.data, {**meta["data"], **facts})

    assert so_far(meta) == (0, {"a": 500, "b": 500})
    assert so_far(meta, **{"global batch": 16, "max_target_length": 32}) == (0, {"a": 1000, "b": 1000})
    same = {**meta, "mixture": {"names": ["b", "a"], "weights": [9.0, 1.0]}, "rows_before": {"a": 7}}
    assert so_far(same) == (1000, {"a": 7})
    assert so_far(same, **{"global batch": 16}) == (0, {"b": 900, "a": 107})
    old = {"data": meta["data"]}  # of one source, before rows were counted
    assert rows_consumed(125, old, resolve_config.load(runs.arguments()).data, meta["data"]) == (1000, {})


def test_rows_without_documents_are_not_counted_in_documents():
    """The positions of synthetic rows, and of ids in rows, are zeros."""
    meta, data = {"data": {"global batch": 8}}, resolve_config.load(runs.arguments()).data
    assert remapped_streams(np.zeros((8, 1, 2), np.int32), meta, data, 16)[1] == []
    (line,) = remapped_streams(np.full((8, 1, 2), 3, np.int32), meta, data, 16)[1]
    assert line.endswith("the data continue after 24 documents or pieces of them")


# ---- Damaged checkpoints


def damage_all(damage, folder, step):
    """Damages each file of a checkpoint that holds values; some, Orbax does not read again."""
    for path in (folder / "checkpoints" / str(step) / "state").rglob("d/*"):
        damage(path)


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete, pytest.param(truncate, marks=pytest.mark.long), flip_a_bit])
def test_a_damaged_checkpoint_is_passed_over(stopped, whole, corpus, damage, capsys):
    damage_all(damage, stopped, 20)
    runs.run_here(**keys_of(stopped, corpus))
    output = capsys.readouterr().out
    assert "checkpoint 20 is passed over" in output
    assert "resumed from step 15" in output
    assert_same_run(stopped, whole, STEPS)
    assert runs.steps_saved(stopped) == runs.steps_saved(whole)
    # The damaged one was made again, and is there too.
    assert (stopped / "checkpoints" / "20.damaged").is_dir()
    assert runs.bits(runs.saved_arrays(stopped, 20)) == runs.bits(runs.saved_arrays(whole, 20))


def test_a_run_without_a_good_checkpoint_is_left_as_it_is(stopped, corpus, monkeypatch, capsys):
    for step in runs.steps_saved(stopped):
        damage_all(flip_a_bit, stopped, step)
    before = runs.contents(stopped)
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys_of(stopped, corpus)))
    assert "no checkpoint" in said
    assert all(f"\n  {step}: " in said for step in (5, 10, 15, 20))
    assert "run_name" in said
    assert runs.contents(stopped) == before


# ---- From another run


def test_weights_of_another_run_start_a_new_one(whole, corpus, tmp_path, capsys):
    """A rate of next to nothing leaves them as they are, so the evaluation is that of the other run's last step."""
    folder = tmp_path / "new" / "run"
    before = runs.contents(whole)
    keys = keys_of(folder, corpus, load_parameters_path=whole, learning_rate=1e-30, adam_weight_decay=0)
    runs.run_here(**{**keys, "steps": 2, "eval_interval": 2})
    output = capsys.readouterr().out
    assert "restored the weights from checkpoint 30" in output
    assert [step for step, _ in runs.losses(folder)] == [1, 2]
    assert runs.evaluations(folder)[0][1] == runs.evaluations(whole)[0][1]
    assert runs.losses(folder)[0][1] < 0.5 * runs.losses(whole)[0][1]
    # A run from another's weights starts at the beginning of the data, as any new run does.
    np.testing.assert_array_equal(
        runs.saved_arrays(folder, 2)["opt.0.count"], np.int32(2), "the optimizer starts afresh too"
    )
    # Started again, it goes on from its own checkpoint.
    runs.run_here(**{**keys, "steps": 4, "eval_interval": 2})
    assert "resumed from step 2" in capsys.readouterr().out
    assert [step for step, _ in runs.losses(folder)] == [1, 2, 3, 4]
    assert runs.contents(whole) == before


def test_weights_that_know_another_tokenizer_are_refused_until_that_is_accepted(
    whole, corpus, tmp_path, monkeypatch, capsys
):
    words = Tokenizer(models.WordLevel({"[end]": 0, "alpha": 1, "beta": 2, "gamma": 3, "delta": 4}, unk_token="[end]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[end]"}')
    keys = keys_of(tmp_path / "new" / "run", corpus, load_parameters_path=whole)
    keys |= {"steps": 2, "tokenizer_type": "huggingface", "tokenizer_path": tmp_path}
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert "type: byte -> huggingface" in said
    assert "vocab_size: 258 -> 5" in said
    assert "accept_changes=[tokenizer_path]" in said
    runs.run_here(**keys, accept_changes="[tokenizer_path]")
    meta = json.loads((tmp_path / "new" / "run" / "checkpoints" / "2" / "meta" / "metadata").read_text())
    tokenizer = meta["meta"]["tokenizer"]
    assert (tokenizer["type"], tokenizer["eos"]) == ("huggingface", 0)


@pytest.mark.parametrize("meta", [{}, {"tokenizer": None}, {"tokenizer": ByteTokenizer().fingerprint()}])
def test_weights_that_know_no_other_tokenizer_are_taken(meta):
    check_tokenizer((), meta, ByteTokenizer())
    check_tokenizer((), meta, None)


def test_the_whole_state_of_another_run_goes_on_as_that_run_did(whole, corpus, tmp_path):
    folder = tmp_path / "new" / "run"
    path = whole / "checkpoints" / "20"
    runs.run_here(**keys_of(folder, corpus, load_full_state_path=path))
    assert runs.losses(folder) == runs.losses(whole)[20:]
    assert runs.bits(runs.saved_arrays(folder, STEPS)) == runs.bits(runs.saved_arrays(whole, STEPS))


# ---- Losses that are not finite


# With the first, weights have no norm; with the second, the next step's loss is not finite.
HUGE = {"learning_rate": 1e30, "gradient_clipping_threshold": 0}
LARGE = {"learning_rate": 1e11, "gradient_clipping_threshold": 0}


@pytest.mark.parametrize("answer", ["stop", "skip"])
def test_an_update_that_ruins_the_weights_stops_the_run_before_they_are_saved(
    answer, stopped, corpus, monkeypatch, capsys
):
    keys = keys_of(stopped, corpus, **HUGE, on_nonfinite=answer, checkpoint_period=1, max_num_checkpoints_to_keep=1)
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert "step 21: the update made weights so large" in said
    assert runs.steps_saved(stopped) == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param("stop", "step 22: loss .* are not both finite", marks=pytest.mark.long),
        ("skip", "step 30: the last 9 updates were skipped"),
    ],
)
def test_a_checkpoint_that_leads_to_no_finite_loss_is_set_aside_and_the_one_before_it_stands(
    answer, message, stopped, whole, corpus, monkeypatch, capsys
):
    monkeypatch.setattr(train_step, "_usable", lambda trainable: jnp.bool_(True))  # which is no proof that they are
    keys = keys_of(stopped, corpus, **LARGE, on_nonfinite=answer, checkpoint_period=1, max_num_checkpoints_to_keep=1)
    said = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert re.search(message, said)
    assert "21.nonfinite" in said
    assert f"The checkpoint of step 20 in {stopped} is intact, and the run resumes from it." in said
    assert ("on_nonfinite=skip" in said) == (answer == "stop")
    assert {path.name for path in (stopped / "checkpoints").iterdir()} == {"20", "21.nonfinite", "evaluations.json"}
    monkeypatch.undo()
    runs.run_here(**keys_of(stopped, corpus))
    assert_same_run(stopped, whole, STEPS)


# ---- What some runs keep beside weights and optimizer


KEPT = {
    "ema_decay": 0.9,
    "skip_step_on_spikes": True,
    "skip_step_interval": 4,
    "skip_step_scaling_factor": 0.5,
    "learning_rate": 1e-4,
    "log_internals": 3,
    "eval_interval": 5,
    "eval_steps": 2,
    "eval_fraction": 0.2,
    "shard_optimizer_over_data": True,
    "ici_data_parallelism": 2,
    "optimizer_rules": """[{match: "*.scale", opt_type: sgd, learning_rate_scale: 0.1},
        {match: "attention.*", opt_type: muon}]""",
}


@pytest.mark.long
def test_averages_spikes_and_rules_go_on_where_they_were(tmp_path, corpus, monkeypatch, capsys):
    keys = {**KEPT, "base_output_directory": tmp_path, "dataset_path": corpus, "checkpoint_period": 5}
    runs.run_here(**keys, run_name="whole", steps=12)
    runs.run_here(**keys, run_name="cut", steps=5, learning_rate_schedule_steps=12)
    runs.run_here(**keys, run_name="cut", steps=12)
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 12)
    whole, cut = (
        [{key: line[key] for key in line if "second" not in key and "tflops" not in key} for line in runs.lines(run)]
        for run in (tmp_path / "whole", tmp_path / "cut")
    )
    assert whole == cut
    assert [line["step"] for line in whole if "activation_rms" in line] == [3, 6, 9, 12]
    assert [line for line in whole if "loss" in line][-1]["updates_skipped"] > 0
    assert "*.scale: 3 weights, 96 parameters: sgd, learning rate x 0.1" in capsys.readouterr().out
    saved = runs.saved_arrays(tmp_path / "cut", 12)
    assert {name.partition(".")[2] for name in saved if name.startswith("ema.")} == {
        name.partition(".")[2] for name in saved if name.startswith("trainable.")
    }
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    own, average = (evaluate.main([str(tmp_path / "cut"), f"load_ema={ema}"]) for ema in ("false", "true"))
    np.testing.assert_allclose(whole[-1]["eval_loss"], own["eval_loss"], rtol=1e-6)
    np.testing.assert_allclose(whole[-1]["eval_ema_loss"], average["eval_loss"], rtol=1e-6)
    assert own["eval_loss"] != average["eval_loss"]
    refusal = runs.refusal(monkeypatch, capsys, runs.arguments(**{**keys, "ema_decay": 0}, run_name="cut", steps=13))
    assert "ema_decay: 0.9 -> 0.0" in refusal


@pytest.mark.long
def test_an_average_may_change_its_pace_or_end_but_not_begin(tmp_path, corpus, monkeypatch, capsys):
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "run_name": "run", "base_num_decoder_layers": 1}
    keys["learning_rate_schedule_steps"] = 4
    runs.run_here(**keys, steps=1, ema_decay=0.9)
    for steps, decay in ((2, 0.5), (3, 0)):
        next_start = {**keys, "steps": steps, "ema_decay": decay}
        refusal = runs.refusal(monkeypatch, capsys, runs.arguments(**next_start))
        assert "accept_changes=[ema_decay]" in refusal
        runs.run_here(**next_start, accept_changes="[ema_decay]")
        assert any(name.startswith("ema.") for name in runs.saved_arrays(tmp_path / "run", steps)) == bool(decay)
    assert [line["step"] for line in runs.lines(tmp_path / "run") if "loss" in line] == [1, 2, 3]
    accepted = {**keys, "steps": 4, "ema_decay": 0.9, "accept_changes": "[ema_decay]"}
    refusal = runs.refusal(monkeypatch, capsys, runs.arguments(**accepted))
    assert "lacks arrays that this run needs to continue: set ema_decay=0" in refusal


# ---- Checkpoints that are gone


def test_a_run_whose_checkpoints_are_gone_begins_anew_and_keeps_its_metrics(stopped, whole, corpus, capsys):
    for count in (1, 2):
        shutil.rmtree(stopped / "checkpoints")
        before = (stopped / "metrics.jsonl").read_bytes()
        capsys.readouterr()
        runs.run_here(**keys_of(stopped, corpus, steps=2, learning_rate_schedule_steps=STEPS))
        said = capsys.readouterr().out
        assert "an earlier start left no checkpoint to resume from" in said
        assert f"its metrics are in metrics.{count}.jsonl" in said
        assert (stopped / f"metrics.{count}.jsonl").read_bytes() == before
        assert runs.losses(stopped) == runs.losses(whole)[:2]
