"""Phi 3 and 4: a Llama whose files join queries, keys and values; Phi 4 mini rotates a part of each head."""

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family, FieldGroup
from src.hf.tensor_map import TensorMap

QKV = tensors.LAYER + "self_attn.qkv_proj.weight"
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(
        *fields.DECODER,
        fields.rope(partial=1.0, kinds=("default", "longrope")),  # to transformers, others are longrope or an error
        FieldGroup(("sliding_window",), fields.read_window, fields.write_window),
    ),
    tensors=(
        *(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.FUSED_MLP, tensors.ATTENTION[3]),
        TensorMap("layer.attention.query", QKV, "(N*|K|K H) D -> D N H"),
        TensorMap("layer.attention.key", QKV, "(N|K*|K H) D -> D K H"),
        TensorMap("layer.attention.value", QKV, "(N|K|K* H) D -> D K H"),
    ),
    defaults={"rms_norm_eps": 1e-5, fields.ORIGINAL: 4096},
    inert=("resid_pdrop", "embd_pdrop", "full_attn_mod", "interpolate_factor"),
)
