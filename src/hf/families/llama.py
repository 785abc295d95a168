"""Llama 1, 2 and 3, with 3.1's scaled positions."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    return {
        **cj.shared_keys(hf, rms_norm_eps=1e-6),
        **cj.rope_keys(hf),
        "mlp_activations": [cj.activation(hf), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
        "mlp_bias": cj.entry(hf, "mlp_bias", False),
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        "hidden_act": cj.activation_name(keys),
        "attention_bias": keys["attention_bias"],
        "mlp_bias": keys["mlp_bias"],
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    whole_heads=True,
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        *rows.FEED_FORWARD,
        *rows.FEED_FORWARD_BIASES,
    ),
    skipped=(rows.ROTARY_TABLES,),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, "hidden_act", "attention_bias", "mlp_bias"),
)
