"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family
from src.hf.table import Row

NAMES = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
EXPERTS = rows.LAYER + "block_sparse_moe."


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    return {
        **cj.shared_keys(hf, num_key_value_heads=8, rms_norm_eps=1e-5),
        **cj.rope_keys(hf, theta=1e6),
        **cj.window_keys(hf),
        **cj.read_all({"num_local_experts": 8, "num_experts_per_tok": 2, **hf}, NAMES),
        "mlp_activations": [cj.activation(hf), "linear"],
        "norm_topk_prob": True,
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    keys = layers[0]
    return {
        **cj.shared_json(keys),
        **cj.rope_json(keys),
        **cj.window_json(keys),
        **cj.write(keys, NAMES),
        "intermediate_size": keys["base_moe_mlp_dim"],
        "hidden_act": cj.activation_name(keys),
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(
        *rows.OUTER,
        *rows.NORMS_BEFORE,
        *rows.ATTENTION,
        Row("layer.feed_forward.router", EXPERTS + "gate.weight", "E D -> D E"),
        Row("layer.feed_forward.wi", EXPERTS + "experts.{E}.{A:w1,w3}.weight", "F D -> E D A F"),
        Row("layer.feed_forward.wo", EXPERTS + "experts.{E}.w2.weight", "D F -> E F D"),
    ),
    skipped=(rows.ROTARY_TABLES,),
    mapped=(*cj.SHARED, *cj.ROPE_ENTRIES, *NAMES, "hidden_act", "sliding_window"),
    aliases={"num_experts": "num_local_experts"},
)
