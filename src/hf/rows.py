"""Rows of tensor tables that many families share: the names that Llama's files have."""

from src.hf.table import Row

LAYER = "model.layers.{layer}."

OUTER = (
    Row("embedding", "model.embed_tokens.weight", "V D -> V D"),
    Row("final_norm.scale", "model.norm.weight", "D -> D"),
    Row("output", "lm_head.weight", "V D -> D V"),
)
ATTENTION = (
    Row("layer.attention.query", LAYER + "self_attn.q_proj.weight", "(N H) D -> D N H"),
    Row("layer.attention.key", LAYER + "self_attn.k_proj.weight", "(K H) D -> D K H"),
    Row("layer.attention.value", LAYER + "self_attn.v_proj.weight", "(K H) D -> D K H"),
    Row("layer.attention.out", LAYER + "self_attn.o_proj.weight", "D (N H) -> N H D"),
)
ATTENTION_BIASES = (
    Row("layer.attention.query_bias", LAYER + "self_attn.q_proj.bias", "(N H) -> N H"),
    Row("layer.attention.key_bias", LAYER + "self_attn.k_proj.bias", "(K H) -> K H"),
    Row("layer.attention.value_bias", LAYER + "self_attn.v_proj.bias", "(K H) -> K H"),
    Row("layer.attention.out_bias", LAYER + "self_attn.o_proj.bias", "D -> D"),
)
HEAD_NORMS = (
    Row("layer.attention.query_norm.scale", LAYER + "self_attn.q_norm.weight", "H -> H"),
    Row("layer.attention.key_norm.scale", LAYER + "self_attn.k_norm.weight", "H -> H"),
)
NORMS_BEFORE = (
    Row("layer.attention_norm.scale", LAYER + "input_layernorm.weight", "D -> D"),
    Row("layer.feed_forward_norm.scale", LAYER + "post_attention_layernorm.weight", "D -> D"),
)
NORMS_BOTH = (  # Gemma's names, from its second version on
    Row("layer.attention_norm.scale", LAYER + "input_layernorm.weight", "D -> D"),
    Row("layer.attention_out_norm.scale", LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layer.feed_forward_norm.scale", LAYER + "pre_feedforward_layernorm.weight", "D -> D"),
    Row("layer.feed_forward_out_norm.scale", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
)
FEED_FORWARD = (
    Row("layer.feed_forward.wi", LAYER + "mlp.{A:gate_proj,up_proj}.weight", "F D -> D A F"),
    Row("layer.feed_forward.wo", LAYER + "mlp.down_proj.weight", "D F -> F D"),
)
FEED_FORWARD_BIASES = (
    Row("layer.feed_forward.wi_bias", LAYER + "mlp.{A:gate_proj,up_proj}.bias", "F -> A F"),
    Row("layer.feed_forward.wo_bias", LAYER + "mlp.down_proj.bias", "D -> D"),
)
EXPERTS = (
    Row("layer.feed_forward.router", LAYER + "mlp.gate.weight", "E D -> D E"),
    Row("layer.feed_forward.wi", LAYER + "mlp.experts.{E}.{A:gate_proj,up_proj}.weight", "F D -> E D A F"),
    Row("layer.feed_forward.wo", LAYER + "mlp.experts.{E}.down_proj.weight", "D F -> E F D"),
)

# Tables of angles that old files hold beside the weights.
ROTARY_TABLES = r"rotary_emb\.inv_freq$"
