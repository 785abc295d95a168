"""GPT-2, whose shape GPT-3's dense models have too."""

from collections.abc import Mapping, Sequence
from typing import Any

from src.hf import config_json as cj
from src.hf.family import Family
from src.hf.table import Row

NAMES = {
    "vocab_size": "vocab_size",
    "n_embd": "base_emb_dim",
    "n_layer": "base_num_decoder_layers",
    "n_head": "base_num_query_heads",
    "n_inner": "base_mlp_dim",
    "n_positions": "trainable_position_size",
    "layer_norm_epsilon": "normalization_layer_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
}


def facts(hf: Mapping[str, Any]) -> cj.Keys:
    """config.json to keys."""
    hf = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, **hf}
    if hf.get("n_inner") is None:
        hf["n_inner"] = 4 * cj.size(hf, "n_embd", 0)
    keys = cj.read_all(hf, NAMES)
    return {
        **keys,
        "base_num_kv_heads": keys["base_num_query_heads"],
        "head_dim": keys["base_emb_dim"] // keys["base_num_query_heads"],
        "mlp_activations": [cj.activation(hf, "activation_function", "gelu_new")],
        "mlp_bias": True,
        "attention_bias": True,
        "normalization": "layer",
        "position_type": "learned",
    }


def hf_config(layers: Sequence[Mapping[str, Any]]) -> cj.Json:
    """Keys to config.json."""
    return {**cj.write(layers[0], NAMES), "activation_function": cj.activation_name(layers[0], "gelu_new")}


def _rows(ours: str, theirs: str, weight: str, bias: str) -> tuple[Row, Row]:
    name = "transformer.h.{layer}." + theirs
    suffixes = (".scale", ".bias") if ours.endswith("norm") else ("", "_bias")
    return (
        Row(f"layer.{ours}{suffixes[0]}", f"{name}.weight", weight),
        Row(f"layer.{ours}{suffixes[1]}", f"{name}.bias", bias),
    )


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    facts=facts,
    hf_config=hf_config,
    rows=(
        Row("embedding", "transformer.wte.weight", "V D -> V D"),
        Row("position_embedding", "transformer.wpe.weight", "S D -> S D"),
        *_rows("attention_norm", "ln_1", "D -> D", "D -> D"),
        *_rows("attention.query", "attn.c_attn", "D (0/3 N H) -> D N H", "(0/3 N H) -> N H"),
        *_rows("attention.key", "attn.c_attn", "D (1/3 K H) -> D K H", "(1/3 K H) -> K H"),
        *_rows("attention.value", "attn.c_attn", "D (2/3 K H) -> D K H", "(2/3 K H) -> K H"),
        *_rows("attention.out", "attn.c_proj", "(N H) D -> N H D", "D -> D"),
        *_rows("feed_forward_norm", "ln_2", "D -> D", "D -> D"),
        *_rows("feed_forward.wi", "mlp.{A:c_fc}", "D F -> D A F", "F -> A F"),
        *_rows("feed_forward.wo", "mlp.c_proj", "F D -> F D", "D -> D"),
        Row("final_norm.scale", "transformer.ln_f.weight", "D -> D"),
        Row("final_norm.bias", "transformer.ln_f.bias", "D -> D"),
        Row("output", "lm_head.weight", "V D -> D V"),
    ),
    prefix="transformer.",
    skipped=(r"\.attn\.(masked_)?bias$",),
    mapped=(*NAMES, "activation_function"),
    inert=(
        *("n_ctx", "reorder_and_upcast_attn", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
