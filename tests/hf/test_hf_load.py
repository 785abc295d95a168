import json

import jax
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import NamedSharding
from safetensors.torch import load_file, save_file

from src.extras.hf.load import load_weights
from src.extras.hf.model_keys import read_model_keys
from src.extras.hf.safetensors import open_tensors
from src.parallel.mesh import make_layout
from src.run import resolve_config
from src.step.trace import plan_step
from src.system.errors import UserError
from tests.hf import saved
from tests.tiny import BASE


def abstract(folder, devices=1, **keys):
    """The weights of the folder's model, on a mesh of so many devices."""
    keys = {"dataset_type": "synthetic", "max_target_length": 16, "model_name": folder, **keys}
    config = resolve_config.load([BASE, *(f"{key}={value}" for key, value in keys.items())])
    plan = plan_step(config, make_layout(config.mesh, jax.devices()[:devices]))
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), plan.shapes, plan.shardings
    )


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gpt_oss"))]
)
def test_weights_on_eight_devices_are_those_on_one(tmp_path, name):
    folder = saved.save(tmp_path, name)
    one = load_weights(folder, abstract(folder))
    wanted = abstract(folder, 8, ici_fsdp_parallelism=4, ici_tensor_parallelism=2)
    eight = load_weights(folder, wanted)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(eight))

    def compare(leaf, expected, asked):
        assert leaf.sharding == asked.sharding
        np.testing.assert_array_equal(leaf, expected)

    jax.tree.map(compare, eight, one, wanted)


def test_values_are_the_files_own_and_rows_of_padding_are_zero(tmp_path):
    folder = saved.save(tmp_path, "llama3", torch.bfloat16)
    weights = load_weights(folder, abstract(folder))
    files = {name: tensor.float().numpy() for name, tensor in saved.tensors(folder).items()}
    assert weights["embedding"].dtype == np.float32
    np.testing.assert_array_equal(weights["embedding"][: saved.VOCAB], files["model.embed_tokens.weight"])
    assert not np.any(weights["embedding"][saved.VOCAB :])
    layers = weights["segments"][0][0]
    query = files["model.layers.2.self_attn.q_proj.weight"].reshape(4, 6, 24)
    np.testing.assert_array_equal(layers["attention"]["query"][2], query.transpose(2, 0, 1))
    np.testing.assert_array_equal(layers["feed_forward"]["wi"][1, :, 0].T, files["model.layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(layers["feed_forward"]["wi"][1, :, 1].T, files["model.layers.1.mlp.up_proj.weight"])


def test_a_process_reads_what_its_devices_hold_and_no_more(tmp_path, monkeypatch):
    """With half of each sharded weight on its one device, a process reads about half of the bytes."""
    folder = saved.save(tmp_path, "llama3")
    wanted = abstract(folder, 2)

    def bytes_read(parts):
        copied = []

        def noted(tensor):
            return tensor._replace(read=lambda at: copied.append(tensor.read(at)) or copied[-1])

        def opened(file):
            return {name: noted(tensor) for name, tensor in open_tensors(file).items()}

        monkeypatch.setattr("src.extras.hf.folder.open_tensors", opened)
        load_weights(folder, parts)
        return sum(part.nbytes for part in copied)

    whole = bytes_read(abstract(folder))
    assert whole == sum(tensor.nbytes for tensor in saved.tensors(folder).values())
    assert bytes_read(wanted) == pytest.approx(whole, rel=0.02)  # norms alone are read for both devices

    # As if the second device were another process's.
    addressable = NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: dict([next(iter(addressable(self, shape).items()))]),
    )
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: arrays[0])
    assert bytes_read(wanted) == pytest.approx(whole / 2, rel=0.02)


# ---- What the files may have beside the weights


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_tables_of_angles_and_a_second_copy_of_a_tied_output_are_passed_over(tmp_path):
    folder = saved.save(tmp_path, "llama3")
    expected = load_weights(folder, abstract(folder))

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)

    change_tensors(folder, add)
    jax.tree.map(np.testing.assert_array_equal, load_weights(folder, abstract(folder)), expected)


def test_a_bare_models_names_lack_the_prefix(tmp_path):
    folder = saved.save(tmp_path, "gpt2")
    expected = load_weights(folder, abstract(folder))

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(folder, strip)
    jax.tree.map(np.testing.assert_array_equal, load_weights(folder, abstract(folder)), expected)


