"""Llama 1 to 3, whose names most families reuse, and Granite, SmolLM3 and Phi 3, which differ slightly."""

from dataclasses import replace

from src.extras.hf import fields, tensors
from src.extras.hf.family import Family, Field, FieldGroup, Json, Keys, Layers, entry
from src.system.errors import UserError

LLAMA = Family(
    model_type="llama",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS, fields.MLP_BIAS),
    tensors=(*tensors.DECODER, *tensors.FEED_FORWARD, *tensors.FEED_FORWARD_BIASES),
    defaults={"rms_norm_eps": 1e-6},
    only={"activation": "swiglu"},  # an entry of Falcon 3, beside hidden_act
    skipped=(tensors.ROTARY_TABLES,),
    whole_heads=True,
)


def _read_multiplier(hf: Json, keys: Keys) -> Keys:
    if (multiplier := entry(hf, "attention_multiplier", 1.0)) <= 0:
        raise UserError(f"config.json has attention_multiplier {multiplier}: expected a positive number")
    # Rounded so that 0.1 becomes 100 and converts back to 0.1.
    return {"query_pre_attn_scalar": float(f"{multiplier**-2:.12g}")}


GRANITE = replace(  # Granite 3's dense models
    LLAMA,
    model_type="granite",
    fields=(
        *LLAMA.fields,
        *(Field(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
        FieldGroup(
            "attention_multiplier",
            _read_multiplier,
            lambda layers: {"attention_multiplier": (layers[0].query_pre_attn_scalar or layers[0].head_dim) ** -0.5},
        ),
    ),
    whole_heads=False,
)


def _read_layers(hf: Json, keys: Keys) -> Keys:
    rotated = fields.read_rotated_layers(hf, keys)
    fields.check_no_windows(hf, [not rotates for rotates in rotated])
    return fields.layer_pattern([{} if rotates else {"position_type": "none"} for rotates in rotated])


def _write_layers(layers: Layers) -> Json:
    return {"no_rope_layers": [int(layer.position_type == "rope") for layer in layers]}


LAYER_ENTRIES = "no_rope_layers no_rope_layer_interval layer_types use_sliding_window sliding_window"
SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    fields=(
        *(*fields.DECODER, fields.rope(theta=2e6), fields.ATTENTION_BIAS, fields.MLP_BIAS),
        FieldGroup(LAYER_ENTRIES, _read_layers, _write_layers),
    ),
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    inert="max_window_layers",
    whole_heads=False,
)

PHI3 = Family(  # Phi 3 and 4, whose files fuse queries, keys and values; Phi 4 mini rotates only part of each head
    model_type="phi3",
    fields=(
        *fields.DECODER,
        # transformers treats other types as longrope, or fails.
        fields.rope(partial=1.0, kinds=("default", "longrope")),
        FieldGroup("sliding_window", fields.read_window, fields.write_window),
    ),
    tensors=(
        *(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.FUSED_MLP, tensors.ATTENTION[3]),
        *tensors.rows(
            """
            attention.query  self_attn.qkv_proj.weight  (N*|K|K H) D -> D N H
            attention.key    self_attn.qkv_proj.weight  (N|K*|K H) D -> D K H
            attention.value  self_attn.qkv_proj.weight  (N|K|K* H) D -> D K H
            """
        ),
    ),
    defaults={"rms_norm_eps": 1e-5, fields.ORIGINAL: 4096},
    inert="resid_pdrop embd_pdrop full_attn_mod interpolate_factor",
)
