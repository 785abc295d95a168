import json

import ml_dtypes
import numpy as np
import pytest
import saved
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from src.errors import UserError
from src.hf.folder import is_hf_folder, open_folder


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
    with pytest.raises(UserError, match=f"quantised as {quantization['quant_method']}"):
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
