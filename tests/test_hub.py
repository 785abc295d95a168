"""`hf://ORG/NAME` wherever a model's folder may stand, through huggingface_hub itself and a server on this machine."""

import errno
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants, file_download

from src.config.load import from_yaml, to_yaml
from src.extras.datasets import train_tokenizer
from src.extras.evaluation import evaluate
from src.extras.hf import convert, hub
from src.run import resolve_config
from src.system.errors import TransientError, UserError
from tests import runs
from tests.hub_server import HubServer

HIDDEN, LAYERS, VOCAB = 32, 1, 300


def write_llama(folder, seed=0):
    """A random Llama with a tokenizer, as transformers would save it, without transformers."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    for kind, shape in {"q": (32, HIDDEN), "k": (32, HIDDEN), "v": (32, HIDDEN), "o": (HIDDEN, 32)}.items():
        shapes[f"model.layers.0.self_attn.{kind}_proj"] = shape
    for kind, shape in {"gate": (64, HIDDEN), "up": (64, HIDDEN), "down": (HIDDEN, 64)}.items():
        shapes[f"model.layers.0.mlp.{kind}_proj"] = shape
    shapes |= {f"model.layers.0.{kind}_layernorm": (HIDDEN,) for kind in ("input", "post_attention")}
    write_safetensors(
        folder / "model.safetensors",
        {f"{name}.weight": 0.1 * draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
    )
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB},
        **{"intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"},
        **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["alpha beta gamma delta"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def write_safetensors(file, arrays):
    """The format's 8 bytes of length, JSON header and data."""
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def server(tmp_path, monkeypatch, llama):
    """A hub with the model org/tiny among files of other formats, and an empty cache."""
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub._fetched.cache_clear()
    others = {
        "README__md": b"#",
        "pytorch_model__bin": b"x",
        "consolidated__safetensors": b"x",
        "original/w__pth": b"x",
    }
    server.commit = server.push("org/tiny", llama, **others)
    yield server
    server.close()
    hub._fetched.cache_clear()


def keys_of(model, texts, out, **keys):
    keys = {"model_name": model, "load_parameters_path": model, "dataset_path": texts, **keys}
    keys = {"base_output_directory": out, "max_target_length": 64, "dtype": "float32", "run_name": "run", **keys}
    keys = {"per_device_batch_size": 1, "remat_policy": "none", "checkpoint_period": 2, "quiet": True, **keys}
    keys |= {"jax_cache_dir": runs.TINY["jax_cache_dir"]}
    return [runs.BASE, *(f"{key}={value}" for key, value in keys.items())]


def losses(folder):
    return [line["loss"] for line in runs.lines(folder) if "loss" in line]


def config_of(folder):
    return from_yaml((folder / "config.yml").read_text())


def test_a_run_has_the_losses_of_the_local_folder_and_goes_on_with_its_commit(tmp_path, server, llama, monkeypatch):
    texts = runs.write_corpus(tmp_path / "texts")
    runs.main(keys_of(llama, texts, tmp_path / "local", steps=4))
    schedule = {"learning_rate_schedule_steps": 4}
    runs.main(keys_of("hf://org/tiny", texts, tmp_path / "hub", steps=2, **schedule))
    needed = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(server.fetched) == [f"org/tiny/{name}" for name in needed]
    run = tmp_path / "hub" / "run"
    pinned = f"hf://org/tiny@{server.commit}"
    named = ("model_name", "load_parameters_path", "tokenizer_path")
    assert {key: config_of(run)[key] for key in named} == dict.fromkeys(named, pinned)

    other = server.push("org/tiny", write_llama(tmp_path / "other", seed=1))
    hub._fetched.cache_clear()
    runs.main(keys_of("hf://org/tiny", texts, tmp_path / "hub", steps=3, **schedule))  # the same command as before
    assert {key: config_of(run)[key] for key in named} == dict.fromkeys(named, pinned)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._fetched.cache_clear()
    asked = server.asked
    runs.main([str(run), "steps=4"])
    assert server.asked == asked
    assert losses(run) == losses(tmp_path / "local" / "run")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    config = resolve_config.load(keys_of("hf://org/tiny", texts, tmp_path / "new"))  # a new run takes the new commit
    assert config.checkpoint.load_parameters_path == f"hf://org/tiny@{other}" != pinned


