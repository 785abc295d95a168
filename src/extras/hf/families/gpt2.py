"""GPT-2: learned positions, LayerNorms, biases, GELU; one matrix has the weights of queries, keys and values."""

from src.extras.hf import fields
from src.extras.hf.family import Family, Field, FieldGroup
from src.extras.hf.tensors import rows

ACTIVATIONS = {name: (fields.ACTIVATIONS[name],) for name in ("gelu_new", *fields.ACTIVATIONS)}

GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    fields=(
        *fields.rows(
            """
            vocab_size
            n_embd               base_emb_dim
            n_layer              base_num_decoder_layers
            n_head               base_num_query_heads
            n_positions          trainable_position_size
            layer_norm_epsilon   normalization_layer_epsilon
            tie_word_embeddings  logits_via_embedding
            """
        ),
        Field("n_inner", "base_mlp_dim", absent=lambda keys: 4 * keys["base_emb_dim"]),
        Field("activation_function", "mlp_activations", ACTIVATIONS["gelu_new"], ACTIVATIONS),
        FieldGroup("", lambda hf, keys: {row.key: row.absent(keys) for row in fields.HEADS}),
    ),
    tensors=(
        *rows(
            """
            embedding           transformer.wte.weight   V D -> V D
            position_embedding  transformer.wpe.weight   S D -> S D
            final_norm.scale    transformer.ln_f.weight  D -> D
            final_norm.bias     transformer.ln_f.bias    D -> D
            output              lm_head.weight           V D -> D V
            """,
            file="",
            weight="",
        ),
        *rows(
            """
            attention_norm.scale     ln_1.weight          D -> D
            attention_norm.bias      ln_1.bias            D -> D
            attention.query          attn.c_attn.weight   D (N*|K|K H) -> D N H
            attention.query_bias     attn.c_attn.bias     (N*|K|K H) -> N H
            attention.key            attn.c_attn.weight   D (N|K*|K H) -> D K H
            attention.key_bias       attn.c_attn.bias     (N|K*|K H) -> K H
            attention.value          attn.c_attn.weight   D (N|K|K* H) -> D K H
            attention.value_bias     attn.c_attn.bias     (N|K|K* H) -> K H
            attention.out            attn.c_proj.weight   (N H) D -> N H D
            attention.out_bias       attn.c_proj.bias     D -> D
            feed_forward_norm.scale  ln_2.weight          D -> D
            feed_forward_norm.bias   ln_2.bias            D -> D
            feed_forward.wi          mlp.{A:c_fc}.weight  D F -> D A F
            feed_forward.wi_bias     mlp.{A:c_fc}.bias    F -> A F
            feed_forward.wo          mlp.c_proj.weight    F D -> F D
            feed_forward.wo_bias     mlp.c_proj.bias      D -> D
            """,
            file="transformer.h.{layer}.",
        ),
    ),
    defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    keys={"mlp_bias": True, "attention_bias": True, "normalization": "layer", "position_type": "learned"},
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    inert="""
        n_ctx n_special predict_special_tokens reorder_and_upcast_attn attn_pdrop embd_pdrop resid_pdrop
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    prefix="transformer.",
    skipped=(r"\.attn\.(masked_)?bias$",),
)
