"""OLMo 2: norms after attention and feed-forward, QK norm over all heads together; OLMo 3: windows in 3 of 4 layers."""

from dataclasses import replace

from src.extras.hf import fields, tensors
from src.extras.hf.family import Family, Field, FieldGroup, Json, Layers, entry

OLMO2 = Family(
    model_type="olmo2",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS),
    tensors=(
        *(*tensors.OUTER, *tensors.ATTENTION, *tensors.ATTENTION_BIASES, *tensors.FEED_FORWARD),
        *tensors.rows(
            """
            attention.query_norm.scale   self_attn.q_norm.weight            (N H) -> N H
            attention.key_norm.scale     self_attn.k_norm.weight            (K H) -> K H
            attention_out_norm.scale     post_attention_layernorm.weight    D -> D
            feed_forward_out_norm.scale  post_feedforward_layernorm.weight  D -> D
            """
        ),
    ),
    defaults={"rms_norm_eps": 1e-5},
    keys={"qk_norm": "all_heads", "normalization_placement": "after"},
)


def _write_layers(layers: Layers) -> Json:
    entries, local_theta = fields.write_kinds(layers)
    thetas = {fields.WINDOWED: local_theta, fields.GLOBAL: entries["rope_theta"]}
    by_kind = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return {**entries, "rope_parameters": by_kind}


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    fields=(
        *(*fields.DECODER, fields.ATTENTION_BIAS, Field("sliding_window", "sliding_window_size")),
        FieldGroup(
            "rope_parameters rope_scaling rope_theta layer_types",
            # rope_theta applies to full attention.
            lambda hf, keys: fields.read_kinds(hf, keys, 4, entry(hf, "rope_theta", 5e5), 5e5),
            _write_layers,
        ),
    ),
    defaults={**OLMO2.defaults, "sliding_window": 4096},
)
