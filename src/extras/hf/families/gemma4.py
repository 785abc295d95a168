"""Gemma 4's dense text models: full-attention layers have another head size, and use the key projection for values.

In a multi-modal folder, only the text model is read; attention between text tokens is causal there too.
"""

from collections.abc import Sequence

from src.extras.hf import fields, tensors
from src.extras.hf.families.gemma import CONSTANTS, GEMMA3, LATER
from src.extras.hf.family import (
    Family,
    FieldGroup,
    Json,
    Keys,
    Layers,
    count_entry,
    entry,
    layer_with,
    require,
    require_known,
)
from src.system.errors import UserError

SIZES = {"head_dim": "head_dim", "num_key_value_heads": "base_num_kv_heads"}  # entries that may differ by layer
ROPE = {
    fields.WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    fields.GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
LAYER_ENTRIES = """
    layer_types rope_parameters attention_k_eq_v global_head_dim num_global_key_value_heads
    per_layer_config hidden_size_per_layer_input use_bidirectional_attention
"""


def _read_layers(hf: Json, keys: Keys) -> Keys:
    require(hf, hidden_size_per_layer_input=0)  # transformers defaults to another value
    if hf.get("use_bidirectional_attention") != "vision":
        require(hf, use_bidirectional_attention=None)
    default = [fields.GLOBAL if i % 6 == 5 else fields.WINDOWED for i in range(keys["base_num_decoder_layers"])]
    # transformers forces full attention in the last layer.
    kinds = [*entry(hf, "layer_types", default)[:-1], fields.GLOBAL]
    fields.read_layer_types({"layer_types": kinds}, default, *ROPE)
    # In transformers, rope_scaling replaces rope_parameters, even if it is empty.
    by_kind = entry(hf, "rope_parameters", ROPE) if hf.get("rope_scaling") is None else {}
    require_known(by_kind, ROPE)
    if missing := sorted(ROPE.keys() - by_kind.keys()):
        raise UserError(f"config.json has no rope_parameters of {', '.join(missing)}")
    of_kind = {kind: {"rope_parameters": entry(by_kind, kind, {})} for kind in ROPE}
    kind_keys = {kind: fields.read_rope(of_kind[kind], keys, kinds=("default", "proportional")) for kind in ROPE}
    kind_keys[fields.WINDOWED]["attention_type"] = "local_sliding"
    kind_keys[fields.GLOBAL]["share_kv_projections"] = entry(hf, "attention_k_eq_v", False)
    sizes = _sizes(hf, kinds)
    return fields.layer_pattern([{**kind_keys[kind], **each} for kind, each in zip(kinds, sizes, strict=True)])


def _sizes(hf: Json, kinds: Sequence[str]) -> list[Keys]:
    full = {"head_dim": count_entry(hf, "global_head_dim", 512)}
    if entry(hf, "attention_k_eq_v", False) and hf.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = count_entry(hf, "num_global_key_value_heads", 1)
    layers = {str(i): full if kind == fields.GLOBAL else {} for i, kind in enumerate(kinds)}
    if "per_layer_config" in hf:  # transformers writes it instead of the two above, and then ignores them
        by_layer = {number.lstrip("0") or "0": sizes for number, sizes in entry(hf, "per_layer_config", {}).items()}
        require_known(by_layer, layers)
        layers = {number: entry(by_layer, number, {}) for number in layers}
    for sizes in layers.values():
        require_known(sizes, SIZES)
    return [{SIZES[name]: count_entry(sizes, name, 1) for name in sizes if name in SIZES} for sizes in layers.values()]


def _write_layers(layers: Layers) -> Json:
    windowed, full = layer_with(layers, "sliding_window_size"), layers[-1]
    rope = {fields.WINDOWED: fields.write_rope([windowed]), fields.GLOBAL: fields.write_rope([full])}
    return {
        **fields.write_layer_types(layers),
        "rope_parameters": {
            kind: {"rope_type": "default", **(entries["rope_scaling"] or {}), "rope_theta": entries["rope_theta"]}
            for kind, entries in rope.items()
        },
        "attention_k_eq_v": full.share_kv_projections,
        **{"head_dim": windowed.head_dim, "num_key_value_heads": windowed.base_num_kv_heads},
        **{"global_head_dim": full.head_dim, "num_global_key_value_heads": full.base_num_kv_heads},
        "hidden_size_per_layer_input": 0,
    }


GEMMA4 = Family(
    model_type="gemma4_text",
    fields=(*LATER, FieldGroup(LAYER_ENTRIES, _read_layers, _write_layers)),
    tensors=(*GEMMA3.tensors, *tensors.rows("layer_scalar  layer_scalar  X -> X")),
    defaults={
        **{**GEMMA3.defaults, "vocab_size": 262_144, "num_hidden_layers": 30, "sliding_window": 512},
        "hidden_size_per_layer_input": 256,
    },
    keys={
        **{"scale_embedding": True, "normalization_placement": "both", "qk_norm": "head", "value_norm": True},
        **{"query_pre_attn_scalar": 1.0, "layer_scalar": True},
    },
    constants=CONSTANTS,
    only={"num_kv_shared_layers": 0, "enable_moe_block": False},
    # Entries of features that `only` or `_read_layers` refuses.
    inert="use_double_wide_mlp num_experts top_k_experts moe_intermediate_size vocab_size_per_layer_input",
)
