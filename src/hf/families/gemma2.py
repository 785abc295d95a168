"""Gemma 2: windows in every other layer, norms before and after, both soft caps."""

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.families import gemma
from src.hf.family import Family
from src.hf.fields import UNSET, Field

# This version's and the next one's.
FIELDS = (
    *fields.SIZES,
    *fields.HEADS,
    # transformers asks for a whole number.
    Field(
        "query_pre_attn_scalar",
        "query_pre_attn_scalar",
        UNSET,
        written=lambda keys: int(keys["query_pre_attn_scalar"] or keys["head_dim"]),
    ),
    Field("final_logit_softcapping", "final_logits_soft_cap", UNSET),
    Field("hidden_activation", "mlp_activations", fields.GATED["gelu_new"], fields.GATED),
    fields.ATTENTION_BIAS,
    Field("sliding_window", "sliding_window_size", layer=fields.windowed_layer),
)
DEFAULTS = {**gemma.DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256}
KEYS = {**gemma.KEYS, "normalization_placement": "both"}
CONSTANTS = {"hidden_activation": "gelu_pytorch_tanh"}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        *FIELDS,
        Field("attn_logit_softcapping", "attn_logits_soft_cap", UNSET),
        fields.rope(),
        fields.ALTERNATING_WINDOWS,
    ),
    tensors=(
        *tensors.OUTER,
        *tensors.NORMS_BOTH,
        *tensors.ATTENTION,
        *tensors.ATTENTION_BIASES,
        *tensors.FEED_FORWARD,
    ),
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    keys=KEYS,
    constants=CONSTANTS,
    only={"use_bidirectional_attention": False},
    inert=("hidden_act",),  # transformers computes hidden_activation
    whole_heads=True,
)