def test_extra_prediction_layers_are_read_or_left_out_with_a_line(tmp_path):
    folder = saved.save(tmp_path, "deepseek_v3")

    def add(tensors):
        """Layer 3 is on disk what transformers doesn't save: a copy of layer 2, and what joins it to the model."""
        for name in [name for name in tensors if ".layers.2." in name]:
            tensors[name.replace(".2.", ".3.", 1)] = tensors[name] + 1
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.3.{name}.weight"] = torch.randn(24)
        tensors["model.layers.3.eh_proj.weight"] = torch.randn(24, 48)
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    assert read_model_keys(folder)["mtp_num_layers"] == 0
    change_tensors(folder, add)
    saved.edit_config(folder, num_nextn_predict_layers=1)
    assert read_model_keys(folder)["mtp_num_layers"] == 1
    files = {name: tensor.numpy() for name, tensor in saved.tensors(folder).items()}
    extra = load_weights(folder, abstract(folder))["mtp"][0]
    np.testing.assert_array_equal(extra["projection"], files["model.layers.3.eh_proj.weight"].T)
    np.testing.assert_array_equal(extra["embedding_norm"]["scale"], files["model.layers.3.enorm.weight"])
    np.testing.assert_array_equal(
        extra["block"]["feed_forward"]["correction_bias"], files["model.layers.3.mlp.gate.e_score_correction_bias"]
    )
    notes = []
    load_weights(folder, abstract(folder, mtp_num_layers=0), notes)
    assert "extra prediction layers are left out" in "".join(notes)


def test_qwen3_nexts_prediction_layer_is_left_out_with_a_line(tmp_path):
    folder, notes = saved.save(tmp_path, "qwen3_next"), []
    change_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.randn(24, 48)}))
    load_weights(folder, abstract(folder), notes)
    assert "the 1 tensors of extra prediction layers are left out" in "".join(notes)


# ---- Bad input


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    folder = saved.save(tmp_path, "llama3")
    wanted = abstract(folder)

    def damage(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(25)
        tensors["model.layers.2.input_layernorm.weight"] = torch.ones(24, dtype=torch.int64)

    change_tensors(folder, damage)
    with pytest.raises(UserError) as error:
        load_weights(folder, wanted)
    message = str(error.value)
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "model.layers.0.extra.weight is unknown" in message
    assert "model.norm.weight has shape [25], expected [24]" in message
    assert "model.layers.2.input_layernorm.weight has a dtype that is not one of F32" in message


def test_a_weight_that_the_family_does_not_have_is_named(tmp_path):
    folder = saved.save(tmp_path, "mistral")
    with pytest.raises(UserError, match=r"no tensor for segments\.0\.0\.attention\.key_bias \[3, 2, 10\]"):
        load_weights(folder, abstract(folder, attention_bias=True))


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("bloom", r"is gpt2; they differ in n_positions \(missing\)"),
        ("deepseek_v32", r"is deepseek_v2; they differ in .*index_topk"),
        ("gptj", r"is gpt2; they differ in rotary_dim"),
        ("gpt_neox", r"is llama; they differ in .*use_parallel_residual"),
        ("ernie4_5", r"is llama; they differ in no entry, so only their code differs"),
    ],
)
def test_a_model_of_another_kind_is_answered_with_the_nearest_and_what_differs(tmp_path, kind, nearest):
    folder = saved.save(tmp_path, "llama3")
    entries = {**transformers.CONFIG_MAPPING[kind]().to_dict(), "model_type": kind}
    (folder / "config.json").write_text(json.dumps(entries, default=str))
    with pytest.raises(UserError, match=rf"a model of type {kind}, which no .* {nearest}.*adding_a_family.md.*llama"):
        read_model_keys(folder)


def test_a_text_model_of_another_kind_is_named_with_the_kind_of_the_whole(tmp_path):
    folder = saved.save(tmp_path, "llama3")
    saved.edit_config(folder, model_type="seer", text_config={"model_type": "seer_text"})
    with pytest.raises(UserError, match=r"of type seer_text \(the text_config of a seer\), which no family"):
        read_model_keys(folder)
