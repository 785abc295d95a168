"""OLMo 2: norms after attention and feed-forward alone, and on all heads of the queries and of the keys together."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family
from src.hf.table import Row


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    return {
        **cj.shared_keys(hf, rms_norm_eps=1e-5),
        **cj.rope_keys(hf),
        "mlp_activations": [cj.activation(hf), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
        "qk_norm": "all_heads",
        "normalization_placement": "after",
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        "hidden_act": cj.activation_name(keys),
        "attention_bias": keys["attention_bias"],
    }


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        Row("layer.attention.query_norm.scale", rows.LAYER + "self_attn.q_norm.weight", "(N H) -> N H"),
        Row("layer.attention.key_norm.scale", rows.LAYER + "self_attn.k_norm.weight", "(K H) -> K H"),
        Row("layer.attention_out_norm.scale", rows.LAYER + "post_attention_layernorm.weight", "D -> D"),
        *rows.FEED_FORWARD,
        Row("layer.feed_forward_out_norm.scale", rows.LAYER + "post_feedforward_layernorm.weight", "D -> D"),
    ),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, "hidden_act", "attention_bias"),
)
