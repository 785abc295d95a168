"""DeepSeek V2 and V3: multi-head latent attention, shared and routed experts; V3 adds multi-token prediction layers."""

from operator import attrgetter, itemgetter

from src.extras.hf import fields, tensors
from src.extras.hf.family import (
    Family,
    Field,
    FieldGroup,
    Json,
    Keys,
    Layers,
    entry,
    read_fields,
    require,
    write_fields,
)

# transformers always uses this for the latent norms, ignoring rms_norm_eps.
LATENT_EPSILON = 1e-6


def _check_attention(hf: Json, keys: Keys) -> Keys:
    require({"num_key_value_heads": keys["base_num_kv_heads"]}, num_key_value_heads=keys["base_num_query_heads"])
    is_default = keys["normalization_layer_epsilon"] == LATENT_EPSILON
    return {} if is_default else {"latent_norm_epsilon": LATENT_EPSILON}


def _read_layers(hf: Json, keys: Keys) -> Keys:
    dense, layers = entry(hf, "first_k_dense_replace", 0), range(keys["base_num_decoder_layers"])
    return fields.layer_pattern([{"num_experts": 1} if layer < dense else {} for layer in layers])


def _write_layers(layers: Layers) -> Json:
    return {"first_k_dense_replace": sum(layer.num_experts == 1 for layer in layers)}


EXPERT_FIELDS = (
    Field("n_shared_experts", "shared_experts", absent=0),
    *fields.rows(
        """
        n_routed_experts       num_experts
        moe_intermediate_size  base_moe_mlp_dim
        num_experts_per_tok
        routed_scaling_factor
        """
    ),
    FieldGroup("first_k_dense_replace", _read_layers, _write_layers),
)
_HEADS = "base_num_query_heads"
FIELDS = (
    *fields.SIZES,
    Field("num_key_value_heads", "base_num_kv_heads", absent=itemgetter(_HEADS), written=attrgetter(_HEADS)),
    FieldGroup("", _check_attention),
    fields.rope(),
    fields.HIDDEN_ACT,
    Field("q_lora_rank", "q_lora_rank", absent=0, written=lambda layer: layer.q_lora_rank or None),
    *fields.rows(
        """
        kv_lora_rank
        qk_nope_head_dim
        qk_rope_head_dim
        v_head_dim
        """
    ),
    *EXPERT_FIELDS,
)
GROUPS = fields.rows(
    """
    n_group     n_routing_groups
    topk_group  topk_routing_group
    """
)
V3_EXPERT_FIELDS = (
    *(*GROUPS, Field("norm_topk_prob", "norm_topk_prob", absent=False)),
    Field("num_nextn_predict_layers", "mtp_num_layers", absent=1),
)
V3_EXPERT_KEYS = {"routed_score_func": "sigmoid", "routing_group_score": "top2", "routed_bias": True}


def _read_v2_groups(hf: Json, keys: Keys) -> Keys | None:
    if hf["topk_method"] == "group_limited_greedy":
        return read_fields(GROUPS, hf)
    return require(hf, topk_method="greedy")


def _write_v2_groups(layers: Layers) -> Json:
    groups = write_fields(GROUPS, layers)
    return {**groups, "topk_method": "group_limited_greedy" if groups["n_group"] > 1 else "greedy"}


def _write_head_dim(layers: Layers) -> Json:
    return {"head_dim": layers[0].qk_rope_head_dim}


V2_TENSORS = (
    *(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.FEED_FORWARD, *tensors.EXPERTS),
    *tensors.rows(
        """
        attention.query                  self_attn.q_b_proj.weight                        (N H) Q -> Q N H if query_down
        attention.query                  self_attn.q_proj.weight                          (N H) D -> D N H
        attention.query_down             self_attn.q_a_proj.weight                        Q D -> D Q
        attention.query_down_norm.scale  self_attn.q_a_layernorm.weight                   Q -> Q
        attention.kv_down                self_attn.kv_a_proj_with_mqa.weight              R D -> D R
        attention.kv_down_norm.scale     self_attn.kv_a_layernorm.weight                  R -> R
        attention.kv_up                  self_attn.kv_b_proj.weight                       (N H) R -> R N H
        attention.out                    self_attn.o_proj.weight                          D (N H) -> N H D
        feed_forward.shared.wi           mlp.shared_experts.{A:gate_proj,up_proj}.weight  F D -> D A F
        feed_forward.shared.wo           mlp.shared_experts.down_proj.weight              D F -> F D
        """
    ),
)
V3_TENSORS = (
    *V2_TENSORS,
    *tensors.rows("feed_forward.correction_bias  mlp.gate.e_score_correction_bias  E -> E"),
    *tensors.rows(
        """
        embedding_norm.scale  enorm.weight             D -> D
        hidden_norm.scale     hnorm.weight             D -> D
        projection            eh_proj.weight           D P -> P D
        final_norm.scale      shared_head.norm.weight  D -> D
        """,
        weight="mtp.",
    ),
)
# Each extra prediction layer has copies of the embedding and the output projection.
V3_COPIES = tensors.rows(
    """
    embedding  embed_tokens.weight      V D -> V D
    output     shared_head.head.weight  V D -> D V
    """,
    weight="",
)
ONLY = {"attention_bias": False, "moe_layer_freq": 1}
DEFAULTS = {"rms_norm_eps": 1e-6, "q_lora_rank": 1536}

DEEPSEEK2 = Family(
    model_type="deepseek_v2",
    fields=(
        *FIELDS,
        FieldGroup("topk_method n_group topk_group", _read_v2_groups, _write_v2_groups),
        FieldGroup("head_dim", write=_write_head_dim),
    ),
    tensors=V2_TENSORS,
    defaults={**DEFAULTS, "n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy"},
    keys={"attention_type": "mla", "rope_interleave": True},
    constants={"scoring_func": "softmax", "moe_layer_freq": 1},
    only={"scoring_func": "softmax", "mlp_bias": False, **ONLY},
    # DeepSeek's code normalizes the chosen scores if norm_topk_prob is set; transformers doesn't. transformers always
    # rotates neighboring dims.
    inert="norm_topk_prob rope_interleave qk_head_dim",
    aliases={"num_experts": "n_routed_experts"},
    skipped=(tensors.ROTARY_TABLES,),
    whole_heads=True,
)
DEEPSEEK3 = Family(
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    fields=(
        *FIELDS,
        *V3_EXPERT_FIELDS,
        # transformers rotates head_dim dims of each head.
        FieldGroup("head_dim", lambda hf, keys: require(hf, head_dim=keys["qk_rope_head_dim"]), _write_head_dim),
        Field("rope_interleave", "rope_interleave", absent=False),
    ),
    tensors=V3_TENSORS,
    defaults={
        **DEFAULTS,
        **{"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
        **{"rope_interleave": True, "norm_topk_prob": True},
    },
    keys={"attention_type": "mla", **V3_EXPERT_KEYS},
    constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", **ONLY},
    inert="qk_head_dim",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    skipped=(tensors.ROTARY_TABLES, r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"),
    copied=V3_COPIES,
)
