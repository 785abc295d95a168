"""Qwen 3 with experts in most layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.errors import UserError
from src.hf import config_json as cj
from src.hf import rows
from src.hf.families import qwen3
from src.hf.family import Family

NAMES = {
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "num_experts": "num_experts",
}


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    if hf.get("head_dim", 0) is None:
        raise UserError("config.json: head_dim is null, with which transformers makes no such model: give its size")
    dense, step = cj.entry(hf, "mlp_only_layers", []), cj.size(hf, "decoder_sparse_step", 1)
    keys = {
        **qwen3.facts({"num_key_value_heads": 4, "head_dim": None, **hf}),
        **cj.read_all({"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_experts": 128, **hf}, NAMES),
        "norm_topk_prob": cj.entry(hf, "norm_topk_prob", False),
    }
    layers = range(keys["base_num_decoder_layers"])
    return {**keys, **cj.pattern([{"num_experts": 1} if i in dense or (i + 1) % step else {} for i in layers])}


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    dense, sparse = cj.dense_and_sparse(layers)
    return {
        **qwen3.hf_config(layers),
        **cj.write(sparse, NAMES),
        "intermediate_size": dense["base_mlp_dim"],
        "norm_topk_prob": sparse["norm_topk_prob"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(layers) if layer["num_experts"] == 1],
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    facts=facts,
    hf_config=hf_config,
    rows=(*qwen3.QWEN3.rows, *rows.EXPERTS),
    mapped=(
        *cj.SHARED,
        *cj.ROPE_ENTRIES,
        *NAMES,
        *("hidden_act", "attention_bias", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    ),
    inert=qwen3.QWEN3.inert,
    only=qwen3.QWEN3.only,
    aliases={"num_local_experts": "num_experts"},  # which transformers 5 writes
)
