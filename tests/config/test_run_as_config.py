"""A run's folder names the run to every command: as CONFIG its settings and weights, as model_name its model."""

import contextlib
import io
import re
import shlex
from types import SimpleNamespace

import pytest

from src.config.load import to_yaml
from src.extras.evaluation import evaluate
from src.extras.generation import decode
from src.extras.hf import convert
from src.extras.next_commands import next_commands
from src.run.resolve_config import load
from src.system.errors import UserError
from tests import runs

ASKED = ["prompt=alpha", "sample_length=6", "decode_sampling_strategy=greedy"]
COMMANDS = {"src.decode": decode.main, "src.evaluate": evaluate.main, "src.convert": convert.main}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, what its last evaluation found, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = runs.write_corpus(folder / "corpus")
    keys = {"dataset_path": corpus, "steps": 4, "eval_interval": 4, "max_target_length": 32, "model_name": "gpt3-125m"}
    keys |= {"trainable_position_size": -1, "base_output_directory": folder, "run_name": "mine", "log_period": 4}
    keys |= {"accept_changes": "[steps]", "prompt": "alpha"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = runs.run_here(**keys)
    return folder / "mine", result.eval_metrics, printed.getvalue()


@pytest.fixture(scope="module")
def answer(trained):
    """What the run's model says to ASKED, by the keys that say so one by one."""
    folder = trained[0]
    return decode.main([str(folder / "config.yml"), f"load_parameters_path={folder}", *ASKED])


def test_a_run_is_asked_by_its_folder(trained, answer):
    assert decode.main([str(trained[0]), *ASKED]) == answer


def test_a_run_that_began_with_anothers_state_is_asked_for_its_own(tmp_path):
    (tmp_path / "config.yml").write_text("load_full_state_path: runs/another\nquantize_weights: int8\n")
    config = load([str(tmp_path)], uses_weights=True, command="src.evaluate")
    assert (config.checkpoint.load_parameters_path, config.checkpoint.load_full_state_path) == (str(tmp_path), "")
    assert load([str(tmp_path)]).checkpoint.load_full_state_path == "runs/another"


def test_a_run_that_began_with_another_default_keeps_it(tmp_path):
    """Resumed by its folder or by its own command; a new run has the new one, and so has one that types it."""
    keys, typed = [runs.BASE, f"base_output_directory={tmp_path}"], "logical_axis_rules.latent=[fsdp,context,expert]"
    new = load([*keys, "run_name=new"])
    own = new.mesh.logical_axis_rules
    for name, rules in (("old", {**own, "latent": ()}), ("recent", own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yml").write_text(to_yaml(new.replace(run_name=name, logical_axis_rules=rules)))
    for argv in ([*keys, "run_name=old"], [str(tmp_path / "old")], [*keys, "run_name=old", "run_name=old"]):
        assert load(argv).mesh.logical_axis_rules == {**new.mesh.logical_axis_rules, "latent": ()}
        assert load([*argv, typed]).mesh.logical_axis_rules == new.mesh.logical_axis_rules
    for name in ("recent", "none", ""):
        assert load([*keys, f"run_name={name}"]).mesh.logical_axis_rules == new.mesh.logical_axis_rules
    assert new.mesh.logical_axis_rules["latent"] == ("fsdp", "context", "expert")


def test_a_runs_folder_is_a_model_with_its_weights(trained, answer):
    keys = ["dtype=float32", f"jax_cache_dir={runs.TINY['jax_cache_dir']}", "max_target_length=24"]
    assert decode.main([runs.BASE, f"model_name={trained[0]}", *keys, *ASKED]) == answer


def test_a_run_ends_with_the_commands_that_use_it(trained):
    """They are run as they stand there."""
    folder, found, printed = trained
    commands = [shlex.split(line.partition(":")[2]) for line in printed.splitlines() if " -m src." in line]
    assert [words[3] for words in commands] == list(COMMANDS)
    results = {}
    for environment, _, _, name, *argv in commands:
        assert environment == "JAX_NUM_CPU_DEVICES=8"
        results[name] = COMMANDS[name](argv)
    assert len(results["src.decode"][0]) > 0
    assert results["src.evaluate"].items() >= found.items()
    assert (folder / "hf-4" / "model.safetensors").is_file()


def test_a_run_is_not_measured_on_what_it_trained_on(trained, tmp_path):
    with pytest.raises(UserError, match=r"by eval_fraction=0.02: eval_fraction=0.5"):
        evaluate.main([str(trained[0]), "eval_fraction=0.5"])
    keys = {"steps": 1, "max_target_length": 16, "base_output_directory": tmp_path, "run_name": "all"}
    runs.run_here(**keys, dataset_path=trained[0].parent / "corpus")
    for more in ([], ["eval_interval=4"]):
        with pytest.raises(UserError, match=r"held nothing out .eval_interval=-1.*eval_dataset_path=FILES"):
            evaluate.main([str(tmp_path / "all"), *more])


def test_nor_is_it_on_other_parts_of_the_same_files(tmp_path, monkeypatch):
    """What is held out depends on the files' names from the folder on, and on how many there are."""
    monkeypatch.chdir(tmp_path)
    corpus = runs.write_corpus(tmp_path / "corpus" / "books").parent
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yml").write_text(f"dataset_path: {corpus}\neval_interval: 5\n")
    for path in ("corpus/books", "corpus/books/01*", "corpus/*/01*.txt"):
        with pytest.raises(UserError, match=r"would hold out another part of them than dataset_path=.*/corpus. Use"):
            evaluate.main(["run", f"dataset_path={path}"])
    for path in ("corpus/../corpus", "corpus/*/*.txt"):  # the same part: only the weights are missing
        with pytest.raises(UserError, match=r"no checkpoint at .*run"):
            evaluate.main(["run", f"dataset_path={path}"])


def test_nor_are_weights_on_what_their_run_trained_on(trained, tmp_path, monkeypatch):
    """A config file with a run's weights says nothing of what that run held out, nor do texts cut in another way."""
    monkeypatch.chdir(tmp_path)
    keys = {"max_target_length": 16, "base_output_directory": tmp_path, "steps": 1}
    corpus = trained[0].parent / "corpus"
    runs.run_here(**keys, dataset_path=corpus, run_name="all")
    named = {"eval_interval": 1, "eval_steps": 1, "eval_dataset_path": corpus}
    runs.run_here(**keys, **named, dataset_path=corpus, run_name="named")
    (tmp_path / "all").rename(tmp_path / "2024")  # a name like a step's
    (tmp_path / "all").symlink_to("2024")
    for weights, why in (
        (tmp_path / "2024", "eval_interval=-1"),
        (tmp_path / "all", "eval_interval=-1"),
        (f"{tmp_path}/all/checkpoints/1/", "eval_interval=-1"),
        ("all/checkpoints", "eval_interval=-1"),
        (tmp_path / "named", "its own evaluation data are named"),
    ):
        argv = runs.arguments(**keys, dataset_path=f"{corpus}/../corpus", load_parameters_path=weights)
        for more in ([], ["max_document_bytes=100"]):
            with pytest.raises(UserError, match=f"held nothing out .{why}.*eval_dataset_path=FILES"):
                evaluate.main([*argv, *more])
    argv = runs.arguments(**keys, load_parameters_path=tmp_path / "all", dataset_path=corpus)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "all")
        with pytest.raises(UserError, match="held nothing out"):
            evaluate.main([*argv, "load_parameters_path=checkpoints/1"])
    assert "eval_loss" in evaluate.main([*argv, f"eval_dataset_path={corpus}", "eval_steps=1"])


def test_what_would_not_work_is_not_printed(tmp_path, capsys):
    """Random tokens have no text to ask for, a run without evaluation held nothing out."""
    keys = {"dataset_type": "synthetic", "steps": 1}
    runs.run_here(**keys, base_output_directory=tmp_path)
    assert re.findall(r" -m (src\.\w+)", capsys.readouterr().out) == ["src.convert"]


def test_training_goes_on_by_a_runs_folder(trained):
    folder = trained[0]
    config = load([str(folder), "steps=9"])
    assert (config.run.base_output_directory, config.run.run_name, config.run.steps) == (str(folder.parent), "mine", 9)
    assert config.checkpoint.load_parameters_path == ""
    assert config.run.accept_changes == (), "it is said anew"
    assert load([str(folder), "run_name=other"]).run.run_name == "other"


def test_a_run_of_several_processes_is_opened_by_one(tmp_path):
    (tmp_path / "config.yml").write_text("coordinator_address: host:1\nnum_processes: 2\nprocess_id: 0\n")
    config = load([str(tmp_path)])
    assert (config.mesh.coordinator_address, config.mesh.num_processes, config.mesh.process_id) == ("", -1, -1)


def test_typed_weights_win_over_the_runs(trained):
    folder = trained[0]
    assert load([str(folder)], uses_weights=True).checkpoint.load_parameters_path == str(folder)
    typed = load([str(folder), "load_parameters_path=x"], uses_weights=True)
    assert typed.checkpoint.load_parameters_path == "x"
    by_model = [runs.BASE, f"model_name={folder}", "max_target_length=32"]
    assert load(by_model, uses_weights=True).checkpoint.load_parameters_path == str(folder)
    assert load(by_model).checkpoint.load_parameters_path == "", "to train is to begin anew"


def test_a_model_that_is_gone_is_not_looked_for(trained, tmp_path):
    text = (trained[0] / "config.yml").read_text().replace("model_name: gpt3-125m", "model_name: gone/folder")
    (tmp_path / "config.yml").write_text(text)
    assert load([str(tmp_path)]).model.base_emb_dim == runs.TINY["base_emb_dim"]
    by_model = [runs.BASE, f"model_name={tmp_path}", "max_target_length=32"]
    assert load(by_model).model.base_emb_dim == runs.TINY["base_emb_dim"]


def test_another_model_for_a_run_is_refused(trained):
    with pytest.raises(UserError, match="is a run, and a run keeps its own model"):
        load([str(trained[0]), "model_name=llama2-7b"])


def test_a_folder_of_runs_names_them(trained):
    with pytest.raises(UserError, match=r"without a config\.yml.*Runs in it: .*mine\.$"):
        load([str(trained[0].parent)])


def test_a_models_folder_is_answered_by_the_keys_that_name_it(tmp_path):
    converted, exported = tmp_path / "converted", tmp_path / "exported"
    for folder, file in ((converted, "model.yml"), (exported, "config.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    keys = f"model_name={converted}/model.yml load_parameters_path={converted}/checkpoint"
    with pytest.raises(UserError, match=f"not a run's: type configs/base.yml {keys}$"):
        load([str(converted)])
    with pytest.raises(UserError, match=f"is a folder with a model file: type {keys}$"):
        load([f"model_name={converted}"])
    with pytest.raises(
        UserError, match=f"type configs/base.yml model_name={exported} load_parameters_path={exported}$"
    ):
        load([str(exported)])


def test_a_run_that_is_not_there_names_those_beside_it(trained):
    with pytest.raises(UserError, match=r"there is no run .*/mime\. Did you mean /.*/mine\? Runs in .*: .*mine\.$"):
        load([str(trained[0].parent / "mime")])
    with pytest.raises(UserError, match=r"there is no run .*/another\. Runs in "):  # which is like none of them
        load([str(trained[0].parent / "another")])


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        (["use_sft=true", "dataset_path=chats.jsonl", "prompt=hi"], "interactive=true use_chat_template=true"),
        (["dataset_path=texts", "prompt=hi"], "prompt=hi"),
        (["dataset_path=texts"], "interactive=true"),  # not with the first word of a Python program
        ([], "'prompt=def '"),
    ],
)
def test_a_model_is_asked_as_its_data_are(tmp_path, keys, asked):
    config = load(keys or ["steps=1"])
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    ask, *_ = next_commands(
        tmp_path, tokenizer, config.data, config.decoding.prompt, config.evaluation.eval_interval, config.run.steps
    )
    assert ask.endswith(f"src.decode {tmp_path} {asked}")


def test_weights_of_another_shape_name_the_way(trained):
    keys = ["base_emb_dim=64", "dtype=float32", "vocab_size=258"]
    with pytest.raises(UserError) as refused:
        decode.main([runs.BASE, *keys, f"load_parameters_path={trained[0]}", *ASKED])
    message = str(refused.value)
    assert "run's folder as CONFIG" in message
    assert message.count(" in the checkpoint, ") == 5
    assert " more\n" in message


def test_a_run_of_adapters_is_asked_by_its_folder(trained, capsys):
    """Its weights are those that it was trained on, which its config.yml names, with its own adapters."""
    folder = trained[0]
    runs.main([str(folder), "run_name=adapters", f"load_parameters_path={folder}", "lora_rank=2", "steps=1"])
    (text,) = decode.main([str(folder.parent / "adapters"), *ASKED])
    assert text
    printed = capsys.readouterr().out
    assert f"merged the adapters of {folder.parent / 'adapters'} into the weights of {folder}.\n" in printed


def test_resuming_by_the_folder_is_the_same_run(trained, capsys):
    folder = trained[0]
    result = runs.main([str(folder), "steps=6"])
    assert int(result.state.step) == 6
    assert "resumed from step 4" in capsys.readouterr().out


def test_the_average_that_a_run_began_with_is_not_asked_of_itself(tmp_path):
    text = to_yaml(load([runs.BASE, "load_parameters_path=other", "load_ema=true"]))
    (tmp_path / "config.yml").write_text(text)
    assert load([str(tmp_path)]).checkpoint.load_ema
    assert not load([str(tmp_path)], uses_weights=True).checkpoint.load_ema
    assert load([str(tmp_path), "load_ema=true"], uses_weights=True).checkpoint.load_ema


@pytest.mark.parametrize("path", ["..", "../.", "."])
def test_a_runs_folder_is_named_from_within_it(tmp_path, monkeypatch, path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yml").write_text("steps: 5\n")
    monkeypatch.chdir(tmp_path / "run" / ("" if path == "." else "checkpoints"))
    run = load([path]).run
    assert (run.base_output_directory, run.run_name) == (str(tmp_path), "run")


def test_learned_positions_of_a_model_whose_config_has_no_length_have_the_default_length(tmp_path):
    (tmp_path / "config.yml").write_text("position_type: learned\ntrainable_position_size: -1\n")
    assert load([f"model_name={tmp_path}"]).model.trainable_position_size == 2048
