"""Mixtral: Mistral with experts in every layer."""

from operator import itemgetter

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.fields import Field, FieldGroup
from src.hf.tensor_map import TensorMap

EXPERTS = tensors.LAYER + "block_sparse_moe."

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *fields.SIZES,
        *fields.HEADS,
        fields.rope(theta=1e6),
        fields.HIDDEN_ACT,
        FieldGroup(("sliding_window",), fields.read_window, fields.write_window),
        Field("intermediate_size", "base_mlp_dim", written=itemgetter("base_moe_mlp_dim")),
        Field("num_local_experts", "num_experts"),
        Field("num_experts_per_tok", "num_experts_per_tok"),
    ),
    tensors=(
        *tensors.OUTER,
        *tensors.NORMS_BEFORE,
        *tensors.ATTENTION,
        TensorMap("layer.feed_forward.router", EXPERTS + "gate.weight", "E D -> D E"),
        TensorMap("layer.feed_forward.wi", EXPERTS + "experts.{E}.{A:w1,w3}.weight", "F D -> E D A F"),
        TensorMap("layer.feed_forward.wo", EXPERTS + "experts.{E}.w2.weight", "D F -> E F D"),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    keys={"norm_topk_prob": True},
    aliases={"num_experts": "num_local_experts"},
    skipped=(tensors.ROTARY_TABLES,),
)
