import json

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from src.config.model_folders import is_hf_folder
from src.extras.hf.folder import open_folder
from src.system.errors import UserError
from tests.hf import saved


def make(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def whole(tensor):
    return tensor.read(tuple(slice(0, size) for size in tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_bit_for_bit_and_by_slices(tmp_path, dtype):
    x = torch.randn(6, 5).to(dtype)
    tensor = open_folder(make(tmp_path, {"odd": torch.zeros(3, dtype=torch.uint8), "x": x})).tensors["x"]
    assert tensor.shape == (6, 5)
    part = tensor.read((slice(1, 4), slice(2, 5)))
    assert part.dtype.name == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(part.astype(np.float64), x[1:4, 2:5].double().numpy())


def test_a_slice_takes_no_other_bytes_of_the_file(tmp_path, monkeypatch):
    tensor = open_folder(make(tmp_path, {"x": torch.zeros(1000, 100)})).tensors["x"]
    copied = []
    copy = np.array
    monkeypatch.setattr(np, "array", lambda x: copied.append(x.nbytes) or copy(x))
    tensor.read((slice(10, 12), slice(0, 100)))
    assert copied == [2 * 100 * 4]


def test_shards_are_one_folder(tmp_path):
    folder = saved.save(tmp_path, "llama", shard="4KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    read = open_folder(folder).tensors
    expected = saved.tensors(folder)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(whole(read[name]), tensor.numpy())


# ---- Quantised weights


@given(data=st.data())
def test_block_scaled_float8_is_values_times_their_blocks_factor(tmp_path_factory, data):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(11, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 9, size=(3, 4)).astype(np.float32)
    stored = {
        "a.weight": torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.from_numpy(scales),
        "b.weight": torch.ones(2),
    }
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 2]}
    folder = make(tmp_path_factory.mktemp("fp8"), stored, quantization_config=quantization)
    tensors = open_folder(folder).tensors
    assert tensors.keys() == {"a.weight", "b.weight"}
    expected = values.astype(np.float32) * np.kron(scales, np.ones((4, 2), np.float32))[:11, :7]
    index = tuple(
        slice(start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size))) for size in (11, 7)
    )
    np.testing.assert_array_equal(tensors["a.weight"].read(index), expected[index].astype(ml_dtypes.bfloat16))


@given(data=st.data())
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path_factory, data):
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (3, 6, 2, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(110, 140, (3, 6, 2), dtype=np.uint8))
    stored = {"up_blocks": blocks, "up_scales": scales, "up_bias": torch.ones(3)}
    folder = make(tmp_path_factory.mktemp("mxfp4"), stored, quantization_config={"quant_method": "mxfp4"})
    tensors = open_folder(folder).tensors
    assert tensors.keys() == {"up", "up_bias"}
    expected = convert_moe_packed_tensors(blocks, scales).float().numpy()
    assert tensors["up"].shape == expected.shape
    index = tuple(
        slice(start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size)))
        for size in expected.shape
    )
    np.testing.assert_array_equal(tensors["up"].read(index).astype(np.float32), expected[index])


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}])
def test_other_quantised_formats_are_refused_by_name(tmp_path, quantization):
    folder = make(tmp_path, {"x": torch.ones(2)}, quantization_config=quantization)
    with pytest.raises(UserError, match=f"quantized as {quantization['quant_method']}"):
        open_folder(folder)


def test_a_format_that_only_the_text_models_entries_name_is_refused_by_name(tmp_path):
    """As Kimi K2.5's config.json has it."""
    text = {"quantization_config": {"quant_method": "compressed-tensors"}}
    folder = make(tmp_path, {"x": torch.ones(2)}, text_config=text)
    with pytest.raises(UserError, match="quantized as compressed-tensors"):
        open_folder(folder)


# ---- Bad input


