"""Mistral: Llama with a sliding window in the first version's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    return {
        **cj.shared_keys(hf, num_key_value_heads=8),
        **cj.rope_keys(hf),
        **cj.window_keys({"sliding_window": 4096, **hf}),
        "mlp_activations": [cj.activation(hf), "linear"],
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        **cj.window_json(keys),
        "hidden_act": cj.activation_name(keys),
    }


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(*rows.OUTER, *rows.NORMS_BEFORE, *rows.ATTENTION, *rows.FEED_FORWARD),
    skipped=(rows.ROTARY_TABLES,),
)