def test_adapters_go_on_with_the_weights_they_began_with(tmp_path, server):
    texts = runs.write_corpus(tmp_path / "texts")
    keys = keys_of("hf://org/tiny", texts, tmp_path, lora_rank=2, learning_rate_schedule_steps=3)
    runs.main([*keys, "steps=2"])
    server.push("org/tiny", write_llama(tmp_path / "other", seed=1))
    hub._fetched.cache_clear()
    runs.main([*keys, "steps=3"])
    assert len(losses(tmp_path / "run")) == 3
    revised = [key.replace("hf://org/tiny", "hf://org/tiny@main") for key in keys]  # which asks for the new weights
    with pytest.raises(UserError, match=r"tokenizer_path: .* -> "):
        runs.main([*revised, "steps=4"])


def test_other_commands_and_keys_take_it(tmp_path, server, llama, capsys):
    pinned = f"hf://org/tiny@{server.commit}"
    texts = runs.write_corpus(tmp_path / "texts", documents=4)
    config = resolve_config.load(["configs/base.yml", "tokenizer_type=huggingface", "tokenizer_path=hf://org/tiny"])
    assert config.data.tokenizer_path == pinned
    assert "org/tiny/model.safetensors" not in server.fetched
    rules = "load_weights_rules=[{match: token_embedder.*, path: 'hf://org/tiny'}]"
    assert resolve_config.load(["configs/base.yml", rules]).checkpoint.load_weights_rules[0]["path"] == pinned
    config = resolve_config.load(["configs/base.yml", "model_name=hf://org/tiny@main"], uses_weights=True)
    assert config.run.model_name == config.checkpoint.load_parameters_path == pinned
    assert config.model.base_emb_dim == HIDDEN

    convert.main(["from-hf", "hf://org/tiny", str(tmp_path / "made")])
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    printed = []
    for model in (llama, "hf://org/tiny"):
        capsys.readouterr()
        keys = [f"model_name={model}", f"load_parameters_path={model}", f"eval_dataset_path={texts}", "eval_steps=1"]
        evaluate.main(["configs/base.yml", *keys, "max_target_length=64", "per_device_batch_size=1", "dtype=float32"])
        printed.append(re.findall(r"loss .*", capsys.readouterr().out))
    assert printed[0] == printed[1] != []


def test_a_run_that_goes_on_keeps_the_commits_of_its_rules(tmp_path, server):
    rules = "load_weights_rules=[{match: a, path: runs/b}, {match: token_embedder.*, path: 'hf://org/tiny'}]"
    argv = ["configs/base.yml", rules, f"base_output_directory={tmp_path}", "run_name=run"]
    began = resolve_config.load(argv)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yml").write_text(to_yaml(began))
    server.push("org/tiny", write_llama(tmp_path / "other", seed=1))
    hub._fetched.cache_clear()
    assert resolve_config.load(argv).checkpoint.load_weights_rules == began.checkpoint.load_weights_rules
    another_run = resolve_config.load(argv[:2])
    assert another_run.checkpoint.load_weights_rules[1] != began.checkpoint.load_weights_rules[1]


