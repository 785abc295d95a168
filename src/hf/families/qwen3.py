"""Qwen 3: Llama with a norm on the queries and keys of each head."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    keys = {
        **cj.shared_keys({"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, **hf}),
        **cj.rope_keys(hf),
        "mlp_activations": [cj.activation(hf), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
        "qk_norm": "head",
    }
    cj.layer_kinds(hf, [cj.GLOBAL] * keys["base_num_decoder_layers"], cj.GLOBAL)
    return keys


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        "hidden_act": cj.activation_name(keys),
        "attention_bias": keys["attention_bias"],
    }


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        *rows.HEAD_NORMS,
        *rows.FEED_FORWARD,
    ),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, "hidden_act", "attention_bias", "layer_types"),
    inert=("sliding_window", "max_window_layers"),  # of windows that are not used
    only={"use_sliding_window": False},
)
