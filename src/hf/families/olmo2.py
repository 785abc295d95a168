"""OLMo 2: norms after attention and feed-forward alone, and on all heads of the queries and of the keys together."""

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.tensor_map import TensorMap

LAYER = tensors.LAYER

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS),
    tensors=(
        *(*tensors.OUTER, *tensors.ATTENTION, *tensors.ATTENTION_BIASES, *tensors.FEED_FORWARD),
        TensorMap("layer.attention.query_norm.scale", LAYER + "self_attn.q_norm.weight", "(N H) -> N H"),
        TensorMap("layer.attention.key_norm.scale", LAYER + "self_attn.k_norm.weight", "(K H) -> K H"),
        TensorMap("layer.attention_out_norm.scale", LAYER + "post_attention_layernorm.weight", "D -> D"),
        TensorMap("layer.feed_forward_out_norm.scale", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
    ),
    defaults={"rms_norm_eps": 1e-5},
    keys={"qk_norm": "all_heads", "normalization_placement": "after"},
)
