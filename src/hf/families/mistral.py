"""Mistral: Llama with a sliding window in the first version's layers."""

from collections.abc import Mapping
from typing import Any

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.fields import FieldGroup, Keys


def _read_layers(hf: Mapping[str, Any], keys: Keys) -> Keys:
    window = fields.read_window(hf, keys)
    if "layer_types" not in hf:
        return window
    # With them transformers takes the folder for one of Ministral, whose layers differ.
    windowed = window.pop("attention_type", None)
    global_every = keys["base_num_decoder_layers"] + 1 if windowed else 1
    return {**window, **fields.read_windowed_layers(hf, keys, global_every)}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *fields.SIZES,
        *fields.HEADS,
        fields.rope(),
        fields.HIDDEN_ACT,
        FieldGroup(("sliding_window", "layer_types"), _read_layers, fields.write_window),
    ),
    tensors=(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.ATTENTION, *tensors.FEED_FORWARD),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    skipped=(tensors.ROTARY_TABLES,),
)
