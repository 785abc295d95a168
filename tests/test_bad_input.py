"""What a user can get wrong about a whole run: one message that helps, exit code 2, nothing written, nothing lost."""

import json
import os
import re
import shutil
import sys

import pytest

from tests import runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    """The folder of a run of 4 steps, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    keys = {"base_output_directory": folder.parent, "dataset_path": corpus, "steps": 4, "checkpoint_period": 2}
    runs.run_here(**keys)
    return folder


@pytest.fixture
def refused(tmp_path, corpus, monkeypatch, capsys):
    """The message for the keys of a new run, which leaves no trace of itself."""

    def refusal(**keys):
        out = tmp_path / "out"
        keys = {"base_output_directory": out, "dataset_path": corpus, "steps": 4, **keys}
        message = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
        assert not out.exists()
        return message

    return refusal


def assert_says(message, *parts):
    for part in parts:
        assert part in message


# ---- The command


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"learning_rat": 1}, ["unknown key learning_rat", "Did you mean learning_rate"]),
        ({"save_period": 100}, ["checkpoint_period=100"]),  # MaxText's name
        ({"dcn_stage_parallelism": 2}, ["Did you mean dcn_pipeline_parallelism?"]),
        ({"ici_tp_parallelism": 2}, ["Did you mean ici_tensor_parallelism?"]),
        ({"steps": "many"}, ["steps", "an integer", "many"]),
        ({"model_name": "lama2-7b"}, ["model_name=lama2-7b", "llama2-7b"]),
        ({"per_device_batch_size": 0}, ["per_device_batch_size=0.0 must be a positive number (sequences"]),
        ({"dtype": "fp16"}, ["none of bfloat16, float32", "bfloat16 has float32's range"]),
        ({"report_to": "wandb"}, ["report_to", "expected a list, as in [wandb], got a string (wandb)"]),
        ({"global_parameter_scale": 3}, ["global_parameter_scale=3", "power of two"]),
        ({"ici_fsdp_parallelism": 3}, ["does not multiply out", "ici_fsdp_parallelism=3", "8 devices", "-1"]),
        ({"dcn_data_parallelism": 2}, ["does not multiply out", "dcn_data_parallelism=2", "1 slice or host"]),
        (
            {"ici_tensor_parallelism": 8},
            ["heads = 2 (base_num_query_heads or gdn_num_key_heads) is not divisible by tensor=8", "ici_tensor"],
        ),
        ({"base_emb_dim": 36}, ["embed = 36 (base_emb_dim) is not divisible by fsdp=8"]),
        ({"per_device_batch_size": 0.3}, ["per_device_batch_size=0.3", "2.4 rows", "multiple of 1"]),
        (
            {"eval_interval": 2, "eval_per_device_batch_size": 0.5},
            ["eval_per_device_batch_size=0.5", "4 rows", "8 shards"],
        ),
        ({"hardware": "tpu"}, ["hardware=tpu", "JAX found cpu"]),
        ({"sample_length": 1, "prompt": 63 * "a"}, ["aaa", "64 tokens", "max_target_length=64"]),
        ({"load_parameters_path": "/nowhere/run"}, ["no checkpoint at /nowhere/run"]),
        ({"load_full_state_path": "/nowhere/run"}, ["no checkpoint at /nowhere/run"]),
    ],
)
def test_keys(keys, parts, refused):
    assert_says(refused(**keys), *parts)


def test_malformed_yaml(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nsteps: [1\n")
    argv = [str(tmp_path / "mine.yml"), f"base_output_directory={tmp_path / 'out'}"]
    assert_says(runs.refusal(monkeypatch, capsys, argv), "mine.yml", "not valid YAML", "line 3")
    assert not (tmp_path / "out").exists()


def test_a_refused_command_ends_with_code_2_and_one_message(tmp_path, corpus):
    log = tmp_path / "log"
    keys = {"base_output_directory": tmp_path / "out", "dataset_path": corpus, "per_device_batch_size": 0.3}
    output = runs.finish(runs.start(log, devices=1, **keys), log, code=2)
    version, message = output.rstrip("\n").split("\n")
    assert version.startswith("MinText ")
    assert_says(message, "error: per_device_batch_size=0.3")
    assert not (tmp_path / "out").exists()


# ---- The data


def test_data_that_are_not_there(refused, tmp_path):
    assert_says(refused(dataset_path=tmp_path / "no"), f"dataset_path={tmp_path / 'no'}", "no such file or folder")
    said = refused(eval_interval=2, eval_dataset_path=tmp_path / "no")
    assert_says(said, f"eval_dataset_path={tmp_path / 'no'}", "no such file or folder")


def test_an_empty_folder(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_says(refused(dataset_path=tmp_path / "empty"), f"dataset_path={tmp_path / 'empty'}", "no document")


def test_a_binary_file(refused, tmp_path, corpus):
    mixed = shutil.copytree(corpus, tmp_path / "mixed")
    (mixed / "model.bin").write_bytes(b"\x89BIN\r\n\x1a\n\x00\x00")
    assert_says(refused(dataset_path=mixed), "model.bin is not a text file", "glob")


def test_a_corpus_shorter_than_a_sequence(refused, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    said = refused(dataset_path=tmp_path / "short.txt")
    assert_says(said, "6 tokens", "max_target_length=64", "dataset_path")


def test_one_document_can_not_also_be_evaluated_on(refused, tmp_path):
    (tmp_path / "one.txt").write_text("one document " * 50)
    said = refused(dataset_path=tmp_path / "one.txt", eval_interval=2)
    assert_says(said, "a single uncut document", "eval_dataset_path", "eval_interval=-1")


def test_a_tokenizer_with_more_ids_than_the_vocabulary(refused):
    assert_says(refused(vocab_size=256), "vocab_size=256", "258 ids", "byte tokenizer")


def test_a_conversation_with_a_wrong_role(refused, tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "hello"}]
    lines = [{"prompt": "hi", "completion": "hello"}, {"messages": turns}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = refused(use_sft=True, dataset_path=tmp_path / "chat.jsonl")
    assert_says(said, f"{tmp_path / 'chat.jsonl'}, line 2", "message 2", "'bot'", "assistant")


def test_messages_for_a_tokenizer_without_a_chat_template(refused, tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    said = refused(use_sft=True, dataset_path=tmp_path / "chat.jsonl")
    assert_says(said, "line 1", "tokenizer_type=huggingface", "tokenizer_path")


def test_a_model_folder_without_a_tokenizer(refused, tmp_path):
    said = refused(tokenizer_type="huggingface", tokenizer_path=tmp_path)
    assert_says(said, f"tokenizer_path={tmp_path}", "tokenizer.json", "tokenizer.model")


# ---- Where it is to be written


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("{file}/x", id="under a file"),
        pytest.param(
            "/proc/x", id="in /proc", marks=pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
        ),
    ],
)
def test_an_output_folder_that_can_not_be_written(place, refused, tmp_path):
    (tmp_path / "file.txt").write_text("here")
    place = place.format(file=tmp_path / "file.txt")
    assert_says(refused(base_output_directory=place), f"cannot write to {place}/run", "base_output_directory")
    assert runs.contents(tmp_path) == {"file.txt": b"here"}


# ---- Checkpoints


def resume(finished, tmp_path, corpus, monkeypatch, capsys, **changes):
    """The message for a changed command of a finished run, which is left byte for byte as it was."""
    folder = shutil.copytree(finished, tmp_path / "run")
    before = runs.contents(folder)
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, "steps": 8, "checkpoint_period": 2, **changes}
    message = runs.refusal(monkeypatch, capsys, runs.arguments(**keys))
    assert runs.contents(folder) == before
    return message


def test_fewer_steps_than_were_made(finished, tmp_path, corpus, monkeypatch, capsys):
    said = resume(finished, tmp_path, corpus, monkeypatch, capsys, steps=3)
    assert_says(said, "steps=3 is already reached", "the run is at step 4", "Raise steps")


def test_a_state_that_has_made_all_steps_of_a_new_run(finished, refused):
    said = refused(load_full_state_path=finished)
    assert_says(said, "steps=4 is already reached", "load_full_state_path is at step 4", "Raise steps")


def test_a_run_resumed_with_another_width(finished, tmp_path, corpus, monkeypatch, capsys):
    said = resume(finished, tmp_path, corpus, monkeypatch, capsys, base_emb_dim=64)
    accept = "accept the changes, if they keep the shapes of the weights"
    assert_says(said, "base_emb_dim: 32 -> 64", "run_name", accept)


def test_a_width_that_was_accepted_still_needs_arrays_of_that_shape(finished, tmp_path, corpus, monkeypatch, capsys):
    changes = {"base_emb_dim": 64, "accept_changes": "[base_emb_dim]"}
    said = resume(finished, tmp_path, corpus, monkeypatch, capsys, **changes)
    assert_says(said, "trainable.final_norm.scale: [32] in the checkpoint, [64] in the configuration")


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_weights_of_another_size(key, finished, refused):
    said = refused(**{key: finished, "base_emb_dim": 64, "base_mlp_dim": 64})
    assert_says(said, "trainable.final_norm.scale: [32] in the checkpoint, [64] in the configuration")
    assert "mlp_dim" not in said
    more = int(re.search(r"and (\d+) more\n", said)[1])  # of a whole state, the optimizer's two arrays a weight too
    assert (more > 20) == (key == "load_full_state_path")


def test_weights_of_another_depth(finished, refused):
    said = refused(load_parameters_path=finished, base_num_decoder_layers=3)
    assert_says(said, "trainable.segments.0.0.attention.query: [1, 32, 2, 16]", "[3, 32, 2, 16]")


def test_checkpoints_that_would_not_be_kept_up(finished, tmp_path, corpus, monkeypatch, capsys):
    said = resume(finished, tmp_path, corpus, monkeypatch, capsys, enable_checkpointing="false")
    assert_says(said, "has checkpoints", "enable_checkpointing=false", "run_name")


# ---- Help, which is no mistake


def test_help_for_a_key_is_printed_and_nothing_else_done(tmp_path):
    log = tmp_path / "log"
    output = runs.finish(runs.start_command([sys.executable, "-m", "src.train", "--help", "learning_rate"], log), log)
    assert output.count("\n") == 2
    assert_says(output, "Optimizer", "learning_rate: 3.0e-4", "peak learning rate")