def test_a_folder_without_config_json(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    assert is_hf_folder(tmp_path)
    with pytest.raises(UserError, match=r"there is no .*config\.json: expected a Hugging Face model folder"):
        open_folder(tmp_path)


def test_a_config_json_that_is_none(tmp_path):
    make(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "config.json").write_text("{'single': 1}")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        open_folder(tmp_path)


@pytest.mark.parametrize("size", [4, 20, -1])
def test_a_truncated_file_is_named(tmp_path, size):
    file = make(tmp_path, {"x": torch.ones(100)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        open_folder(tmp_path)


def test_a_file_that_is_no_safetensors_file(tmp_path):
    file = make(tmp_path, {"x": torch.ones(2)}) / "model.safetensors"
    file.write_bytes((5).to_bytes(8, "little") + b"abcdefgh")
    with pytest.raises(UserError, match="header is not JSON"):
        open_folder(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    folder = saved.save(tmp_path, "llama", shard="8KB")
    missing = sorted(folder.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(UserError, match=f"lacks {missing.name}"):
        open_folder(folder)


def test_pickled_weights_are_told_how_to_be_had(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"only pytorch_model\.bin.*expected model\.safetensors"):
        open_folder(tmp_path)


# ---- Folders that lie


def rewrite_header(file, change):
    """Applies `change` to the parsed header of a safetensors file; the bytes of its tensors stay."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"data_offsets": [-8, 0]}},  # into the header
        {"a": {"data_offsets": [8, 0]}},
        {"a": {"data_offsets": [8, 16]}, "b": {"data_offsets": [8, 16]}},  # the same bytes twice
        {"a": {"data_offsets": [0, 12]}, "b": {"data_offsets": [12, 16]}},
        {"a": {"data_offsets": [0, 16]}},
        {"a": {"shape": [3]}},
        {"a": {"shape": [-2]}},
        {"a": {"shape": [2.0]}},
        {"a": {"shape": 2}},
        {"a": {"dtype": "F16"}},
        {"a": {"dtype": ["F32"]}},
        {"a": {"data_offsets": [0]}},
        {"a": {"data_offsets": "08"}},
        {"a": {"data_offsets": ["0", "8"]}},
        {"a": {"dtype": "C64", "data_offsets": [8, 0]}},  # a dtype whose size is not known here
    ],
)
def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path, entries):
    file = make(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}) / "model.safetensors"

    def lie(header):
        for name, changed in entries.items():
            header[name].update(changed)

    rewrite_header(file, lie)
    with pytest.raises(SafetensorError):  # the format's own reader
        load_file(file)
    with pytest.raises(UserError, match=r"model\.safetensors.* tensor [ab]"):
        open_folder(tmp_path)


def test_bytes_that_belong_to_no_tensor_are_refused(tmp_path):
    file = make(tmp_path, {"a": torch.ones(2)}) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: it has \d+ bytes, its header describes \d+"):
        open_folder(tmp_path)


@pytest.mark.parametrize("header", ["[" * 100_000, "[1]", '{"a": 1}', "{}x"])
def test_a_header_of_another_kind_is_refused(tmp_path, header):
    file = make(tmp_path, {"a": torch.ones(2)}) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "sub/../../secret.safetensors", "{root}/secret.safetensors"]
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, place):
    folder = make(tmp_path / "model", {"a": torch.ones(2)})
    save_file({"b": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "sub").mkdir()
    index = {"weight_map": {"a": "model.safetensors", "b": place.format(root=tmp_path)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=r"index\.json places b in .*secret\.safetensors: expected the name of a file in"
    ):
        open_folder(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": 7}, "expected the name of a file"),
        ({"a": ["model.safetensors"]}, "expected the name of a file"),
        ("model.safetensors", 'no "weight_map"'),
        ({}, 'no "weight_map"'),
        ({"a": "x" * 5000, "b": "model.safetensors"}, "lacks x"),
        ({"a": "b\0c", "b": "model.safetensors"}, "lacks b"),
        ({"a": ".", "b": "model.safetensors"}, "lacks"),
        ({"b": "model.safetensors", "a": "other.safetensors"}, "model.safetensors has the tensor a"),
    ],
)
def test_an_index_that_is_no_map_of_the_folders_files_is_refused(tmp_path, weight_map, message):
    folder = make(tmp_path, {"a": torch.ones(2)})
    save_file({"b": torch.ones(2)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_a_single_file_beside_the_index_of_an_earlier_model_is_read_as_transformers_reads_it(tmp_path):
    folder = saved.save(tmp_path, "llama", shard="10KB")
    shard = (folder / "model-00001-of-00008.safetensors").read_bytes()
    model = saved.transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data += 5
    model.save_pretrained(folder)
    (folder / "model-00001-of-00008.safetensors").write_bytes(shard)
    assert (folder / "model.safetensors.index.json").is_file()
    tensors = open_folder(folder).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    assert np.array_equal(whole(tensors["model.norm.weight"]), model.model.norm.weight.detach())


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = make(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    save_file({"a": torch.zeros(2), "c": torch.ones(2)}, folder / "other.safetensors")
    index = {"weight_map": {"b": "model.safetensors", "c": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"has the tensor a, .* in model\.safetensors"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ['{"a":' * 100_000, "\xff", "[]", "7"])
def test_json_that_is_none_or_too_deep_is_refused(tmp_path, name, text):
    make(tmp_path, {"a": torch.ones(2)})
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=name):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    make(tmp_path, {"a": torch.ones(2)})
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        open_folder(tmp_path)


# ---- Quantised weights that do not fit

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 2]}


def float8_folder(tmp_path, values=None, scales=None, quantization=FP8):
    values = torch.ones(8, 4).to(torch.float8_e4m3fn) if values is None else values
    scales = torch.ones(2, 2) if scales is None else scales
    return make(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, quantization_config=quantization)


def test_scales_that_are_powers_of_two_alone_are_read(tmp_path):
    """As DeepSeek's later folders have them: float8_e8m0."""
    scales = torch.tensor([[0.5, 4.0], [1.0, 2.0**-20]])
    tensor = open_folder(float8_folder(tmp_path, scales=scales.to(torch.float8_e8m0fnu))).tensors["a.weight"]
    expected = scales.repeat_interleave(4, 0).repeat_interleave(2, 1)
    np.testing.assert_array_equal(whole(tensor).astype(np.float32), expected.numpy())


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (None, torch.ones(2, 2, dtype=torch.uint8), "a.weight_scale_inv .* dtype"),
        (None, torch.ones(2, 2, dtype=torch.int32), "a.weight_scale_inv .* dtype"),
        (None, torch.ones(2, 3), r"a.weight_scale_inv .* \[2, 3\]"),
        (torch.ones(8, 4), None, "a.weight .* dtype"),
        (torch.ones(8, 4).to(torch.float8_e5m2), None, "a.weight .* dtype"),
        (torch.ones(2, 8, 4).to(torch.float8_e4m3fn), None, r"a.weight .* \[2, 8, 4\]"),
    ],
)
def test_float8_weights_and_scales_that_do_not_fit_are_refused_by_name(tmp_path, values, scales, message):
    with pytest.raises(UserError, match=message):
        open_folder(float8_folder(tmp_path, values, scales))


@pytest.mark.parametrize("block", [[0, 2], [-4, 2], [4.0, 2.0], ["4", "2"], [4], 4, None])
def test_blocks_of_no_size_are_refused(tmp_path, block):
    folder = float8_folder(tmp_path, quantization={"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(UserError, match="weight_block_size"):
        open_folder(folder)


@pytest.mark.parametrize("quantization", ["fp8", ["fp8"], 8, {"quant_method": ["fp8"]}, {"bits": 4}])
def test_a_quantization_config_of_another_kind_is_refused(tmp_path, quantization):
    with pytest.raises(UserError, match=r"quantization_config|quantized"):
        open_folder(float8_folder(tmp_path, quantization=quantization))


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.ones(3, 6, 2, 16), torch.ones(3, 6, 2, dtype=torch.uint8), "up_blocks .* dtype"),
        (torch.ones(3, 6, 16, dtype=torch.uint8), torch.ones(3, 6, dtype=torch.uint8), r"up_blocks .* \[3, 6, 16\]"),
        (torch.ones(3, 6, 2, 8, dtype=torch.uint8), torch.ones(3, 6, 2, dtype=torch.uint8), r"\[3, 6, 2, 8\]"),
        (torch.ones(3, 6, 2, 16, dtype=torch.uint8), torch.ones(3, 6, 2), "up_scales .* dtype"),
        (torch.ones(3, 6, 2, 16, dtype=torch.uint8), torch.ones(3, 6, dtype=torch.uint8), r"up_scales .* \[3, 6\]"),
    ],
)
def test_mxfp4_blocks_and_scales_that_do_not_fit_are_refused_by_name(tmp_path, blocks, scales, message):
    folder = make(tmp_path, {"up_blocks": blocks, "up_scales": scales}, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UserError, match=message):
        open_folder(folder)
