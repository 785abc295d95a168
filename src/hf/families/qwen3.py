"""Qwen 3: Llama with a norm on the queries and keys of each head."""

from collections.abc import Mapping
from typing import Any

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.fields import FieldGroup, Keys


def _check_layer_types(hf: Mapping[str, Any], keys: Keys) -> Keys:
    fields.read_layer_types(hf, [fields.GLOBAL] * keys["base_num_decoder_layers"], fields.GLOBAL)
    return {}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *fields.SIZES,
        *fields.HEADS,
        fields.rope(),
        fields.HIDDEN_ACT,
        fields.ATTENTION_BIAS,
        FieldGroup(("layer_types",), _check_layer_types),
    ),
    tensors=(
        *tensors.OUTER,
        *tensors.NORMS_BEFORE,
        *tensors.ATTENTION,
        *tensors.ATTENTION_BIASES,
        *tensors.HEAD_NORMS,
        *tensors.FEED_FORWARD,
    ),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
    keys={"qk_norm": "head"},
    only={"use_sliding_window": False},
    inert=("sliding_window", "max_window_layers"),  # of windows that are not used
)
