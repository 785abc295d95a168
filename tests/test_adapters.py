"""Finetuning from converted weights, as whole runs: what is trained, what is saved, what goes back to Hugging Face."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.extras.evaluation import evaluate
from src.extras.generation.loaded_model import load_model
from src.extras.hf import convert
from src.model import params
from src.model.params import Weights
from src.run import resolve_config
from src.step.loss import hidden_states, next_token_loss
from src.system.errors import UserError
from tests import runs
from tests.data.one_source import train_batches

VOCAB = 300
# Its widths are not multiples of eight devices.
MESH = {"ici_data_parallelism": -1, "ici_fsdp_parallelism": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama of transformers', what from-hf makes of it, and pairs to finetune on."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    convert.main(["from-hf", str(folder / "hf"), str(folder / "ours")])
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(300):
            prompt = "".join(draw.choices("abcdefgh", k=9))
            file.write(json.dumps({"prompt": prompt, "completion": f"={prompt[-1].upper()}."}) + "\n")
    return folder


def keys_of(folders, **more):
    keys = {
        "model_name": folders / "ours" / "model.yml",
        "load_parameters_path": folders / "ours" / "checkpoint",
        "use_sft": True,
        "dataset_path": folders / "pairs.jsonl",
        "eval_dataset_path": folders / "pairs.jsonl",
        "vocab_size": VOCAB,
        **MESH,
        **more,
    }
    sizes = ("base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads")
    arguments = [a for a in runs.arguments(**keys) if a.split("=")[0] not in (*sizes, "head_dim")]
    return arguments


def train(folders, **more):
    return runs.main(keys_of(folders, **more))


def evaluated(folders, **more):
    return evaluate.main(keys_of(folders, **more))["eval_loss"]


@pytest.mark.long
def test_a_hundred_steps_on_converted_weights_lower_the_loss_of_responses(folders, tmp_path):
    before = evaluated(folders)
    train(folders, steps=100, base_output_directory=tmp_path, checkpoint_period=100)
    assert before > 3
    assert evaluated(folders, load_parameters_path=tmp_path / "run") < 0.3


def test_prompt_tokens_have_no_gradient(folders):
    """The gradient of the output projection is the sum over response tokens alone of h (p - y)."""
    config = resolve_config.load(keys_of(folders))
    plan, weights = load_model(config, make_tokenizer(config.data, config.model.vocab_size))
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    data, _ = open_sources(InputSpec.of(config, tokenizer), config.evaluation)
    batches = train_batches(config, data, tokenizer, range(8), 8)
    batch = {name: jnp.asarray(array) for name, array in next(batches).items()}
    batches.close()
    tree = weights.merged()

    def loss(output):
        decoder = plan.decoder(Weights({**tree, "output": output}))
        return next_token_loss(decoder, batch, plan).loss

    gradient = jax.jit(jax.grad(loss))(tree["output"])
    decoder = plan.decoder(Weights(tree))
    hidden = np.asarray(jax.jit(lambda: hidden_states(decoder, batch, plan)[0])(), np.float64)
    logits = (hidden @ np.asarray(tree["output"], np.float64))[..., :VOCAB]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # What a response is, told from the text: from "=" to the end token, as targets.
    expected, counted = np.zeros(gradient.shape), 0
    for row in range(8):
        responding = False
        for t in range(batch["targets"].shape[1]):
            target = int(batch["targets"][row, t])
            responding = batch["segment_ids"][row, t] > 0 and (responding or target == ord("="))
            if responding:
                counted += 1
                error = p[row, t].copy()
                error[target] -= 1
                expected[:, :VOCAB] += np.outer(hidden[row, t], error)
            responding = responding and target != tokenizer.eos
    assert 0 < counted < 0.5 * (np.asarray(batch["segment_ids"]) > 0).sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())


LORA = {"lora_rank": 4, "lora_parameters": "[attention.*, feed_forward.wi]", "learning_rate_schedule_steps": 8}
LORA["optimizer_rules"] = '[{match: "lora.*.up", learning_rate_scale: 2}]'  # a name that the merged model lacks


@pytest.fixture(scope="module")
def adapted(folders, tmp_path_factory):
    """The folder of a run that trained adapters for eight steps at a stretch."""
    folder = tmp_path_factory.mktemp("runs")
    train(folders, steps=8, base_output_directory=folder, checkpoint_period=4, **LORA)
    return folder / "run"


def test_adapters_are_saved_alone_and_resume_exactly(folders, adapted, tmp_path):
    saved = runs.saved_arrays(adapted, 8)
    assert {name.split(".")[1] for name in saved if name.startswith(("trainable", "frozen", "stats"))} == {"lora"}
    assert sum(leaf.size for leaf in saved.values()) < 60_000  # the model has 70,000 parameters, its moments twice that
    for steps in (4, 8):
        result = train(folders, steps=steps, base_output_directory=tmp_path, checkpoint_period=4, **LORA)
    for name, leaf in params.by_path(result.state.weights.trainable).items():
        stored = runs.saved_arrays(adapted, 8)[f"trainable.{params.dotted(name)}"]
        np.testing.assert_array_equal(leaf, stored)


def logits_of(folders, path, tmp_path, **more):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, VOCAB, (8, 20)).astype(np.int32))
    files = {"tokens_path": tmp_path / "ids.npy", "logits_path": tmp_path / "logits.npy"}
    evaluate.main(keys_of(folders, load_parameters_path=path, **files, **more))
    return np.load(tmp_path / "logits.npy")


def test_export_merges_adapters(folders, adapted, tmp_path):
    ours = logits_of(folders, adapted, tmp_path)
    convert.main(["to-hf", str(adapted), str(tmp_path / "exported")])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        theirs = exported(torch.tensor(np.load(tmp_path / "ids.npy")).long()).logits.numpy()
    assert np.abs(ours - theirs).max() <= 2e-4 * theirs.std()
    base = logits_of(folders, folders / "ours" / "checkpoint", tmp_path)
    assert np.abs(ours - base).max() > 0.1 * theirs.std()
    # A run's own config.yml, which asks for adapters, serves to evaluate it too.
    again = [f"{adapted}/config.yml", f"load_parameters_path={adapted}", f"tokens_path={tmp_path}/ids.npy"]
    evaluate.main([*again, f"logits_path={tmp_path}/again.npy"])
    np.testing.assert_array_equal(np.load(tmp_path / "again.npy"), ours)


def test_peft_computes_the_same_with_the_adapters_it_is_given(folders, adapted, tmp_path):
    ours = logits_of(folders, adapted, tmp_path)
    convert.main(["to-peft", str(adapted), str(tmp_path / "adapter")])
    base = AutoModelForCausalLM.from_pretrained(folders / "hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs = model(torch.tensor(np.load(tmp_path / "ids.npy")).long()).logits.numpy()
    assert np.abs(ours - theirs).max() <= 2e-4 * theirs.std()
    assert model.peft_config["default"].target_modules == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }
    # And back: the folder, with the model's own in adapter_config.json, is what the run is.
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(folders / "hf")}))
    np.testing.assert_allclose(logits_of(folders, tmp_path / "adapter", tmp_path), ours, atol=1e-5 * theirs.std())


def test_a_run_without_adapters_has_none_for_peft(folders, tmp_path):
    with pytest.raises(UserError, match=r"has no adapters \(lora_rank\)"):
        convert.main(["to-peft", str(folders / "ours"), str(tmp_path / "adapter")])


def test_adapters_on_weights_that_changed_are_refused(folders, tmp_path):
    convert.main(["from-hf", str(folders / "hf"), str(tmp_path / "base")])
    keys = {"load_parameters_path": tmp_path / "base" / "checkpoint", "base_output_directory": tmp_path, **LORA}
    train(folders, steps=2, **keys)
    other = LlamaForCausalLM.from_pretrained(folders / "hf")
    with torch.no_grad():
        other.lm_head.weight += 1
    other.save_pretrained(tmp_path / "other")
    shutil.rmtree(tmp_path / "base")
    convert.main(["from-hf", str(tmp_path / "other"), str(tmp_path / "base")])
    with pytest.raises(UserError, match="not the ones on which these adapters were trained"):
        train(folders, steps=4, **keys)
    with pytest.raises(UserError, match="not the ones on which these adapters were trained"):
        evaluated(folders, load_parameters_path=tmp_path / "run")


def test_a_folders_tokenizer_is_its_models_and_another_is_refused(folders, tmp_path):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    words = Tokenizer(models.WordLevel({"a": 0, "=": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    words.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    paths = {"model_name": tmp_path / "hf", "load_parameters_path": tmp_path / "hf"}
    config = resolve_config.load(keys_of(folders, **paths))
    assert (config.data.tokenizer_type, config.data.tokenizer_path) == ("huggingface", str(tmp_path / "hf"))
    with pytest.raises(UserError, match=r"another tokenizer.*\n.*type: huggingface -> byte"):
        evaluated(folders, **paths, tokenizer_type="byte", tokenizer_path="")
    accepted = {"tokenizer_type": "byte", "tokenizer_path": "", "accept_changes": "[tokenizer_path]"}
    assert evaluated(folders, **paths, **accepted) > 3
