"""Gemma: tied output, embeddings scaled by the root of their width, norms whose stored scale is the excess over one."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family

GEMMA_KEYS = {"normalization_scale_offset": 1.0, "scale_embedding": True}


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys.

    The published files name the exact GELU for an activation; Gemma was trained with the approximate one, which is
    what transformers computes for either name.
    """
    approximate = {**hf, "hidden_act": "gelu_new"} if hf.get("hidden_act") == "gelu" else hf
    return {
        **cj.shared_keys(hf, num_key_value_heads=16, head_dim=256, rms_norm_eps=1e-6, tie_word_embeddings=True),
        **cj.rope_keys(hf),
        **GEMMA_KEYS,
        "mlp_activations": [cj.activation(approximate, default="gelu_new"), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": keys["attention_bias"],
    }


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        *rows.FEED_FORWARD,
    ),
    skipped=(rows.ROTARY_TABLES,),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, "hidden_act", "attention_bias"),
    inert=("hidden_activation",),  # transformers computes hidden_act, whatever this says
    only={"use_bidirectional_attention": False},
)
