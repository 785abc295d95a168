"""Gemma 3's text models: five layers with windows to one without, each kind with its own positions, and head norms."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.families.gemma2 import GEMMA2, gemma2_json, gemma2_keys
from src.hf.family import Family

# What multi-modal folders leave out of their text part.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    cj.refuse(hf, use_bidirectional_attention=False)
    by_kind = cj.entry(hf, "rope_parameters", {})
    everywhere = {"rope_theta": cj.entry(hf, "rope_theta", 1e6), "rope_scaling": hf.get("rope_scaling")}
    windowed = {"rope_theta": cj.entry(hf, "rope_local_base_freq", 1e4)}
    local = cj.rope_keys({**windowed, "rope_parameters": by_kind.get("sliding_attention")})
    keys = {
        **gemma2_keys(hf, **DEFAULTS),
        **cj.rope_keys({**everywhere, "rope_parameters": by_kind.get("full_attention")}),
        "qk_norm": "head",
    }
    every = cj.entry(hf, "sliding_window_pattern", cj.entry(hf, "_sliding_window_pattern", 6))
    return {**keys, **cj.windowed_layers(hf, keys["base_num_decoder_layers"], every, **local)}


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    local = cj.first(layers, "attention_type", "local_sliding")
    return {
        **gemma2_json(layers),
        "attn_logit_softcapping": None,  # which transformers does not apply here
        **cj.rope_json(cj.first(layers, "attention_type", "global")),
        "rope_local_base_freq": local["rope_max_timescale"],
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    whole_heads=True,
    facts=facts,
    hf_config=hf_config,
    rows=(*GEMMA2.rows, *rows.HEAD_NORMS),
)
