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
    by_kind = cj.entry(hf, "rope_parameters", {})
    cj.refuse_others(by_kind, (cj.WINDOWED, cj.GLOBAL))
    windowed, everywhere = (cj.entry(by_kind, kind, {}) for kind in (cj.WINDOWED, cj.GLOBAL))
    everywhere = {**everywhere, **cj.entry(hf, "rope_scaling", {})}
    for parameters in (windowed, everywhere):
        cj.refuse(parameters, truncate=True)  # transformers truncates here, whatever this says
    longest = {"max_position_embeddings": hf.get("max_position_embeddings")}
    theta = cj.entry(hf, "rope_local_base_freq", 1e4)
    local = cj.rope_keys({**longest, "rope_theta": theta, "rope_parameters": windowed})
    keys = {
        **gemma2_keys(hf, **DEFAULTS),
        **cj.rope_keys({**longest, "rope_theta": cj.entry(hf, "rope_theta", 1e6), "rope_parameters": everywhere}),
        "qk_norm": "head",
    }
    every = cj.size(hf, "sliding_window_pattern", 6)
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
    mapped=(
        *(name for name in GEMMA2.mapped if name not in ("attn_logit_softcapping", cj.ORIGINAL)),
        *("sliding_window_pattern", "rope_local_base_freq"),
    ),
    inert=("hidden_act", "_sliding_window_pattern"),  # transformers computes hidden_activation and the name without _
    # transformers reads the cap of the scores and computes none.
    only={"attn_logit_softcapping": None, "use_bidirectional_attention": False, "partial_rotary_factor": 1.0},
)
