"""GLM-4, which rotates neighboring dims in half of each head, and its successors.

GLM-4-0414 has norms before and after attention and feed-forward; GLM-4.5 rotates halves, like Llama, and has DeepSeek
V3's experts.
"""

from dataclasses import replace

from src.extras.hf import fields, tensors
from src.extras.hf.families import deepseek
from src.extras.hf.family import Family, Field, FieldGroup, require

FIELDS = (
    *(*fields.DECODER, fields.rope(partial=0.5), fields.ATTENTION_BIAS),
    # Refuses a null head_dim, for which transformers has no default.
    FieldGroup("", lambda hf, keys: require(hf, head_dim=keys["head_dim"])),
)

GLM = Family(
    model_type="glm",
    fields=FIELDS,
    tensors=(*tensors.DECODER, *tensors.FUSED_MLP),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    keys={"attention_out_bias": False, "rope_interleave": True},
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    tensors=(
        *GLM.tensors,
        *tensors.rows(
            """
            attention_out_norm.scale     post_self_attn_layernorm.weight  D -> D
            feed_forward_out_norm.scale  post_mlp_layernorm.weight        D -> D
            """
        ),
    ),
    keys={**GLM.keys, "normalization_placement": "both"},
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    fields=(
        *(*FIELDS, *deepseek.EXPERT_FIELDS, *deepseek.V3_EXPERT_FIELDS),
        Field("use_qk_norm", "qk_norm", "none", {True: "head", False: "none"}),
    ),
    tensors=(
        *(*tensors.ATTENTION, *tensors.ATTENTION_BIASES, *tensors.HEAD_NORMS),
        *(row for row in deepseek.V3_TENSORS if not row.weight.startswith("layer.attention.")),
    ),
    defaults={
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "n_routed_experts": 128},
        **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "n_group": 1},
        **{"topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    },
    keys={"attention_out_bias": False, **deepseek.V3_EXPERT_KEYS},
    aliases=deepseek.DEEPSEEK3.aliases,
    skipped=deepseek.DEEPSEEK3.skipped,
    copied=deepseek.V3_COPIES,
)
