"""Llama 4's text models: chunked attention with every fourth layer global and without positions, and experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.errors import UserError
from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family
from src.hf.table import Row

NAMES = {
    "intermediate_size": "base_moe_mlp_dim",
    "intermediate_size_mlp": "base_mlp_dim",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "attention_chunk_size": "chunk_attn_window_size",
}
TEMPERATURE = {"attn_scale": "attn_temperature_scale", "floor_scale": "attn_temperature_floor"}
DEFAULTS = {"attention_chunk_size": 8192, "num_experts_per_tok": 1, "attn_scale": 0.1, "floor_scale": 8192}
CHUNKED = "chunked_attention"
FEED_FORWARD = rows.LAYER + "feed_forward."
PROJECTIONS = "{A:gate_proj,up_proj}.weight"


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    hf = {**DEFAULTS, **hf}
    keys = {
        **cj.shared_keys(hf, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        **cj.rope_keys(hf, theta=500_000.0),
        **cj.read_all(hf, NAMES),
        "mlp_activations": [cj.activation(hf), "linear"],
        "attention_bias": cj.entry(hf, "attention_bias", False),
        "rope_interleave": True,
        "shared_experts": 1,
        "routed_score_func": "sigmoid",
        "scale_expert_inputs": True,
    }
    count = keys["base_num_decoder_layers"]
    step = cj.size(hf, "interleave_moe_layer_step", 1)
    sparse = cj.entry(hf, "moe_layers", list(range(step - 1, count, step)))
    every = cj.size(hf, "no_rope_layer_interval", 4)
    rotated = cj.entry(hf, "no_rope_layers", []) or [(i + 1) % every for i in range(count)]
    if len(rotated) < count:
        raise UserError(f"config.json has {len(rotated)} no_rope_layers: expected {count}, one a layer")
    default = [CHUNKED if rotates else cj.GLOBAL for rotates in rotated[:count]]
    kinds = cj.layer_kinds(hf, default, CHUNKED, cj.GLOBAL)
    with_positions = {"qk_norm": "l2" if cj.entry(hf, "use_qk_norm", True) else "none"}
    tuned = cj.entry(hf, "attn_temperature_tuning", True)
    without = {
        "position_type": "none",
        **cj.read(hf, TEMPERATURE),
        **({} if tuned else {"attn_temperature_scale": 0.0}),
    }
    layers = [
        {
            **(with_positions if rotates else without),
            **({"attention_type": "chunk"} if kind == CHUNKED else {}),
            **({} if i in sparse else {"num_experts": 1}),
        }
        for i, (rotates, kind) in enumerate(zip(rotated, kinds, strict=False))
    ]
    return {**keys, **cj.pattern(layers)}


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    dense, sparse = cj.dense_and_sparse(layers)
    local, everywhere = cj.first(layers, "attention_type", "chunk"), cj.first(layers, "position_type", "none")
    return {
        **cj.shared_json(layers[0]),
        **cj.rope_json(local),
        **cj.write(sparse, NAMES),
        "intermediate_size_mlp": dense["base_mlp_dim"],
        "attention_chunk_size": local["chunk_attn_window_size"] or 8192,
        "layer_types": [CHUNKED if layer["attention_type"] == "chunk" else cj.GLOBAL for layer in layers],
        "hidden_act": cj.activation_name(layers[0]),
        "attention_bias": layers[0]["attention_bias"],
        "use_qk_norm": local["qk_norm"] == "l2",
        "no_rope_layers": [int(layer["position_type"] == "rope") for layer in layers],
        "moe_layers": [i for i, layer in enumerate(layers) if layer["num_experts"] > 1],
        "attn_temperature_tuning": everywhere["attn_temperature_scale"] > 0,
        "attn_scale": everywhere["attn_temperature_scale"] or 0.1,
        "floor_scale": everywhere["attn_temperature_floor"],
    }


LLAMA4 = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        *rows.ATTENTION_BIASES,
        Row("layer.feed_forward.wi", FEED_FORWARD + PROJECTIONS, "F D -> D A F"),
        Row("layer.feed_forward.wo", FEED_FORWARD + "down_proj.weight", "D F -> F D"),
        Row("layer.feed_forward.router", FEED_FORWARD + "router.weight", "E D -> D E"),
        Row("layer.feed_forward.wi", FEED_FORWARD + "experts.gate_up_proj", "E D (A F) -> E D A F"),
        Row("layer.feed_forward.wo", FEED_FORWARD + "experts.down_proj", "E F D -> E F D"),
        Row("layer.feed_forward.shared.wi", FEED_FORWARD + "shared_expert." + PROJECTIONS, "F D -> D A F"),
        Row("layer.feed_forward.shared.wo", FEED_FORWARD + "shared_expert.down_proj.weight", "D F -> F D"),
    ),
    mapped=(
        *cj.SHARED,
        *cj.ROPE_ENTRIES,
        *NAMES,
        *TEMPERATURE,
        *("hidden_act", "attention_bias", "interleave_moe_layer_step", "moe_layers", "no_rope_layer_interval"),
        *("no_rope_layers", "layer_types", "use_qk_norm", "attn_temperature_tuning"),
    ),
)
