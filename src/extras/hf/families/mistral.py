"""Mistral, a Llama with a sliding window in version 1, and Mixtral, with experts in every layer."""

from src.extras.hf import fields, tensors
from src.extras.hf.family import Family, FieldGroup, Json, Keys


def _read_layers(hf: Json, keys: Keys) -> Keys:
    window = fields.read_window(hf, keys)
    if "layer_types" not in hf:
        return window
    # With layer_types, transformers treats the folder as Ministral, whose layers differ.
    windowed = window.pop("attention_type", None)
    global_every = keys["base_num_decoder_layers"] + 1 if windowed else 1
    return {**window, **fields.read_windowed_layers(hf, keys, global_every)}


MISTRAL = Family(
    model_type="mistral",
    fields=(
        *fields.DECODER,
        fields.rope(),
        FieldGroup("sliding_window layer_types", _read_layers, fields.write_window),
    ),
    tensors=(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.ATTENTION, *tensors.FEED_FORWARD),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    skipped=(tensors.ROTARY_TABLES,),
)
MIXTRAL = Family(
    model_type="mixtral",
    fields=(
        *fields.DECODER,
        fields.rope(theta=1e6),
        FieldGroup("sliding_window", fields.read_window, fields.write_window),
        *fields.LOCAL_EXPERTS,
    ),
    tensors=(
        *(*tensors.OUTER, *tensors.NORMS_BEFORE, *tensors.ATTENTION),
        *tensors.rows(
            """
            feed_forward.router  block_sparse_moe.gate.weight                   E D -> D E
            feed_forward.wi      block_sparse_moe.experts.{E}.{A:w1,w3}.weight  F D -> E D A F
            feed_forward.wo      block_sparse_moe.experts.{E}.w2.weight         D F -> E F D
            """
        ),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    keys={"norm_topk_prob": True},
    aliases={"num_experts": "num_local_experts"},
    skipped=(tensors.ROTARY_TABLES,),
)
