"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, a clipped activation, experts."""

from src.extras.hf import fields, tensors
from src.extras.hf.family import Family, FieldGroup, Json, Keys, Layers

# transformers' default, for a missing entry or null.
YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def _read_rope(hf: Json, keys: Keys) -> Keys:
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": YARN}
    return fields.read_rope(hf, keys, theta=150_000.0)


def _write_rope(layers: Layers) -> Json:
    rope = fields.write_rope(layers)
    return {**rope, "rope_scaling": rope["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = Family(
    model_type="gpt_oss",
    fields=(
        *(*fields.SIZES, *fields.HEADS, fields.ALTERNATING_WINDOWS, *fields.LOCAL_EXPERTS),
        FieldGroup(fields.ROPE_ENTRIES, _read_rope, _write_rope),
        *fields.rows(
            """
            swiglu_limit    mlp_activations_limit
            attention_bias
            sliding_window  sliding_window_size
            """
        ),
    ),
    tensors=(
        *tensors.DECODER,
        *tensors.rows(
            """
            attention.sinks           self_attn.sinks                N -> N
            feed_forward.router       mlp.router.weight              E D -> D E
            feed_forward.router_bias  mlp.router.bias                E -> E
            feed_forward.wi           mlp.experts.gate_up_proj       E D (F A) -> E D A F
            feed_forward.wi_bias      mlp.experts.gate_up_proj_bias  E (F A) -> E A F
            feed_forward.wo           mlp.experts.down_proj          E F D -> E F D
            feed_forward.wo_bias      mlp.experts.down_proj_bias     E D -> E D
            """
        ),
    ),
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4},
        **{"swiglu_limit": 7.0, "sliding_window": 128, "attention_bias": True},
    },
    keys={
        "mlp_activations": ["quick_gelu", "plus_one"],
        **{"mlp_bias": True, "attention_sink": True, "router_bias": True, "norm_topk_prob": True},
    },
    constants={"swiglu_alpha": 1.702},
    only={"swiglu_alpha": 1.702, "hidden_act": "silu"},
    inert="initial_context_length experts_per_token",  # duplicate entries in the published files
    aliases={"num_experts": "num_local_experts"},
)
