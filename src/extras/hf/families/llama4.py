"""Llama 4's text models: chunked attention, but global attention without positions in every fourth layer; experts."""

from src.extras.hf import fields, tensors
from src.extras.hf.family import UNSET, Family, Field, FieldGroup, Json, Keys, Layers, count_entry, entry, layer_with

CHUNKED = "chunked_attention"
# Scaling of the queries in layers without positions.
TEMPERATURE = (
    Field("attn_scale", "attn_temperature_scale", UNSET),
    Field("floor_scale", "attn_temperature_floor", UNSET),
)
LAYER_ENTRIES = """
    interleave_moe_layer_step moe_layers no_rope_layer_interval no_rope_layers layer_types
    use_qk_norm attn_temperature_tuning attn_scale floor_scale
"""


def _read_layers(hf: Json, keys: Keys) -> Keys:
    count = keys["base_num_decoder_layers"]
    step = count_entry(hf, "interleave_moe_layer_step", 1)
    sparse = entry(hf, "moe_layers", list(range(step - 1, count, step)))
    rotated = fields.read_rotated_layers(hf, keys)
    default = [CHUNKED if rotates else fields.GLOBAL for rotates in rotated]
    kinds = fields.read_layer_types(hf, default, CHUNKED, fields.GLOBAL)
    with_positions = {"qk_norm": "l2" if entry(hf, "use_qk_norm", True) else "none"}
    without: Keys = {"position_type": "none"}
    for row in TEMPERATURE:
        without.update(row.read(hf, keys))
    tuned = hf.get("attn_temperature_tuning")
    if not (tuned if type(tuned) is int else entry(hf, "attn_temperature_tuning", True)):  # transformers 4.51 wrote 4
        without["attn_temperature_scale"] = 0.0
    layers = [
        {
            **(with_positions if rotates else without),
            **({"attention_type": "chunk"} if kind == CHUNKED else {}),
            **({} if i in sparse else {"num_experts": 1}),
        }
        for i, (rotates, kind) in enumerate(zip(rotated, kinds, strict=True))
    ]
    return fields.layer_pattern(layers)


def _write_layers(layers: Layers) -> Json:
    without_positions = next((layer for layer in layers if layer.position_type == "none"), layers[0])
    return {
        **fields.write_layer_types(layers, "chunk", CHUNKED),
        "use_qk_norm": layer_with(layers, "chunk_attn_window_size").qk_norm == "l2",
        "no_rope_layers": [int(layer.position_type == "rope") for layer in layers],
        "moe_layers": [i for i, layer in enumerate(layers) if layer.num_experts > 1],
        "attn_temperature_tuning": without_positions.attn_temperature_scale > 0,
        "attn_scale": without_positions.attn_temperature_scale or 0.1,
        "floor_scale": without_positions.attn_temperature_floor,
    }


LLAMA4 = Family(
    model_type="llama4_text",
    fields=(
        *(*fields.DECODER, fields.rope(theta=500_000.0), fields.ATTENTION_BIAS),
        *fields.rows(
            """
            intermediate_size      base_moe_mlp_dim
            intermediate_size_mlp  base_mlp_dim
            """
        ),
        *fields.LOCAL_EXPERTS[1:],
        Field(
            "attention_chunk_size", "chunk_attn_window_size", written=lambda layer: layer.chunk_attn_window_size or 8192
        ),
        FieldGroup(LAYER_ENTRIES, _read_layers, _write_layers),
    ),
    tensors=(
        *tensors.DECODER,
        *tensors.rows(
            """
            feed_forward.wi         feed_forward.{A:gate_proj,up_proj}.weight                F D -> D A F
            feed_forward.wo         feed_forward.down_proj.weight                            D F -> F D
            feed_forward.router     feed_forward.router.weight                               E D -> D E
            feed_forward.wi         feed_forward.experts.gate_up_proj                        E D (A F) -> E D A F
            feed_forward.wo         feed_forward.experts.down_proj                           E F D -> E F D
            feed_forward.shared.wi  feed_forward.shared_expert.{A:gate_proj,up_proj}.weight  F D -> D A F
            feed_forward.shared.wo  feed_forward.shared_expert.down_proj.weight              D F -> F D
            """
        ),
    ),
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1},
        **{"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192},
    },
    keys={"rope_interleave": True, "shared_experts": 1, "routed_score_func": "sigmoid", "scale_expert_inputs": True},
)
