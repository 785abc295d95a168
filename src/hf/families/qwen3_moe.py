"""Qwen 3 with experts in most layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf import rows
from src.hf.families import qwen3
from src.hf.family import Family

NAMES = {
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "base_moe_mlp_dim",
}


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    experts = "num_experts" if "num_experts" in hf else "num_local_experts"  # which transformers 5 writes
    dense, step = cj.entry(hf, "mlp_only_layers", []), cj.entry(hf, "decoder_sparse_step", 1)
    keys = {
        **qwen3.facts({"num_key_value_heads": 4, **hf}),
        **cj.read_all(hf, {**NAMES, experts: "num_experts"}),
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
        "num_experts": sparse["num_experts"],
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
)
