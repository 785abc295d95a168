import json

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from src.checkpoint.checkpointer import Checkpointer
from src.config.load import to_yaml
from src.config.schema import defaults
from src.data.tokenizer import make_tokenizer
from src.extras.hf import convert
from src.extras.hf.load import load_weights
from src.extras.hf.model_keys import find_family
from src.extras.hf.save import save_folder
from src.model.params import by_path
from src.run import resolve_config
from src.system.errors import UserError
from tests.hf import saved
from tests.tiny import BASE, spec_of


def there_and_back(folder, tmp_path):
    """The folder that to-hf writes of what from-hf made of a folder."""
    convert.from_hf(folder, tmp_path / "converted")
    convert.to_hf(tmp_path / "converted", tmp_path / "back")
    return tmp_path / "back"


def assert_same_tensors(folder, expected):
    """Bit for bit, under the same names."""
    assert folder.keys() == expected.keys()
    for name, tensor in expected.items():
        assert folder[name].dtype == tensor.dtype, name
        assert torch.equal(folder[name], tensor), name


@pytest.mark.parametrize("name", saved.CONFIGS)
def test_there_and_back_every_tensor_is_the_same_and_transformers_computes_the_same(tmp_path, name):
    """Families in turn in bfloat16 and in float32, in several files."""
    dtype = (torch.bfloat16, torch.float32)[list(saved.CONFIGS).index(name) % 2]
    folder = saved.save(tmp_path / "hf", name, dtype, shard="20KB")
    back = there_and_back(folder, tmp_path)
    assert_same_tensors(saved.tensors(back), saved.tensors(folder))
    assert torch.equal(saved.logits(back), saved.logits(folder))
    types = [json.loads((path / "config.json").read_text())["model_type"] for path in (folder, back)]
    assert types[0] == types[1]


def test_a_text_model_comes_back_of_a_multi_modal_folder(tmp_path, capsys):
    text = {**saved.SIZES, **saved.HEAD, "sliding_window": 5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=1
    )
    folder = saved.save_config(tmp_path / "hf", config, auto=transformers.AutoModelForImageTextToText)
    # As the published folders leave out what transformers has defaults for.
    entries = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("tie_word_embeddings", "rms_norm_eps", "query_pre_attn_scalar", "layer_types", "hidden_activation"):
        del entries[name]
    saved.edit_config(folder, text_config=entries)
    back = there_and_back(folder, tmp_path)
    assert "tensors of the vision or audio model are left out" in capsys.readouterr().out
    prefix = "language_model."
    expected = {name.removeprefix(prefix): x for name, x in saved.tensors(folder).items() if name.startswith(prefix)}
    assert_same_tensors(saved.tensors(back), expected)
    assert json.loads((back / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


def test_smolvlms_text_model_comes_back_as_the_llama_it_is(tmp_path, capsys):
    text = {**saved.SIZES, "model_type": "llama", "pad_token_id": None}
    config = transformers.SmolVLMConfig(text_config=text, vision_config=saved.VISION, scale_factor=2, image_token_id=3)
    folder = saved.save_config(tmp_path / "hf", config, auto=transformers.AutoModelForImageTextToText)
    back = there_and_back(folder, tmp_path)
    assert "tensors of the vision or audio model are left out" in capsys.readouterr().out
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = whole(torch.arange(4, 32).reshape(2, 14)).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)(
            torch.arange(4, 32).reshape(2, 14)
        ).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_gemma_4s_text_model_comes_back_of_a_folder_for_images(tmp_path, capsys):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
    text = {**saved.CONFIGS["gemma4"][1], "use_bidirectional_attention": "vision"}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision)
    folder = saved.save_config(tmp_path / "hf", config, auto=transformers.AutoModelForImageTextToText)
    back = there_and_back(folder, tmp_path)
    assert "tensors of the vision or audio model are left out" in capsys.readouterr().out
    of_text = {name: x for name, x in saved.tensors(folder).items() if ".language_model." in name}
    assert len(saved.tensors(folder)) > len(of_text)
    assert_same_tensors(saved.tensors(back), {name.replace(".language_model", ""): x for name, x in of_text.items()})
    assert json.loads((back / "config.json").read_text())["architectures"] == ["Gemma4ForCausalLM"]


