"""Mistral: Llama with a sliding window in the first version's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    keys = {
        **cj.shared_keys(hf, num_key_value_heads=8, rms_norm_eps=1e-6),
        **cj.rope_keys(hf),
        **cj.window_keys({"sliding_window": 4096, **hf}),
        "mlp_activations": [cj.activation(hf), "linear"],
    }
    if "layer_types" not in hf:
        return keys
    # With them transformers takes the folder for one of Ministral, whose layers differ.
    count, windowed = keys["base_num_decoder_layers"], keys.pop("attention_type", "")
    return {**keys, **cj.windowed_layers(hf, count, global_every=count + 1 if windowed else 1)}


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
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, "hidden_act", "sliding_window", "layer_types"),
)
