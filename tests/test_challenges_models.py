"""Odd things found by trying to break families, conversion and decoding: each gets an answer that names it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from src.config.command_keys import Decoding
from src.data.readers.synthetic import SyntheticSource
from src.data.tokenizer import ByteTokenizer
from src.data.types import EvalSet, InputSpec
from src.extras.generation.completion import encode_prompt
from src.extras.generation.decode import read_prompts
from src.extras.generation.generate import Speed
from src.extras.hf.convert import compare
from src.extras.hf.folder import open_folder
from src.extras.hf.load import match_tensors
from src.run import resolve_config
from src.run.evaluator import Evaluator
from src.step.eval_step import eval_step
from src.step.state import TrainState
from src.system.errors import UserError
from tests import tiny

ROWS = tiny.packed_rows(0)


def make(folder, tensors, **config):
    """A Hugging Face folder of these tensors."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FLOAT8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}
MXFP4 = {"quant_method": "mxfp4"}
VALUES, BLOCKS = torch.ones(8, 5).to(torch.float8_e4m3fn), torch.ones(2, 3, 1, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("quantization", "tensors", "named"),
    [
        (FLOAT8, {"x_scale_inv": torch.ones(2, 2)}, "x missing"),
        (FLOAT8, {"x": VALUES, "x_scale_inv": torch.ones(1, 2)}, r"x_scale_inv .*shape \[1, 2\], expected \[2, 2\]"),
        (MXFP4, {"x_blocks": BLOCKS}, "x_scales missing"),
        (MXFP4, {"x_scales": BLOCKS[..., 0].clone().contiguous()}, "x_blocks missing"),
        (
            MXFP4,
            {"x_blocks": BLOCKS.clone(), "x_scales": BLOCKS[:, :, 0].clone().contiguous()},
            r"x_scales .*shape \[2, 3, 16\], expected \[2, 3, 1\]",
        ),
        ({"load_in_8bit": True}, {"x": torch.ones(2)}, "load_in_8bit"),
    ],
)
def test_quantised_weights_that_are_not_whole_are_named(tmp_path, quantization, tensors, named):
    with pytest.raises(UserError, match=named):
        open_folder(make(tmp_path, tensors, quantization_config=quantization))


def test_float8_without_scales_is_no_weight(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, **sizes)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    norm = {"model.norm.weight": load_file(file)["model.norm.weight"].to(torch.float8_e4m3fn)}
    save_file(norm, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as float8_e4m3fn, but has no scales"):
        match_tensors(open_folder(tmp_path), {"final_norm": {"scale": jax.ShapeDtypeStruct((8,), "float32")}})


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["x"]}'])
def test_an_index_that_places_no_tensors(tmp_path, index):
    (make(tmp_path, {"x": torch.ones(2)}) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json has no \"weight_map\""):
        open_folder(tmp_path)


def test_a_header_that_is_a_list(tmp_path):
    (make(tmp_path, {"x": torch.ones(2)}) / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"[1,2,34]")
    with pytest.raises(UserError, match="header is not JSON"):
        open_folder(tmp_path)


def test_check_takes_a_model_with_fewer_positions_than_base_yml_has_tokens_a_row(tmp_path):
    config = GPT2Config(vocab_size=9, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert compare(tmp_path, tmp_path).largest_difference < 2e-4


def test_an_interactive_loop_that_ends_at_once_has_no_speed():
    assert Speed().lines() == []


def test_half_of_a_surrogate_pair_in_a_prompt_and_a_byte_order_mark_before_it(write):
    decoding = Decoding(prompt_path=write("prompts.jsonl", '\ufeff{"prompt": "a\\ud800"}\n'))
    (prompt,) = read_prompts(decoding, InputSpec.of(resolve_config.load([tiny.BASE]), ByteTokenizer()))
    assert ByteTokenizer().decode(encode_prompt(decoding, 16, ByteTokenizer(), prompt)).startswith("a")


@pytest.mark.parametrize(
    "returned",
    [
        *(None, 1.0, {"x": 1.0}, {"x": (1, 2, 3)}, {"x": (jnp.ones(2), jnp.ones(2))}),
        *({"loss": (1, 2)}, {"top/1": (1, 2)}, {1: (1, 2)}),
    ],
)
def test_a_users_metrics_that_are_no_sums_and_counts(returned):
    plan = dataclasses.replace(tiny.make()[1], eval_metrics=lambda logits, batch: returned)
    weights = tiny.random_weights(plan)
    with pytest.raises(UserError, match="eval_metrics must"):
        jax.eval_shape(lambda weights: eval_step(plan.split(weights), ROWS, plan), weights)


def test_an_evaluation_in_which_no_token_counts_is_no_perfect_one():
    config, plan = tiny.make(eval_steps=1, per_device_batch_size=1)
    nothing = {"loss_sum": np.float32(0), "tokens": np.float32(0)}
    evaluation = Evaluator(
        config.evaluation,
        InputSpec.of(config, None),
        plan,
        lambda parts, batch: nothing,
        EvalSet("", SyntheticSource(tiny.VOCAB, tiny.LENGTH, 0), 1),
    )
    with pytest.raises(UserError, match="no token of the evaluation counts"):
        evaluation.run(TrainState(0, (), ()))