def test_quantised_weights_come_back_as_bfloat16(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3", torch.bfloat16)
    expected = saved.tensors(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = expected[name].to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [4.0, 1.0]])
    expected[name] = (stored.float() * scales.repeat_interleave(16, 0)[:20].repeat_interleave(16, 1)[:, :24]).bfloat16()
    tensors = {**saved.tensors(folder), name: stored, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    saved.edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    back = there_and_back(folder, tmp_path)
    assert_same_tensors(saved.tensors(back), expected)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_the_copies_that_extra_prediction_layers_have_are_written(tmp_path):
    """V3's files repeat the embedding and the output projection for each of them."""
    config = resolve_config.load([BASE, "dataset_type=synthetic", f"model_name={deepseek_yaml(tmp_path)}"])
    tree, _ = convert.declared_weights(spec_of(config))
    rng = np.random.default_rng(0)
    weights = {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in by_path(tree).items()}
    (tmp_path / "out").mkdir()
    save_folder(tmp_path / "out", *find_family(config.model, config.batch.max_target_length), weights, saved.VOCAB)
    files = saved.tensors(tmp_path / "out")
    assert torch.equal(files["model.layers.3.embed_tokens.weight"], files["model.embed_tokens.weight"])
    assert torch.equal(files["model.layers.3.shared_head.head.weight"], files["lm_head.weight"])
    arrays = load_weights(tmp_path / "out", tree)
    for path, array in by_path(arrays).items():
        rows = saved.VOCAB if path[0] == "embedding" else None
        columns = saved.VOCAB if path[0] == "output" else None
        np.testing.assert_array_equal(
            array[:rows, ..., :columns] if array.ndim > 1 else array,
            weights[path][:rows, ..., :columns] if array.ndim > 1 else weights[path],
        )


def test_a_weight_beyond_float16_is_named_before_anything_is_written(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3")
    config = resolve_config.load([BASE, "dataset_type=synthetic", f"model_name={folder}"])
    tree, _ = convert.declared_weights(spec_of(config))
    weights = {path: np.full(leaf.shape, 65_504.0, np.float32) for path, leaf in by_path(tree).items()}
    family = find_family(config.model, config.batch.max_target_length)
    for folder in ("fits", "overflows"):
        (tmp_path / folder).mkdir()
    save_folder(tmp_path / "fits", *family, weights, saved.VOCAB, np.dtype(np.float16))
    assert all(torch.isfinite(tensor).all() for tensor in saved.tensors(tmp_path / "fits").values())
    weights["embedding",][3, 2] = -7e4
    with pytest.raises(UserError, match=r"up to 65,504, and these weights have larger ones: embedding\. Give"):
        save_folder(tmp_path / "overflows", *family, weights, saved.VOCAB, np.dtype(np.float16))
    assert not list((tmp_path / "overflows").iterdir())


def deepseek_yaml(tmp_path):
    """A model file of DeepSeek V3 with an extra prediction layer."""
    folder = saved.save(tmp_path / "v3", "deepseek_v3")
    convert.from_hf(folder, tmp_path / "v3-converted")
    file = tmp_path / "v3-converted" / "model.yml"
    file.write_text(file.read_text() + "mtp_num_layers: 1\n")
    return file


def test_a_file_is_full_when_the_next_tensor_does_not_fit(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3")
    config = resolve_config.load([BASE, "dataset_type=synthetic", f"model_name={folder}"])
    tree, _ = convert.declared_weights(spec_of(config))
    weights = {path: np.zeros(leaf.shape, np.float32) for path, leaf in by_path(tree).items()}
    out = tmp_path / "out"
    out.mkdir()
    save_folder(
        out, *find_family(config.model, config.batch.max_target_length), weights, saved.VOCAB, shard_bytes=12_000
    )
    files = sorted(out.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 12_000 + 4_000 for file in files)  # and the header
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for file in files:
        with safe_open(file, "pt") as opened:
            assert {name for name, place in index["weight_map"].items() if place == file.name} == set(opened.keys())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.tensors(out).values())
    assert saved.logits(out).shape == (2, 14, saved.VOCAB)


# ---- What else is in the folders


def test_model_yml_is_a_model_file_and_tokenizer_files_travel(tmp_path):
    folder = saved.save(tmp_path / "hf", "gemma2")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    saved.edit_config(folder, eos_token_id=42, max_position_embeddings=1234)
    back = there_and_back(folder, tmp_path)
    text = (tmp_path / "converted" / "model.yml").read_text()
    assert text.startswith("# Gemma2ForCausalLM, from hf")
    config = resolve_config.load([BASE, f"model_name={tmp_path}/converted/model.yml", "dataset_type=synthetic"])
    assert config.model.attn_logits_soft_cap == 50.0
    assert "attention_bias" not in text  # it is base.yml's
    assert (back / "tokenizer_config.json").read_text() == '{"eos_token": "</s>"}'
    entries = json.loads((back / "config.json").read_text())
    assert (entries["eos_token_id"], entries["max_position_embeddings"]) == (42, 1234)


def test_model_yml_brings_the_tokenizer_beside_it(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="b"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    convert.from_hf(folder, tmp_path / "converted")
    model = f"model_name={tmp_path}/converted/model.yml"
    config = resolve_config.load([BASE, model])
    assert make_tokenizer(config.data, config.model.vocab_size).encode_text("a").tolist() == [0]
    own = resolve_config.load([BASE, model, "tokenizer_type=sentencepiece", "tokenizer_path=own.model"])
    assert (own.data.tokenizer_type, own.data.tokenizer_path) == ("sentencepiece", "own.model")


def test_a_runs_checkpoint_is_written_in_the_dtype_asked_for(tmp_path):
    folder = saved.save(tmp_path / "hf", "qwen3")
    config = resolve_config.load([BASE, "dataset_type=synthetic", f"model_name={folder}"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yml").write_text(to_yaml(config))
    tree, _ = convert.declared_weights(spec_of(config))
    checkpointer = Checkpointer(run / "checkpoints", max_to_keep=-1, async_save=False)
    checkpointer.save(3, {"trainable": load_weights(folder, tree)}, {})
    checkpointer.close()
    for source in (run, run / "checkpoints" / "3"):
        out = tmp_path / f"out-{source.name}"
        convert.main(["to-hf", str(source), str(out), "dtype=bfloat16"])
        expected = {name: tensor.bfloat16() for name, tensor in saved.tensors(folder).items()}
        assert_same_tensors(saved.tensors(out), expected)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


SHORT = "original_max_position_embeddings: 8\n"
PAIRS = "rope_short_factor: [1.0, 1.1, 1.3]\nrope_long_factor: [1.0, 2.5, 4.0]\n"
ROWS = defaults()["max_target_length"]
POSITIONS = {  # keys of base.yml, and what the export's max_position_embeddings has to be where the folder's was 64
    "default": ("", 64),
    "another theta": ("rope_max_timescale: 300.0\n", ROWS),
    "linear": ("rope_type: linear\nrope_factor: 3.0\n", ROWS),
    "llama3": ("rope_type: llama3.1\nrope_factor: 6.0\n" + SHORT, 48),
    "yarn": ("rope_type: yarn\nrope_factor: 2.5\n" + SHORT, 20),
    "dynamic": ("rope_type: dynamic\nrope_factor: 2.5\n" + SHORT, 8),
    "longrope": ("rope_type: longrope\nrope_factor: 4.0\n" + SHORT + PAIRS, 32),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_the_positions_of_a_run_are_exported_and_not_those_of_the_folder_it_began_with(tmp_path, kind):
    keys, longest = POSITIONS[kind]
    name = "phi3" if kind == "longrope" else "llama"
    source = tmp_path / "converted"
    convert.from_hf(saved.save(tmp_path / "hf", name), source)
    with open(source / "model.yml", "a") as file:
        file.write(keys)
    exported, alone = tmp_path / "exported", tmp_path / "alone"
    convert.to_hf(source, exported)
    (source / "hf_config.json").unlink()
    convert.to_hf(source, alone)
    expected, *others = (
        spec_of(resolve_config.load([BASE, f"model_name={model}", "dataset_type=synthetic"]))
        for model in (source / "model.yml", exported, alone)
    )
    assert others == [expected] * 2
    torch.testing.assert_close(saved.logits(exported), saved.logits(alone), rtol=0, atol=1e-6)
    assert json.loads((exported / "config.json").read_text())["max_position_embeddings"] == longest


@pytest.mark.parametrize(
    "sizes", ["base_mlp_dim: 20\n", "base_moe_mlp_dim: 20\n", "base_moe_mlp_dim: 20\nbase_mlp_dim: 99\n"]
)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_exported_by_whichever_key_gives_their_width(tmp_path, name, sizes):
    folder = saved.save(tmp_path / "hf", name)
    convert.from_hf(folder, tmp_path / "converted")
    file = tmp_path / "converted" / "model.yml"
    lines = [line for line in file.read_text().splitlines(keepends=True) if "mlp_dim:" not in line]
    file.write_text("".join([*lines, sizes]))
    convert.to_hf(tmp_path / "converted", tmp_path / "back")
    assert torch.equal(saved.logits(tmp_path / "back"), saved.logits(folder))


# ---- Bad input


@pytest.mark.parametrize("argv", [["from-hf", "a"], ["to-hf", "a", "b", "bfloat16"], ["convert", "a", "b"]])
def test_another_command_is_answered_with_those_there_are(argv):
    with pytest.raises(UserError, match=r"from-hf HF_DIR OUT_DIR"):
        convert.main(argv)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gs://bucket/x", r"^gs://bucket/x: expected a folder on this machine"),
        ("a" * 300, "is too long for a path"),
        ("a\0b", "names no file"),
    ],
)
def test_a_name_that_no_folder_here_can_have_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for argv in (["to-hf", "run", name], ["to-hf", name, "out"], ["from-hf", name, "out"], ["check", name, "run"]):
        with pytest.raises(UserError, match=message):
            convert.main(argv)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3")
    with pytest.raises(UserError, match="is not an empty folder"):
        convert.from_hf(folder, folder)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop exists and is not an empty folder"):
        convert.from_hf(folder, tmp_path / "loop")
    with pytest.raises(UserError, match=r"config\.json/x can't be created: Not a directory"):
        convert.from_hf(folder, folder / "config.json" / "x")


def test_a_folder_with_something_in_it_is_told_before_the_weights_are_read(tmp_path, monkeypatch):
    folder = saved.save(tmp_path / "hf", "llama3")
    convert.from_hf(folder, tmp_path / "converted")
    monkeypatch.setattr(convert, "load_weights", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(UserError, match="is not an empty folder"):
        convert.to_hf(tmp_path / "converted", folder)


def test_nothing_is_written_of_a_folder_whose_tensors_do_not_fit(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3")
    saved.edit_config(folder, hidden_size=32)
    with pytest.raises(UserError, match="don't match this model"):
        convert.from_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_neither_a_run_nor_converted(tmp_path):
    with pytest.raises(UserError, match=r"no model\.yml in .*expected the output of from-hf"):
        convert.to_hf(tmp_path, tmp_path / "out")


def test_another_dtype_is_refused(tmp_path):
    with pytest.raises(UserError, match="dtype=int8 is not one of float32, bfloat16, float16"):
        convert.to_hf(tmp_path, tmp_path / "out", "int8")


def test_a_model_that_no_family_has_is_refused(tmp_path):
    folder = saved.save(tmp_path / "hf", "llama3")
    convert.from_hf(folder, tmp_path / "converted")
    with open(tmp_path / "converted" / "model.yml", "a") as file:
        file.write("attn_logits_soft_cap: 20.0\n")
    with pytest.raises(UserError, match="no Hugging Face family supports this model"):
        convert.to_hf(tmp_path / "converted", tmp_path / "out")
    assert not (tmp_path / "out").exists()
