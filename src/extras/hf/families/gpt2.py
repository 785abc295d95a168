"""GPT-2, which has the same architecture as GPT-3's dense models."""

from src.extras.hf import common_fields as fields
from src.extras.hf.family import Family, Field, FieldGroup
from src.extras.hf.tensor_map import TensorMap

ACTIVATIONS = {name: (fields.ACTIVATIONS[name],) for name in ("gelu_new", *fields.ACTIVATIONS)}


def _with_bias(ours: str, theirs: str, weight: str, bias: str) -> tuple[TensorMap, TensorMap]:
    name = "transformer.h.{layer}." + theirs
    suffixes = (".scale", ".bias") if ours.endswith("norm") else ("", "_bias")
    return (
        TensorMap(f"layer.{ours}{suffixes[0]}", f"{name}.weight", weight),
        TensorMap(f"layer.{ours}{suffixes[1]}", f"{name}.bias", bias),
    )


GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "base_emb_dim"),
        Field("n_layer", "base_num_decoder_layers"),
        Field("n_head", "base_num_query_heads"),
        Field("n_inner", "base_mlp_dim", absent=lambda keys: 4 * keys["base_emb_dim"]),
        Field("n_positions", "trainable_position_size"),
        Field("layer_norm_epsilon", "normalization_layer_epsilon"),
        Field("tie_word_embeddings", "logits_via_embedding"),
        Field("activation_function", "mlp_activations", ACTIVATIONS["gelu_new"], ACTIVATIONS),
        FieldGroup((), lambda hf, keys: {row.key: row.absent(keys) for row in fields.HEADS}),
    ),
    tensors=(
        TensorMap("embedding", "transformer.wte.weight", "V D -> V D"),
        TensorMap("position_embedding", "transformer.wpe.weight", "S D -> S D"),
        *_with_bias("attention_norm", "ln_1", "D -> D", "D -> D"),
        *_with_bias("attention.query", "attn.c_attn", "D (N*|K|K H) -> D N H", "(N*|K|K H) -> N H"),
        *_with_bias("attention.key", "attn.c_attn", "D (N|K*|K H) -> D K H", "(N|K*|K H) -> K H"),
        *_with_bias("attention.value", "attn.c_attn", "D (N|K|K* H) -> D K H", "(N|K|K* H) -> K H"),
        *_with_bias("attention.out", "attn.c_proj", "(N H) D -> N H D", "D -> D"),
        *_with_bias("feed_forward_norm", "ln_2", "D -> D", "D -> D"),
        *_with_bias("feed_forward.wi", "mlp.{A:c_fc}", "D F -> D A F", "F -> A F"),
        *_with_bias("feed_forward.wo", "mlp.c_proj", "F D -> F D", "D -> D"),
        TensorMap("final_norm.scale", "transformer.ln_f.weight", "D -> D"),
        TensorMap("final_norm.bias", "transformer.ln_f.bias", "D -> D"),
        TensorMap("output", "lm_head.weight", "V D -> D V"),
    ),
    defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    keys={"mlp_bias": True, "attention_bias": True, "normalization": "layer", "position_type": "learned"},
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    inert=(
        *("n_ctx", "reorder_and_upcast_attn", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    prefix="transformer.",
    skipped=(r"\.attn\.(masked_)?bias$",),
)
