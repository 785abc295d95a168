"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, a clipped activation, experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family
from src.hf.table import Row

NAMES = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "swiglu_limit": "mlp_activations_limit",
    "sliding_window": "sliding_window_size",
    "attention_bias": "attention_bias",
}
DEFAULTS = {"swiglu_limit": 7.0, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4}
# transformers' positions where config.json has none, or a null.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = rows.LAYER + "mlp.experts."
ROUTER = rows.LAYER + "mlp.router."


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    hf = {**DEFAULTS, **hf}
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf["rope_parameters"] = YARN
    keys = {
        **cj.shared_keys(hf, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5),
        **cj.rope_keys(hf, theta=150_000.0),
        **cj.read_all(hf, NAMES),
        "mlp_activations": ["quick_gelu", "plus_one"],
        "mlp_bias": True,
        "attention_sink": True,
        "router_bias": True,
        "norm_topk_prob": True,
    }
    return {**keys, **cj.windowed_layers(hf, keys["base_num_decoder_layers"], global_every=2)}


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys, local = layers[0], cj.first(layers, "attention_type", "local_sliding")
    rope = cj.rope_json(keys)
    return {
        **cj.shared_json(keys),
        **rope,
        # Without any transformers takes the published model's.
        "rope_scaling": rope["rope_scaling"] or {"rope_type": "default"},
        **cj.write(local, NAMES),
        "intermediate_size": keys["base_moe_mlp_dim"],
        "swiglu_alpha": 1.702,
        "layer_types": cj.layer_types(layers),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        Row("layer.attention.sinks", rows.LAYER + "self_attn.sinks", "N -> N"),
        Row("layer.feed_forward.router", ROUTER + "weight", "E D -> D E"),
        Row("layer.feed_forward.router_bias", ROUTER + "bias", "E -> E"),
        Row("layer.feed_forward.wi", EXPERTS + "gate_up_proj", "E D (F A) -> E D A F"),
        Row("layer.feed_forward.wi_bias", EXPERTS + "gate_up_proj_bias", "E (F A) -> E A F"),
        Row("layer.feed_forward.wo", EXPERTS + "down_proj", "E F D -> E F D"),
        Row("layer.feed_forward.wo_bias", EXPERTS + "down_proj_bias", "E D -> E D"),
    ),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, *NAMES, "layer_types"),
    inert=("initial_context_length", "experts_per_token"),  # what the published files say a second time
    only={"swiglu_alpha": 1.702, "hidden_act": "silu"},
    aliases={"num_experts": "num_local_experts"},
)
