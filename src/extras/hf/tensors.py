"""Rows that many families' tables of tensors share (tensor_map.py explains them), with Llama's tensor names."""

from src.extras.hf.tensor_map import TensorMap

LAYER = "model.layers.{layer}."


def rows(text: str, file: str = LAYER, weight: str = "layer.") -> tuple[TensorMap, ...]:
    """Parses lines of `weight tensor dims [if requires]`; `file` and `weight` are put before the names."""
    cells = (line.split(maxsplit=2) for line in text.strip().splitlines())
    return tuple(TensorMap(weight + ours, file + theirs, *dims.split(" if ")) for ours, theirs, dims in cells)


OUTER = rows(
    """
    embedding         model.embed_tokens.weight  V D -> V D
    final_norm.scale  model.norm.weight          D -> D
    output            lm_head.weight             V D -> D V
    """,
    file="",
    weight="",
)
ATTENTION = rows(
    """
    attention.query  self_attn.q_proj.weight  (N H) D -> D N H
    attention.key    self_attn.k_proj.weight  (K H) D -> D K H
    attention.value  self_attn.v_proj.weight  (K H) D -> D K H
    attention.out    self_attn.o_proj.weight  D (N H) -> N H D
    """
)
ATTENTION_BIASES = rows(
    """
    attention.query_bias  self_attn.q_proj.bias  (N H) -> N H
    attention.key_bias    self_attn.k_proj.bias  (K H) -> K H
    attention.value_bias  self_attn.v_proj.bias  (K H) -> K H
    attention.out_bias    self_attn.o_proj.bias  D -> D
    """
)
HEAD_NORMS = rows(
    """
    attention.query_norm.scale  self_attn.q_norm.weight  H -> H
    attention.key_norm.scale    self_attn.k_norm.weight  H -> H
    """
)
NORMS_BEFORE = rows(
    """
    attention_norm.scale     input_layernorm.weight           D -> D
    feed_forward_norm.scale  post_attention_layernorm.weight  D -> D
    """
)
DECODER = (*OUTER, *NORMS_BEFORE, *ATTENTION, *ATTENTION_BIASES)  # everything but the feed-forward layers
NORMS_BOTH = rows(  # Gemma's names since version 2
    """
    attention_norm.scale         input_layernorm.weight             D -> D
    attention_out_norm.scale     post_attention_layernorm.weight    D -> D
    feed_forward_norm.scale      pre_feedforward_layernorm.weight   D -> D
    feed_forward_out_norm.scale  post_feedforward_layernorm.weight  D -> D
    """
)
FEED_FORWARD = rows(
    """
    feed_forward.wi  mlp.{A:gate_proj,up_proj}.weight  F D -> D A F
    feed_forward.wo  mlp.down_proj.weight              D F -> F D
    """
)
FUSED_MLP = (*rows("feed_forward.wi  mlp.gate_up_proj.weight  (A F) D -> D A F"), FEED_FORWARD[1])
FEED_FORWARD_BIASES = rows(
    """
    feed_forward.wi_bias  mlp.{A:gate_proj,up_proj}.bias  F -> A F
    feed_forward.wo_bias  mlp.down_proj.bias              D -> D
    """
)
EXPERTS = rows(
    """
    feed_forward.router  mlp.gate.weight                               E D -> D E
    feed_forward.wi      mlp.experts.{E}.{A:gate_proj,up_proj}.weight  F D -> E D A F
    feed_forward.wo      mlp.experts.{E}.down_proj.weight              D F -> E F D
    """
)

# Angle tables that old files contain in addition to the weights.
ROTARY_TABLES = r"rotary_emb\.inv_freq$"
