"""Stretched rotary positions are those that transformers computes of the same config.json."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from src.config.schema import Config
from src.extras.hf.families.llama import LLAMA
from src.model.rope_stretching import stretch
from src.system.errors import UserError
from tests.tiny import load, spec_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25}
PAIRS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1, 2.5, 4.0, 4.5]}
KINDS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "dynamic by 1": {"rope_type": "dynamic", "factor": 1.0},
    "yarn": {**YARN, "original_max_position_embeddings": 16},
    "yarn with a factor": {**YARN, "attention_factor": 0.8, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", **PAIRS, "original_max_position_embeddings": 16},
    "longrope by 1": {"rope_type": "longrope", **PAIRS, "original_max_position_embeddings": 64},
    "longrope with a factor": {
        **{"rope_type": "longrope", **PAIRS, "attention_factor": 1.3},
        **{"factor": 2.0, "original_max_position_embeddings": 16},
    },
}


@pytest.mark.parametrize("length", [16, 17, 64, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_texts_positions_are_transformers(kind, length):
    """Of a text as long as `max_target_length`."""
    parameters = {"rope_theta": 50.0, **KINDS[kind]}
    layer = spec_of(
        Config.of({**LLAMA.read_config({**SIZES, "rope_parameters": parameters}), "max_target_length": length})
    ).layers[0]
    plain = 1.0 / 50.0 ** (np.arange(4, dtype=np.float32) / np.float32(4))
    frequencies, size = stretch(plain, layer)
    compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, expected_size = compute(LlamaConfig(**SIZES, rope_parameters=dict(parameters)), "cpu", seq_len=length)
    torch.testing.assert_close(torch.tensor(frequencies), expected, rtol=1e-6, atol=0)
    assert size == pytest.approx(expected_size, rel=1e-12)


@pytest.mark.parametrize("factors", ["[1, 2, 3]", "[1, 2, 3, 0]", "[1, 2, 3, x]"])
def test_a_list_that_is_not_one_positive_number_per_pair_is_refused(factors):
    with pytest.raises(UserError, match="rope_type=longrope needs rope_long_factor: a list of 4 positive numbers"):
        load(rope_type="longrope", rope_short_factor="[1, 1, 1, 1]", rope_long_factor=factors)
