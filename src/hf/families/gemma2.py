"""Gemma 2: windows in every other layer, norms before and after, both soft caps."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.families.gemma import GEMMA_KEYS
from src.hf.family import Family

NAMES = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attn_logits_soft_cap",
    "final_logit_softcapping": "final_logits_soft_cap",
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def gemma2_keys(hf: Mapping[str, Any], **defaults: Any) -> cj.Keys:
    """What this version and the next have in common, for config.json with `defaults` for what it leaves out."""
    hf = {"sliding_window": 4096, "query_pre_attn_scalar": 256, **hf}
    return {
        **cj.shared_keys(hf, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True, **defaults),
        **GEMMA_KEYS,
        **cj.read(hf, NAMES),
        "mlp_activations": [cj.activation(hf, "hidden_activation", "gelu_pytorch_tanh"), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
        "normalization_placement": "both",
        **cj.read_all(hf, {"sliding_window": "sliding_window_size"}),
    }


def gemma2_json(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """The reverse of `gemma2_keys`."""
    keys, local = layers[0], cj.first(layers, "attention_type", "local_sliding")
    return {
        **cj.shared_json(keys),
        **{name: value or None for name, value in cj.write(keys, NAMES).items()},
        "query_pre_attn_scalar": int(keys["query_pre_attn_scalar"] or keys["head_dim"]),  # as transformers asks
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": keys["attention_bias"],
        "sliding_window": local["sliding_window_size"],
        "layer_types": cj.layer_types(layers),
    }


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    keys = {**gemma2_keys({**CAPS, **hf}, num_key_value_heads=4), **cj.rope_keys(hf)}
    return {**keys, **cj.windowed_layers(hf, keys["base_num_decoder_layers"], global_every=2)}


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    return {**gemma2_json(layers), **cj.rope_json(layers[0])}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    whole_heads=True,
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BOTH,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        *rows.FEED_FORWARD,
    ),
    mapped=(
        *cj.SHARED,
        *cj.ROPE_ENTRIES,
        *NAMES,
        *("hidden_activation", "attention_bias", "sliding_window", "layer_types"),
    ),
    inert=("hidden_act",),  # transformers computes hidden_activation
    only={"use_bidirectional_attention": False},
)
