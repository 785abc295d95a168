"""Gemma: tied output, embeddings scaled by the root of their width, norms whose stored scale is the excess over one."""

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.fields import Field

KEYS = {"normalization_scale_offset": 1.0, "scale_embedding": True}
DEFAULTS = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
# The published files name the exact GELU; Gemma was trained with the approximate one, which is what transformers
# computes for either name.
ACTIVATIONS = {**fields.GATED, "gelu": fields.GATED["gelu_new"]}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=(
        *fields.SIZES,
        *fields.HEADS,
        fields.rope(),
        Field("hidden_act", "mlp_activations", ACTIVATIONS["gelu"], ACTIVATIONS),
        fields.ATTENTION_BIAS,
    ),
    tensors=(
        *tensors.OUTER,
        *tensors.NORMS_BEFORE,
        *tensors.ATTENTION,
        *tensors.ATTENTION_BIASES,
        *tensors.FEED_FORWARD,
    ),
    defaults={**DEFAULTS, "num_key_value_heads": 16},
    keys=KEYS,
    constants={"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    only={"use_bidirectional_attention": False},
    inert=("hidden_activation",),  # transformers computes hidden_act, whatever this says
    skipped=(tensors.ROTARY_TABLES,),
)
