"""Adapters of the package peft are read and written as it does both."""

import json

import peft
import pytest
import torch
import transformers

from src.checkpoint.format import checksum_of
from src.checkpoint.load_weights import identity
from src.extras.hf import convert
from src.extras.hf.folder import open_folder
from src.system.errors import UserError
from tests.hf import saved

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {  # family -> what peft adapts in it, with the entries that scale adapters
    "llama": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "r": 3, "lora_alpha": 5},
    "qwen3": {"target_modules": ["q_proj", "lm_head"], "r": 4, "lora_alpha": 8, "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj"], "r": 2, "lora_alpha": 6, "fan_in_fan_out": True},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 2, "alpha_pattern": {"qkv_proj": 7}},
}


def logits(model):
    with torch.no_grad():
        return model(torch.arange(28).reshape(2, 14) * 13 % saved.VOCAB).logits


def save_adapters(folder, base, **entries):
    """A folder that peft saved, of random adapters on the model in `base`; returns the adapted model."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **entries))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_folder_of_pefts_is_the_adapted_model(tmp_path, name):
    base = saved.save(tmp_path / "hf", name)
    expected = logits(save_adapters(tmp_path / "adapter", base, **ADAPTERS[name]))
    convert.from_hf(tmp_path / "adapter", tmp_path / "ours")
    convert.to_hf(tmp_path / "ours", tmp_path / "back")
    found, plain = saved.logits(tmp_path / "back"), saved.logits(base)
    assert (found - expected).abs().max() <= 2e-4 * expected.std()
    assert (plain - expected).abs().max() > 0.1 * expected.std()


@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "mica", "pissa", "pissa_niter_4", "olora"])
def test_adapters_that_also_change_their_base_are_refused(tmp_path, start):
    base = saved.save(tmp_path / "hf", "llama")
    entries = {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": start}
    model = save_adapters(tmp_path / "adapter", base, **entries).get_base_model()
    plain, name = saved.tensors(base), "model.layers.1.self_attn.q_proj"
    if not torch.equal(model.get_submodule(name).base_layer.weight, plain[f"{name}.weight"]):
        with pytest.raises(UserError, match=f'init_lora_weights="{start}"'):
            open_folder(tmp_path / "adapter")
        return
    module = model.get_submodule(name)
    expected = module(torch.eye(24)).detach().T  # its weight with what peft adds
    found = open_folder(tmp_path / "adapter").tensors[f"{name}.weight"]
    found = torch.tensor(found.read(tuple(slice(0, size) for size in found.shape)))
    if module.base_layer.bias is not None:
        expected -= module.base_layer.bias.detach()[:, None]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_identity_of_adapters_is_of_their_base_too(tmp_path):
    base = saved.save(tmp_path / "hf", "llama")
    save_adapters(tmp_path / "adapter", base, **ADAPTERS["llama"])
    before = identity(str(tmp_path / "adapter"))
    tensors = saved.tensors(base)
    tensors["model.norm.weight"] += 1
    saved.save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert identity(str(tmp_path / "adapter")) != before


def test_adapters_on_a_checkpoint_of_ours_are_refused_by_name(tmp_path):
    content = {"meta": {}, "arrays": {}}
    meta = tmp_path / "run" / "checkpoints" / "5" / "meta" / "metadata"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({**content, "checksum": checksum_of(content)}))
    assert identity(str(tmp_path / "run")).startswith("step 5")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "run")}))
    with pytest.raises(UserError, match=r"base_model_name_or_path=\S+/run, which is not a Hugging Face model folder"):
        identity(str(tmp_path / "adapter"))


def test_a_base_that_peft_cannot_load_is_said(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert convert.base_notes(str(saved.save(tmp_path / "hf", "llama"))) == convert.base_notes("hf://some/model") == []
    (note,) = convert.base_notes(str(tmp_path / "run"))
    assert f"{tmp_path}/run, a checkpoint of MinText, which peft can't load" in note


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_dora": True}, "use_dora=true: only plain LoRA is supported"),
        ({"bias": "all"}, 'bias="all"'),
        ({"peft_type": "IA3"}, 'peft_type="IA3"'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save=\["lm_head"\]'),
        ({"an_entry_of_tomorrow": 3}, "an_entry_of_tomorrow=3"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "{adapter}"}, "adapter, which is not a Hugging Face model folder"),
        ({"lora_alpha": None}, "has no number lora_alpha"),
        ({"alpha_pattern": [1]}, r"alpha_pattern \[1\]: expected names and numbers"),
        ({"alpha_pattern": {"q_proj": "x"}}, "expected names and numbers"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(tmp_path, entries, message):
    base = saved.save(tmp_path / "hf", "llama")
    save_adapters(tmp_path / "adapter", base, **ADAPTERS["llama"])
    file = tmp_path / "adapter" / "adapter_config.json"
    entries = json.dumps(json.loads(file.read_text()) | entries)
    file.write_text(entries.replace("{adapter}", str(tmp_path / "adapter")))
    with pytest.raises(UserError, match=message):
        convert.from_hf(tmp_path / "adapter", tmp_path / "ours")


def test_adapters_of_another_model_are_refused(tmp_path):
    base = saved.save(tmp_path / "hf", "llama")
    save_adapters(tmp_path / "adapter", base, **ADAPTERS["llama"])
    saved.save(tmp_path / "hf", "olmo2")
    with pytest.raises(UserError, match=r"does not fit .*hf: .*self_attn\.\w_proj\.weight is \[\d+, 24\]"):
        convert.from_hf(tmp_path / "adapter", tmp_path / "ours")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    extra = {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": torch.ones(20)}
    saved.save(tmp_path / "hf", "llama")
    saved.save_file({**saved.load_file(file), **extra}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"has .*lora_magnitude_vector: only plain LoRA"):
        convert.from_hf(tmp_path / "adapter", tmp_path / "ours")
    file.unlink()
    with pytest.raises(UserError, match=r"has adapter_config\.json and no adapter_model\.safetensors"):
        convert.from_hf(tmp_path / "adapter", tmp_path / "ours")
