"""Tensor-table rows that many families share, with the names in Llama's files."""

from src.extras.hf.tensor_map import TensorMap

LAYER = "model.layers.{layer}."

OUTER = (
    TensorMap("embedding", "model.embed_tokens.weight", "V D -> V D"),
    TensorMap("final_norm.scale", "model.norm.weight", "D -> D"),
    TensorMap("output", "lm_head.weight", "V D -> D V"),
)
ATTENTION = (
    TensorMap("layer.attention.query", LAYER + "self_attn.q_proj.weight", "(N H) D -> D N H"),
    TensorMap("layer.attention.key", LAYER + "self_attn.k_proj.weight", "(K H) D -> D K H"),
    TensorMap("layer.attention.value", LAYER + "self_attn.v_proj.weight", "(K H) D -> D K H"),
    TensorMap("layer.attention.out", LAYER + "self_attn.o_proj.weight", "D (N H) -> N H D"),
)
ATTENTION_BIASES = (
    TensorMap("layer.attention.query_bias", LAYER + "self_attn.q_proj.bias", "(N H) -> N H"),
    TensorMap("layer.attention.key_bias", LAYER + "self_attn.k_proj.bias", "(K H) -> K H"),
    TensorMap("layer.attention.value_bias", LAYER + "self_attn.v_proj.bias", "(K H) -> K H"),
    TensorMap("layer.attention.out_bias", LAYER + "self_attn.o_proj.bias", "D -> D"),
)
HEAD_NORMS = (
    TensorMap("layer.attention.query_norm.scale", LAYER + "self_attn.q_norm.weight", "H -> H"),
    TensorMap("layer.attention.key_norm.scale", LAYER + "self_attn.k_norm.weight", "H -> H"),
)
NORMS_BEFORE = (
    TensorMap("layer.attention_norm.scale", LAYER + "input_layernorm.weight", "D -> D"),
    TensorMap("layer.feed_forward_norm.scale", LAYER + "post_attention_layernorm.weight", "D -> D"),
)
DECODER = (*OUTER, *NORMS_BEFORE, *ATTENTION, *ATTENTION_BIASES)  # everything but the feed-forward layers
NORMS_BOTH = (  # Gemma's names since version 2
    TensorMap("layer.attention_norm.scale", LAYER + "input_layernorm.weight", "D -> D"),
    TensorMap("layer.attention_out_norm.scale", LAYER + "post_attention_layernorm.weight", "D -> D"),
    TensorMap("layer.feed_forward_norm.scale", LAYER + "pre_feedforward_layernorm.weight", "D -> D"),
    TensorMap("layer.feed_forward_out_norm.scale", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
)
FEED_FORWARD = (
    TensorMap("layer.feed_forward.wi", LAYER + "mlp.{A:gate_proj,up_proj}.weight", "F D -> D A F"),
    TensorMap("layer.feed_forward.wo", LAYER + "mlp.down_proj.weight", "D F -> F D"),
)
FUSED_MLP = (TensorMap("layer.feed_forward.wi", LAYER + "mlp.gate_up_proj.weight", "(A F) D -> D A F"), FEED_FORWARD[1])
FEED_FORWARD_BIASES = (
    TensorMap("layer.feed_forward.wi_bias", LAYER + "mlp.{A:gate_proj,up_proj}.bias", "F -> A F"),
    TensorMap("layer.feed_forward.wo_bias", LAYER + "mlp.down_proj.bias", "D -> D"),
)
EXPERTS = (
    TensorMap("layer.feed_forward.router", LAYER + "mlp.gate.weight", "E D -> D E"),
    TensorMap("layer.feed_forward.wi", LAYER + "mlp.experts.{E}.{A:gate_proj,up_proj}.weight", "F D -> E D A F"),
    TensorMap("layer.feed_forward.wo", LAYER + "mlp.experts.{E}.down_proj.weight", "D F -> E F D"),
)

# Angle tables that old files contain in addition to the weights.
ROTARY_TABLES = r"rotary_emb\.inv_freq$"
