"""DeepSeek V2 and V3: multi-head latent attention, shared and routed experts, in V3 extra prediction layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.family import Family
from src.hf.table import Row

NAMES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "routed_scaling_factor": "routed_scaling_factor",
}
GROUPS = {"n_group": "n_routing_groups", "topk_group": "topk_routing_group"}
# transformers leaves the norms of the latents at this, whatever rms_norm_eps says.
LATENT_EPSILON = 1e-6
MAPPED = (
    *cj.SHARED,
    *cj.ROPE_ENTRIES,
    *NAMES,
    *GROUPS,
    *("hidden_act", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"),
)
ONLY = {"attention_bias": False, "moe_layer_freq": 1}
ATTENTION = rows.LAYER + "self_attn."
SHARED = rows.LAYER + "mlp.shared_experts."
V2_ROWS = (
    *rows.OUTER,
    *rows.NORMS_BEFORE,
    Row("layer.attention.query", ATTENTION + "q_b_proj.weight", "(N H) Q -> Q N H", beside="query_down"),
    Row("layer.attention.query", ATTENTION + "q_proj.weight", "(N H) D -> D N H"),
    Row("layer.attention.query_down", ATTENTION + "q_a_proj.weight", "Q D -> D Q"),
    Row("layer.attention.query_down_norm.scale", ATTENTION + "q_a_layernorm.weight", "Q -> Q"),
    Row("layer.attention.kv_down", ATTENTION + "kv_a_proj_with_mqa.weight", "R D -> D R"),
    Row("layer.attention.kv_down_norm.scale", ATTENTION + "kv_a_layernorm.weight", "R -> R"),
    Row("layer.attention.kv_up", ATTENTION + "kv_b_proj.weight", "(N H) R -> R N H"),
    Row("layer.attention.out", ATTENTION + "o_proj.weight", "D (N H) -> N H D"),
    *rows.FEED_FORWARD,
    *rows.EXPERTS,
    Row("layer.feed_forward.shared.wi", SHARED + "{A:gate_proj,up_proj}.weight", "F D -> D A F"),
    Row("layer.feed_forward.shared.wo", SHARED + "down_proj.weight", "D F -> F D"),
)
V3_ROWS = (
    *V2_ROWS,
    Row("layer.feed_forward.correction_bias", rows.LAYER + "mlp.gate.e_score_correction_bias", "E -> E"),
    Row("mtp.embedding_norm.scale", rows.LAYER + "enorm.weight", "D -> D"),
    Row("mtp.hidden_norm.scale", rows.LAYER + "hnorm.weight", "D -> D"),
    Row("mtp.projection", rows.LAYER + "eh_proj.weight", "D P -> P D"),
    Row("mtp.final_norm.scale", rows.LAYER + "shared_head.norm.weight", "D -> D"),
)
# Each extra prediction layer has copies of the embedding and the output projection.
V3_COPIES = (
    Row("embedding", rows.LAYER + "embed_tokens.weight", "V D -> V D"),
    Row("output", rows.LAYER + "shared_head.head.weight", "V D -> D V"),
)


def _facts(hf: Mapping[str, Any]) -> cj.Keys:
    """What both versions' config.json say alike."""
    keys = {
        **cj.shared_keys(hf, rms_norm_eps=1e-6),
        **cj.rope_keys(hf),
        **cj.read_all(hf, NAMES),
        # A null means none, and no entry the value of the published models.
        "q_lora_rank": cj.entry(hf, "q_lora_rank", 0 if "q_lora_rank" in hf else 1536),
        "shared_experts": cj.entry(hf, "n_shared_experts", 0),
        "attention_type": "mla",
        "mlp_activations": [cj.activation(hf), "linear"],
    }
    if keys["normalization_layer_epsilon"] != LATENT_EPSILON:  # else the key's default is that, as older runs have it
        keys["latent_norm_epsilon"] = LATENT_EPSILON
    del keys["head_dim"]  # In newer config.json files that of the rotary part.
    cj.refuse({"num_key_value_heads": keys["base_num_kv_heads"]}, num_key_value_heads=keys["base_num_query_heads"])
    dense = cj.entry(hf, "first_k_dense_replace", 0)
    count = keys["base_num_decoder_layers"]
    return {**keys, **cj.pattern([{"num_experts": 1} if i < dense else {} for i in range(count)])}


def _hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    dense, sparse = cj.dense_and_sparse(layers)
    return {
        **cj.shared_json(dense),
        **cj.rope_json(dense),
        **{name: value or None for name, value in cj.write(sparse, NAMES).items()},
        "n_shared_experts": sparse["shared_experts"],
        "num_key_value_heads": dense["base_num_query_heads"],
        "head_dim": dense["qk_rope_head_dim"],
        "q_lora_rank": dense["q_lora_rank"] or None,
        "hidden_act": cj.activation_name(dense),
        "n_group": sparse["n_routing_groups"],
        "topk_group": sparse["topk_routing_group"],
        "first_k_dense_replace": sum(layer["num_experts"] == 1 for layer in layers),
        "moe_layer_freq": 1,
    }


def v2_facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json of version 2 to keys."""
    hf = {"n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy", **hf}
    grouped = hf["topk_method"] == "group_limited_greedy"
    cj.refuse({} if grouped else hf, topk_method="greedy")
    return {**_facts(hf), "rope_interleave": True, **(cj.read_all(hf, GROUPS) if grouped else {})}


def v2_hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json of version 2."""
    hf = _hf_config(layers)
    return {**hf, "topk_method": "group_limited_greedy" if hf["n_group"] > 1 else "greedy", "scoring_func": "softmax"}


def v3_facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json of version 3 to keys."""
    hf = {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, **hf}
    keys = _facts(hf)
    cj.refuse(hf, head_dim=keys["qk_rope_head_dim"])  # transformers rotates so many
    return {
        **keys,
        **cj.read_all(hf, GROUPS),
        "rope_interleave": cj.entry(hf, "rope_interleave", True),
        "norm_topk_prob": cj.entry(hf, "norm_topk_prob", True),
        "routed_score_func": "sigmoid",
        "routing_group_score": "top2",
        "routed_bias": True,
        "mtp_num_layers": cj.entry(hf, "num_nextn_predict_layers", 1),
    }


def v3_hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json of version 3."""
    return {
        **_hf_config(layers),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": layers[0]["rope_interleave"],
        "norm_topk_prob": cj.dense_and_sparse(layers)[1]["norm_topk_prob"],
        "num_nextn_predict_layers": layers[0]["mtp_num_layers"],
    }


DEEPSEEK2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    whole_heads=True,
    facts=v2_facts,
    hf_config=v2_hf_config,
    rows=V2_ROWS,
    skipped=(rows.ROTARY_TABLES,),
    mapped=(*MAPPED, "topk_method"),
    # The published code normalises the chosen scores where norm_topk_prob says so; transformers doesn't. It rotates
    # neighbours always.
    inert=("norm_topk_prob", "rope_interleave", "qk_head_dim"),
    only={"scoring_func": "softmax", "mlp_bias": False, **ONLY},
    aliases={"num_experts": "n_routed_experts"},
)
DEEPSEEK3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    facts=v3_facts,
    hf_config=v3_hf_config,
    rows=V3_ROWS,
    skipped=(rows.ROTARY_TABLES, r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"),
    copied=V3_COPIES,
    mapped=(*MAPPED, "norm_topk_prob", "rope_interleave", "num_nextn_predict_layers"),
    inert=("qk_head_dim",),
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", **ONLY},
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
