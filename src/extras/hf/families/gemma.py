"""Gemma 1 to 3: tied output, embeddings scaled by the square root of their width, norms that store their scale minus 1.

Gemma 2 has windows in every other layer, norms before and after each attention and feed-forward, and soft caps of
attention scores and logits. Gemma 3's text models have five windowed layers per global one, each kind with its own
positions, and norms of each head.
"""

from src.extras.hf import fields, tensors
from src.extras.hf.family import UNSET, Family, Field, FieldGroup, Json, Keys, Layers, count_entry, entry

DEFAULTS = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
# The published files name the exact GELU, but Gemma was trained with the approximate one, which transformers uses for
# either name.
ACTIVATIONS = {**fields.GATED, "gelu": fields.GATED["gelu_new"]}

GEMMA = Family(
    model_type="gemma",
    fields=(
        *(*fields.SIZES, *fields.HEADS, fields.rope(), fields.ATTENTION_BIAS),
        Field("hidden_act", "mlp_activations", ACTIVATIONS["gelu"], ACTIVATIONS),
    ),
    tensors=(*tensors.DECODER, *tensors.FEED_FORWARD),
    defaults={**DEFAULTS, "num_key_value_heads": 16},
    keys={"normalization_scale_offset": 1.0, "scale_embedding": True},
    constants={"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    only={"use_bidirectional_attention": False},
    inert="hidden_activation",  # transformers uses hidden_act, ignoring this
    skipped=(tensors.ROTARY_TABLES,),
)

SCALAR = "query_pre_attn_scalar"
LATER = (  # since version 2
    *(*fields.SIZES, *fields.HEADS, fields.ATTENTION_BIAS),
    Field("final_logit_softcapping", "final_logits_soft_cap", UNSET),
    Field("hidden_activation", "mlp_activations", fields.GATED["gelu_new"], fields.GATED),
    Field("sliding_window", "sliding_window_size"),
)
# For versions 2 and 3; transformers requires that query_pre_attn_scalar is an integer.
FIELDS = (
    *LATER,
    Field(SCALAR, SCALAR, UNSET, written=lambda layer: int(layer.query_pre_attn_scalar or layer.head_dim)),
)
LATER_DEFAULTS = {**DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256}
KEYS = {**GEMMA.keys, "normalization_placement": "both"}
CONSTANTS = {"hidden_activation": "gelu_pytorch_tanh"}

GEMMA2 = Family(
    model_type="gemma2",
    fields=(
        *(*FIELDS, fields.rope(), fields.ALTERNATING_WINDOWS),
        Field("attn_logit_softcapping", "attn_logits_soft_cap", UNSET),
    ),
    tensors=(*tensors.OUTER, *tensors.NORMS_BOTH, *tensors.ATTENTION, *tensors.ATTENTION_BIASES, *tensors.FEED_FORWARD),
    defaults={**LATER_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    keys=KEYS,
    constants=CONSTANTS,
    only={"use_bidirectional_attention": False},
    inert="hidden_act",  # transformers uses hidden_activation
    whole_heads=True,
)


def _read_layers(hf: Json, keys: Keys) -> Keys:
    theta, local_theta = entry(hf, "rope_theta", 1e6), entry(hf, "rope_local_base_freq", 1e4)
    return fields.read_kinds(hf, keys, count_entry(hf, "sliding_window_pattern", 6), theta, local_theta)


def _write_layers(layers: Layers) -> Json:
    entries, local_theta = fields.write_kinds(layers)
    return {**entries, "rope_local_base_freq": local_theta}


LAYER_ENTRIES = "rope_parameters rope_scaling rope_theta rope_local_base_freq layer_types sliding_window_pattern"
GEMMA3 = Family(
    model_type="gemma3_text",
    fields=(*FIELDS, FieldGroup(LAYER_ENTRIES, _read_layers, _write_layers)),
    tensors=(*GEMMA2.tensors, *tensors.HEAD_NORMS),
    defaults={
        **LATER_DEFAULTS,
        # Multi-modal folders omit these sizes in their text part.
        **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        "num_attention_heads": 8,
    },
    keys={**KEYS, "qk_norm": "head"},
    constants={**CONSTANTS, "attn_logit_softcapping": None},
    # transformers reads the soft cap of the scores but does not apply it.
    only={"attn_logit_softcapping": None, "use_bidirectional_attention": False, "partial_rotary_factor": 1.0},
    inert="hidden_act _sliding_window_pattern",  # transformers uses hidden_activation, and the name without _
    whole_heads=True,
)
