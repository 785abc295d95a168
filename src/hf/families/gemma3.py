"""Gemma 3's text models: five layers with windows to one without, each kind with its own positions, and head norms."""

from collections.abc import Mapping
from typing import Any

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.common_fields import GLOBAL, WINDOWED
from src.hf.families import gemma2
from src.hf.family import Family
from src.hf.fields import FieldGroup, Json, Keys, LayerKeys, count_entry, entry, require, require_known


def _read_layers(hf: Mapping[str, Any], keys: Keys) -> Keys:
    by_kind = entry(hf, "rope_parameters", {})
    require_known(by_kind, (WINDOWED, GLOBAL))
    windowed, everywhere = (entry(by_kind, kind, {}) for kind in (WINDOWED, GLOBAL))
    everywhere = {**everywhere, **entry(hf, "rope_scaling", {})}
    for parameters in (windowed, everywhere):
        require(parameters, truncate=True)  # transformers truncates here, whatever this says
    longest = {"max_position_embeddings": hf.get("max_position_embeddings")}
    local_theta, theta = entry(hf, "rope_local_base_freq", 1e4), entry(hf, "rope_theta", 1e6)
    local = fields.read_rope({**longest, "rope_theta": local_theta, "rope_parameters": windowed}, keys)
    return {
        **fields.read_rope({**longest, "rope_theta": theta, "rope_parameters": everywhere}, keys),
        **fields.read_windowed_layers(hf, keys, count_entry(hf, "sliding_window_pattern", 6), **local),
    }


def _write_layers(layers: LayerKeys) -> Json:
    return {
        **fields.write_rope(fields.layer_with(layers, "attention_type", "global")),
        "rope_local_base_freq": fields.windowed_layer(layers)["rope_max_timescale"],
        **fields.write_layer_types(layers),
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        *gemma2.FIELDS,
        FieldGroup(
            (
                *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
                *("layer_types", "sliding_window_pattern"),
            ),
            _read_layers,
            _write_layers,
        ),
    ),
    tensors=(*gemma2.GEMMA2.tensors, *tensors.HEAD_NORMS),
    # Multi-modal folders leave the sizes out of their text part.
    defaults={
        **gemma2.DEFAULTS,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    keys={**gemma2.KEYS, "qk_norm": "head"},
    constants={**gemma2.CONSTANTS, "attn_logit_softcapping": None},
    # transformers reads the cap of the scores and computes none.
    only={"attn_logit_softcapping": None, "use_bidirectional_attention": False, "partial_rotary_factor": 1.0},
    inert=("hidden_act", "_sliding_window_pattern"),  # transformers computes hidden_activation and the name without _
    whole_heads=True,
)
