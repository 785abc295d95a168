"""The config.json files of published models, as far as they describe the model, in their own names.

Of multi-modal models, the part about the text model. The names are those of configs/models.
"""


def sized(
    family, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, **entries
):
    """`family` with these sizes and further entries."""
    return {
        **family,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        **entries,
    }


LLAMA2 = {"model_type": "llama", "vocab_size": 32_000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA3 = {**LLAMA2, "vocab_size": 128_256, "rope_theta": 500_000.0}
LLAMA3_1 = {
    **LLAMA3,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LLAMA4 = {
    "model_type": "llama4_text",
    "vocab_size": 202_048,
    "head_dim": 128,
    "intermediate_size_mlp": 16_384,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "no_rope_layers": [],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
MISTRAL = {"model_type": "mistral", "vocab_size": 32_000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
GEMMA = {
    "model_type": "gemma",
    "vocab_size": 256_000,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA3 = {
    **GEMMA,
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
DEEPSEEK = {
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
DEEPSEEK2 = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
OLMO2 = {
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}

PUBLISHED = {
    "llama2-7b": sized(LLAMA2, 4096, 11_008, 32, 32, 32),
    "llama2-13b": sized(LLAMA2, 5120, 13_824, 40, 40, 40),
    "llama2-70b": sized(LLAMA2, 8192, 28_672, 80, 64, 8),
    "llama3-8b": sized(LLAMA3, 4096, 14_336, 32, 32, 8),
    "llama3-70b": sized(LLAMA3, 8192, 28_672, 80, 64, 8),
    "llama3-405b": sized(LLAMA3, 16_384, 53_248, 126, 128, 8),
    "llama3.1-8b": sized(LLAMA3_1, 4096, 14_336, 32, 32, 8),
    "llama3.1-70b": sized(LLAMA3_1, 8192, 28_672, 80, 64, 8),
    "llama3.1-405b": sized(LLAMA3_1, 16_384, 53_248, 126, 128, 8),
    "llama3.3-70b": sized(LLAMA3_1, 8192, 28_672, 80, 64, 8),
    "llama4-17b-16e": sized(
        LLAMA4,
        *(5120, 8192, 48, 40, 8),
        num_local_experts=16,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama4-17b-128e": sized(
        LLAMA4,
        *(5120, 8192, 48, 40, 8),
        num_local_experts=128,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        rope_scaling=None,
    ),
    "mistral-7b": sized(MISTRAL, 4096, 14_336, 32, 32, 8, rope_theta=10_000.0, sliding_window=4096),
    "mixtral-8x7b": sized(MIXTRAL, 4096, 14_336, 32, 32, 8),
    "mixtral-8x22b": sized(MIXTRAL, 6144, 16_384, 56, 48, 8),
    "gemma-2b": sized(GEMMA, 2048, 16_384, 18, 8, 1),
    "gemma-7b": sized(GEMMA, 3072, 24_576, 28, 16, 16),
    "gemma2-2b": sized(GEMMA2, 2304, 9216, 26, 8, 4),
    "gemma2-9b": sized(GEMMA2, 3584, 14_336, 42, 16, 8),
    "gemma2-27b": sized(GEMMA2, 4608, 36_864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma3-1b": sized(GEMMA3, 1152, 6912, 26, 4, 1, vocab_size=262_144, sliding_window=512, rope_scaling=None),
    "gemma3-4b": sized(GEMMA3, 2560, 10_240, 34, 8, 4),
    "gemma3-12b": sized(GEMMA3, 3840, 15_360, 48, 16, 8),
    "gemma3-27b": sized(GEMMA3, 5376, 21_504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "deepseek2-16b": sized(
        DEEPSEEK2,
        *(2048, 10_944, 27, 16, 16),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
    "deepseek2-236b": sized(
        DEEPSEEK2,
        *(5120, 12_288, 60, 128, 128),
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
    ),
    "deepseek3-671b": sized(
        DEEPSEEK,
        *(7168, 18_432, 61, 128, 128),
        model_type="deepseek_v3",
        vocab_size=129_280,
        q_lora_rank=1536,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        num_nextn_predict_layers=1,
    ),
    "qwen3-0.6b": sized(QWEN3, 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-1.7b": sized(QWEN3, 2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": sized(QWEN3, 2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": sized(QWEN3, 4096, 12_288, 36, 32, 8),
    "qwen3-14b": sized(QWEN3, 5120, 17_408, 40, 40, 8),
    "qwen3-32b": sized(QWEN3, 5120, 25_600, 64, 64, 8),
    "qwen3-30b-a3b": sized(QWEN3_MOE, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen3-235b-a22b": sized(QWEN3_MOE, 4096, 12_288, 94, 64, 4, moe_intermediate_size=1536),
    "olmo2-7b": sized(OLMO2, 4096, 11_008, 32, 32, 32),
    "olmo2-13b": sized(OLMO2, 5120, 13_824, 40, 40, 40),
    "olmo2-32b": sized(OLMO2, 5120, 27_648, 64, 40, 8),
    "gpt-oss-20b": sized(GPT_OSS, 2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": sized(GPT_OSS, 2880, 2880, 36, 64, 8, num_local_experts=128),
}