def test_of_weights_in_parts_those_are_fetched_that_the_index_names(tmp_path, server):
    (tmp_path / "parts").mkdir()
    for name in ("a.safetensors", "b.safetensors", "left-over.safetensors", "model.safetensors"):
        (tmp_path / "parts" / name).write_bytes(b"x")
    index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors", "three": "../../outside"}}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    server.push("org/parts", tmp_path / "parts")
    folder = hub.local_folder("hf://org/parts")
    assert sorted(os.listdir(folder)) == ["a.safetensors", "b.safetensors", "model.safetensors.index.json"]
    (tmp_path / "parts" / "model.safetensors.index.json").write_text("[]")
    (tmp_path / "parts" / "config.json").write_text('{"model_type": "llama"}')
    server.push("org/parts", tmp_path / "parts", branch="odd")
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        resolve_config.load(["configs/base.yml", "model_name=hf://org/parts@odd"])
    server.push("org/bare", tmp_path / "nothing", README__md=b"#")
    with pytest.raises(UserError, match=r"model_name=hf://org/bare: there is no config\.json"):
        resolve_config.load(["configs/base.yml", "model_name=hf://org/bare"])


def test_of_two_processes_on_a_host_one_fetches(tmp_path, server):
    server.slow = 0.5
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
    script = "from src.extras.hf.hub import local_folder; print(local_folder('hf://org/tiny'))"
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=runs.ROOT, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(folders) == 1
    assert sorted(server.fetched) == sorted(set(server.fetched))


@pytest.mark.parametrize(
    "name", ["hf://", "hf://tiny", "hf://org/tiny/x", "hf://org/tiny@", "hf://org/ti ny", "hf://a/b@c@d"]
)
def test_odd_names_are_refused(name, monkeypatch, capsys):
    message = runs.refusal(monkeypatch, capsys, ["configs/base.yml", f"load_parameters_path={name}"])
    assert f"{name}: expected hf://ORG/NAME, or hf://ORG/NAME@REVISION" in message


def test_what_is_not_there_is_said_in_one_line(server, llama, monkeypatch, capsys):
    def refusal(name):
        hub._fetched.cache_clear()
        return runs.refusal(monkeypatch, capsys, ["configs/base.yml", f"load_parameters_path={name}"])

    assert f"hf://org/none: {server.url} has no org/none, or it is private: check the name" in refusal("hf://org/none")
    message = refusal("hf://org/tiny@v2")
    assert "hf://org/tiny@v2: org/tiny has no branch, tag or commit v2" in message
    assert "has no branch, tag or commit" in refusal(f"hf://org/tiny@{'0' * 40}")
    server.gated.add("org/tiny")
    message = refusal("hf://org/tiny")
    assert (
        f"hf://org/tiny is gated: accept its terms at {server.url}/org/tiny, then log in by `hf auth login`" in message
    )
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    hub._fetched.cache_clear()
    hub.local_folder("hf://org/tiny", weights=False)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal("hf://org/never")
    assert f"hf://org/never: HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks files of it" in message
    hub._fetched.cache_clear()
    hub.local_folder("hf://org/tiny", weights=False)  # fetched before
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.local_folder("hf://org/tiny")  # its weights were not


def test_a_hub_that_does_not_answer_may_do_so_later(server, monkeypatch):
    server.broken = True
    with pytest.raises(TransientError, match=r"hf://org/tiny: http://127\.0\.0\.1:.* does not answer: .*500"):
        hub.local_folder("hf://org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match="does not answer"):
        hub.local_folder("hf://org/tiny")


def test_a_full_disk_is_said(server, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(UserError, match=r"no space is left in .*cache: free some, or set HF_HOME to another disk"):
        hub.local_folder("hf://org/tiny")


def test_it_is_no_run_and_no_place_to_write_to(server, monkeypatch, capsys):
    message = runs.refusal(monkeypatch, capsys, ["hf://org/tiny", "steps=2"])
    assert "hf://org/tiny is a model, not a run: type configs/base.yml model_name=hf://org/tiny load_par" in message
    keys = ["tokenizer_type=sentencepiece", "tokenizer_path=hf://org/tiny"]
    with pytest.raises(UserError, match="a new tokenizer is written to a path on this machine"):
        train_tokenizer.main(["configs/base.yml", *keys])
    assert "type hf://org/tiny" in runs.refusal(monkeypatch, capsys, ["configs/base.yml", "model_name=org/tiny"])
