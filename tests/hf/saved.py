"""Tiny models of each family as transformers saves them, with sizes that nothing else derives from."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file  # noqa: F401  save_file is for tests

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEAD = {"head_dim": 10}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
NO_PADDING = {"pad_token_id": None}  # a class's own id is past the tiny vocabulary
HALF_ROPE = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
LONG_ROPE = {  # of 4 pairs
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1, 2.5, 4.0, 4.5],
    "partial_rotary_factor": 0.8,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}

# Name -> transformers' class of the config, and its entries.
CONFIGS = {
    "llama": ("LlamaConfig", {**SIZES, **HEAD, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SIZES, **HEAD, "sliding_window": 5}),
    "mixtral": ("MixtralConfig", {**SIZES, **EXPERTS}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, **HEAD}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **SIZES,
            **HEAD,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**SIZES, **HEAD, "head_dim": 12, "num_hidden_layers": 4, "mlp_only_layers": [1], "rope_parameters": HALF_ROPE}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"shared_expert_intermediate_size": 24, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5}
        | {"linear_value_head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    ),
    "olmo2": ("Olmo2Config", SIZES),
    "olmo3": ("Olmo3Config", {**SIZES, "num_hidden_layers": 4, "sliding_window": 5}),
    "gemma": ("GemmaConfig", {**SIZES, **HEAD}),
    "gemma2": ("Gemma2Config", {**SIZES, **HEAD, "sliding_window": 5, "query_pre_attn_scalar": 7}),
    "gemma3": ("Gemma3TextConfig", {**SIZES, **HEAD, "num_hidden_layers": 8, "sliding_window": 5}),
    "gemma4": (
        "Gemma4TextConfig",
        {**SIZES, **HEAD, "num_hidden_layers": 8, "sliding_window": 5, "hidden_size_per_layer_input": 0}
        | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"final_logit_softcapping": 30.0},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**SIZES, **HEAD, "num_hidden_layers": 4, "intermediate_size_mlp": 28, "num_local_experts": 4}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 4},
    ),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "topk_method": "group_limited_greedy", "rope_parameters": YARN}),
    "deepseek_v2_lite": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "rope_parameters": YARN}),
    "gpt_oss": ("GptOssConfig", {**SIZES, **HEAD, **EXPERTS, "sliding_window": 5}),
    "phi3": ("Phi3Config", {**SIZES, **NO_PADDING, "sliding_window": 5}),
    "phi4_mini": (
        "Phi3Config",
        {**SIZES, **NO_PADDING, "hidden_size": 40, "original_max_position_embeddings": 8, "rope_parameters": LONG_ROPE},
    ),
    "smollm3": ("SmolLM3Config", {**SIZES, **NO_PADDING, "num_hidden_layers": 5}),
    "granite": ("GraniteConfig", {**SIZES, **MULTIPLIERS}),
    "glm": ("GlmConfig", {**SIZES, **NO_PADDING, "head_dim": 12}),
    "glm4": ("Glm4Config", {**SIZES, **NO_PADDING, "head_dim": 12}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**SIZES, "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "n_group": 2}
        | {name: LATENT[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}),
}


def save(folder, name, dtype=torch.float32, shard="50GB"):
    """Saves a model of `CONFIGS` with random weights, no scale one and no bias zero; returns the folder."""
    kind, entries = CONFIGS[name]
    return save_config(folder, getattr(transformers, kind)(**entries), dtype, shard)


def save_config(folder, config, dtype=torch.float32, shard="50GB", auto=transformers.AutoModelForCausalLM):
    """Saves a model of any config, as `save`."""
    torch.manual_seed(0)
    model = auto.from_config(config).to(dtype)
    for weight in (*model.parameters(), *model.buffers()):
        if weight.is_floating_point() and weight.ndim:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def tensors(folder):
    """Every tensor of a folder's safetensors files by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits(folder):
    """transformers' logits of some tokens, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(28).reshape(2, 14) * 13 % VOCAB).logits


def edit_config(folder, **entries):
    """Sets entries of a folder's config.json; None deletes one."""
    config = {**json.loads((folder / "config.json").read_text()), **entries}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
