"""Qwen 2 and 2.5, a Llama with biases on queries, keys and values; 3, with norms of each head; 3's with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from src.hf import common_fields as fields
from src.hf import common_tensors as tensors
from src.hf.family import Family
from src.hf.fields import Field, FieldGroup, Json, Keys, Layers, count_entry, entry, require


def _check_layer_types(hf: Mapping[str, Any], keys: Keys) -> None:
    fields.read_layer_types(hf, [fields.GLOBAL] * keys["base_num_decoder_layers"], fields.GLOBAL)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS, FieldGroup(("layer_types",), _check_layer_types)),
    tensors=(*tensors.DECODER, *tensors.HEAD_NORMS, *tensors.FEED_FORWARD),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "rms_norm_eps": 1e-6},
    keys={"qk_norm": "head"},
    only={"use_sliding_window": False},
    inert=("sliding_window", "max_window_layers"),  # of windows that are not used
)
QWEN2 = replace(
    QWEN3,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(*fields.DECODER, fields.rope(), FieldGroup(("layer_types",), _check_layer_types)),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-6},
    keys={"attention_bias": True, "attention_out_bias": False},
)


def _read_layers(hf: Mapping[str, Any], keys: Keys) -> Keys:
    require(hf, head_dim=keys["head_dim"])  # transformers makes no such model for a null
    dense, step = entry(hf, "mlp_only_layers", []), count_entry(hf, "decoder_sparse_step", 1)
    layers = range(keys["base_num_decoder_layers"])
    return fields.layer_pattern([{"num_experts": 1} if i in dense or (i + 1) % step else {} for i in layers])


def _write_layers(layers: Layers) -> Json:
    dense = [i for i, layer in enumerate(layers) if layer.num_experts == 1]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *(*fields.DECODER, fields.rope(), fields.ATTENTION_BIAS),
        Field("num_experts_per_tok", "num_experts_per_tok"),
        Field("moe_intermediate_size", "base_moe_mlp_dim"),
        Field("num_experts", "num_experts"),
        Field("norm_topk_prob", "norm_topk_prob", absent=False),
        FieldGroup(("decoder_sparse_step", "mlp_only_layers"), _read_layers, _write_layers),
    ),
    tensors=(*QWEN3.tensors, *tensors.EXPERTS),
    defaults={
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 128},
    },
    keys=QWEN3.keys,
    only=QWEN3.only,
    inert=QWEN3.inert,
    aliases={"num_local_experts": "num_experts"},  # which transformers 5 writes
)
