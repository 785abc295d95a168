"""transformers' models of random small sizes, and their weights in the shapes of this project's."""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LENGTH = 12


def random_sizes(seed):
    """Sizes of a small model, hardly two of them equal, so that a transposed weight does not fit."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 4))
    return {
        "base_emb_dim": heads * int(rng.integers(5, 9)),  # transformers wants a multiple of the heads
        "base_mlp_dim": int(rng.integers(70, 120)),
        "base_num_decoder_layers": int(rng.integers(2, 4)),
        "base_num_query_heads": heads,
        "base_num_kv_heads": kv_heads,
        "head_dim": 2 * int(rng.integers(2, 8)),
        "vocab_size": int(rng.integers(20, 300)),
        "max_target_length": LENGTH,
        "normalization_layer_epsilon": float(10 ** rng.uniform(-6, -2)),
        "rope_max_timescale": int(rng.integers(100, 1_000_000)),
    }


def llama(sizes, tied):
    """The reference model of these sizes."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["base_emb_dim"],
            intermediate_size=sizes["base_mlp_dim"],
            num_hidden_layers=sizes["base_num_decoder_layers"],
            num_attention_heads=sizes["base_num_query_heads"],
            num_key_value_heads=sizes["base_num_kv_heads"],
            head_dim=sizes["head_dim"],
            rms_norm_eps=sizes["normalization_layer_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": float(sizes["rope_max_timescale"])},
            tie_word_embeddings=tied,
        )
    )
    return randomised(model)


def gpt2(sizes):
    """The reference model of these sizes."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=sizes["vocab_size"],
            n_positions=LENGTH + 3,
            bos_token_id=None,
            eos_token_id=None,
            n_embd=sizes["base_emb_dim"],
            n_inner=sizes["base_mlp_dim"],
            n_layer=sizes["base_num_decoder_layers"],
            n_head=sizes["base_num_query_heads"],
            layer_norm_epsilon=sizes["normalization_layer_epsilon"],
            activation_function="gelu_new",
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    return randomised(model)


def randomised(model):
    """The model with all its weights drawn: as initialised, norms and biases are all ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def llama_tree(get, plan):
    """The reference's parameters (or their gradients), by name, in the shapes of this project's weights."""
    spec = plan.spec
    attention = spec.layers[0].attention
    heads, kv_heads, size = attention.num_query_heads, attention.num_kv_heads, attention.head_dim

    def layers(name, shape=None):
        stacked = np.stack([get(f"model.layers.{layer}.{name}.weight").T for layer in range(len(spec.layers))])
        return stacked if shape is None else stacked.reshape(len(spec.layers), *shape)

    block = {
        "attention_norm": {"scale": layers("input_layernorm")},
        "attention": {
            "query": layers("self_attn.q_proj", (spec.emb_dim, heads, size)),
            "key": layers("self_attn.k_proj", (spec.emb_dim, kv_heads, size)),
            "value": layers("self_attn.v_proj", (spec.emb_dim, kv_heads, size)),
            "out": layers("self_attn.o_proj", (heads, size, spec.emb_dim)),
        },
        "feed_forward_norm": {"scale": layers("post_attention_layernorm")},
        "feed_forward": {
            "wi": np.stack([layers("mlp.gate_proj"), layers("mlp.up_proj")], axis=2),
            "wo": layers("mlp.down_proj"),
        },
    }
    tree = {
        "embedding": pad(get("model.embed_tokens.weight"), plan, dim=0),
        "segments": {0: {0: block}},
        "final_norm": {"scale": get("model.norm.weight")},
    }
    if not spec.tied_output:
        tree["output"] = pad(get("lm_head.weight").T, plan, dim=1)
    return tree


def gpt2_tree(get, plan):
    spec = plan.spec
    heads, size = spec.layers[0].attention.num_query_heads, spec.layers[0].attention.head_dim

    def layers(name):
        return np.stack([get(f"transformer.h.{layer}.{name}") for layer in range(len(spec.layers))])

    def norm(name):
        return {"scale": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    query, key, value = np.split(layers("attn.c_attn.weight"), 3, axis=-1)
    query_bias, key_bias, value_bias = np.split(layers("attn.c_attn.bias"), 3, axis=-1)

    def per_head(x):
        return x.reshape(*x.shape[:-1], heads, size)

    block = {
        "attention_norm": norm("ln_1"),
        "attention": {
            "query": per_head(query),
            "key": per_head(key),
            "value": per_head(value),
            "out": layers("attn.c_proj.weight").reshape(-1, heads, size, spec.emb_dim),
            "query_bias": per_head(query_bias),
            "key_bias": per_head(key_bias),
            "value_bias": per_head(value_bias),
            "out_bias": layers("attn.c_proj.bias"),
        },
        "feed_forward_norm": norm("ln_2"),
        "feed_forward": {
            "wi": layers("mlp.c_fc.weight")[:, :, None],
            "wi_bias": layers("mlp.c_fc.bias")[:, None],
            "wo": layers("mlp.c_proj.weight"),
            "wo_bias": layers("mlp.c_proj.bias"),
        },
    }
    return {
        "embedding": pad(get("transformer.wte.weight"), plan, dim=0),
        "position_embedding": get("transformer.wpe.weight"),
        "segments": {0: {0: block}},
        "final_norm": {"scale": get("transformer.ln_f.weight"), "bias": get("transformer.ln_f.bias")},
    }


def pad(table, plan, dim):
    """The table with zeros where this project pads the vocabulary."""
    width = [(0, 0), (0, 0)]
    width[dim] = (0, plan.spec.padded_vocab_size - plan.spec.vocab_size)
    return np.pad(table, width)
