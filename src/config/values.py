"""What each key may be by itself: choices, ranges, and the model's sizes at a scale. Types are config_yaml.py's."""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from src.config.foreign_keys import value_hint
from src.config.yaml import MAX_NAME, base, dump, too_long, unprintable

# Tables, wrapped by hand to be read.
# fmt: off
# The mesh's axes, and the word for each in the keys of its sizes: ici_WORD_parallelism and dcn_WORD_parallelism.
MESH_AXES = {
    "data": "data", "stage": "pipeline", "fsdp": "fsdp", "context": "context", "expert": "expert", "tensor": "tensor",
}
# What others call these words.
MESH_WORDS_ELSEWHERE = {
    "dp": "data", "replica": "data", "stage": "pipeline", "pp": "pipeline", "cp": "context",
    "sp": "context", "ep": "expert", "model": "tensor", "mdl": "tensor", "tp": "tensor",
}
DTYPES = ("bfloat16", "float32")
ACTIVATIONS = ("silu", "gelu", "quick_gelu", "relu", "squared_relu", "linear", "plus_one")
REMAT_ARRAYS = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi", "mlpwo")

CHOICES: dict[str, tuple[str, ...]] = {
    "hardware": ("", "cpu", "gpu", "tpu"),
    "normalization": ("rms", "layer"),
    "normalization_placement": ("before", "after", "both"),
    "attention_type": ("global", "local_sliding", "chunk", "mla"),
    "qk_norm": ("none", "head", "all_heads", "l2"),
    "position_type": ("rope", "learned", "sinusoidal", "none"),
    "rope_type": ("default", "linear", "llama3.1", "yarn"),
    "routed_score_func": ("softmax", "sigmoid"),
    "routing_group_score": ("max", "top2"),
    "dtype": DTYPES,
    "weight_dtype": DTYPES,
    "mu_dtype": ("", *DTYPES),
    "matmul_precision": ("default", "high", "highest"),
    "attention": ("autoselected", "dot_product", "flash", "cudnn_flash"),
    "remat_policy": ("none", "full", "minimal", "minimal_with_context", "save_qkv_proj", "save_out_proj",
                     "qkv_proj_offloaded", "minimal_offloaded", "custom"),
    "opt_type": ("adamw", "adafactor", "muon", "sgd"),
    "lr_schedule_type": ("cosine", "wsd"),
    "on_nonfinite": ("stop", "skip"),
    "decode_sampling_strategy": ("greedy", "weighted", "topk", "nucleus", "composite"),
    "dataset_type": ("text", "tfds", "array_record", "parquet", "tokens", "synthetic", "custom"),
    "array_record_format": ("example", "json", "text"),
    "long_documents": ("split", "truncate"),
    "eval_mode": ("reset", "rolling"),
    "tokenizer_type": ("byte", "sentencepiece", "huggingface"),
    "profiler": ("", "xplane"),
}

# What numbers may be: in words, as a test, and the keys it is for.
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("a positive number, 1e-30 or more", lambda value: value >= 1e-30,  # less is 0 in float32, or its square is
     ("per_device_batch_size", "normalization_layer_epsilon", "rope_max_timescale", "learning_rate", "adam_eps",
      "rope_low_freq_factor", "rope_high_freq_factor", "beta_fast", "beta_slow",
      "routed_scaling_factor", "lora_alpha")),
    ("more than 0, at most 1", lambda value: 0 < value <= 1, ("partial_rotary_factor",)),
    ("more than 0, at most 1, or -1", lambda value: 0 < value <= 1 or value == -1, ("decode_sampling_nucleus_p",)),
    ("1 or more", lambda value: value >= 1,
     ("attn_temperature_floor", "original_max_position_embeddings", "rope_factor", "num_experts",
      "num_experts_per_tok", "n_routing_groups", "topk_routing_group",
      "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads",
      "head_dim", "vocab_size", "max_target_length", "num_vocab_tiling", "gradient_accumulation_steps", "log_period",
      "checkpoint_period", "profiler_steps", "stack_trace_interval_seconds", "compile_topology_num_slices",
      "data_threads", "inspect_num_steps", "process_count",
      "jax_distributed_initialization_timeout", "jax_distributed_heartbeat_timeout_seconds")),
    ("1 or more, or -1", lambda value: value >= 1 or value == -1,
     ("steps", "learning_rate_schedule_steps", "trainable_position_size", "eval_interval", "eval_steps",
      "max_num_checkpoints_to_keep", "max_prefill_predict_length", "num_processes",
      "num_pipeline_microbatches", "num_pipeline_repeats",
      *(f"{kind}_{word}_parallelism" for kind in ("ici", "dcn") for word in MESH_AXES.values()))),
    ("0 or more", lambda value: value >= 0,
     ("normalization_scale_offset", "mtp_num_layers", "sliding_window_size", "chunk_attn_window_size",
      "attn_logits_soft_cap", "query_pre_attn_scalar", "attn_temperature_scale", "q_lora_rank", "kv_lora_rank",
      "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon", "mscale", "mscale_all_dim",
      "mlp_activations_limit", "base_moe_mlp_dim", "shared_experts", "lora_rank", "load_balance_loss_weight",
      "router_z_loss_weight", "routed_bias_update_rate", "mtp_loss_scaling_factor", "final_logits_soft_cap",
      "adam_weight_decay", "gradient_clipping_threshold", "z_loss_multiplier",
      "eval_per_device_batch_size", "sample_length", "decode_sampling_temperature", "decode_sampling_top_k",
      "skip_first_n_steps_for_profiler", "inspect_first_step", "process_index")),
    ("a positive number, or -1", lambda value: value > 0 or value == -1, ("capacity_factor",)),
    ("64 or more", lambda value: value >= 64, ("max_document_bytes",)),
    ("0 or more, or -1", lambda value: value >= -1,
     ("process_id",)),
    ("from 0 to 1", lambda value: 0 <= value <= 1,
     ("warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction")),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1,
     ("adam_b1", "adam_b2", "muon_beta", "dropout_rate", "eval_fraction")),
    ("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32,
     ("init_weights_seed", "data_shuffle_seed", "decode_seed")),
    ("a power of two, from 1 up", lambda value: value >= 1 and value & (value - 1) == 0,
     ("global_parameter_scale",)),
)

# The most that a number may be, which is more than any machine has room or time for: larger ones overflow where they
# are multiplied. Numbers that a range above bounds are not here.
MAX_VALUES: dict[int, tuple[str, ...]] = {
    2**4: ("mtp_num_layers",),
    2**10: ("base_num_decoder_layers", "shared_experts", "data_threads"),
    2**16: ("base_num_query_heads", "base_num_kv_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
            "v_head_dim", "lora_rank", "num_experts", "num_experts_per_tok", "n_routing_groups", "topk_routing_group",
            "capacity_factor", "compile_topology_num_slices", "num_pipeline_microbatches", "num_pipeline_repeats",
            "jax_distributed_heartbeat_timeout_seconds"),
    2**20: ("base_emb_dim", "base_mlp_dim", "base_moe_mlp_dim", "q_lora_rank", "kv_lora_rank",
            "global_parameter_scale", "per_device_batch_size", "eval_per_device_batch_size",
            "gradient_accumulation_steps", "num_processes", "process_id", "process_count", "process_index",
            *(f"{kind}_{word}_parallelism" for kind in ("ici", "dcn") for word in MESH_AXES.values())),
    2**24: ("vocab_size", "max_target_length", "num_vocab_tiling", "sliding_window_size", "chunk_attn_window_size",
            "trainable_position_size", "original_max_position_embeddings", "attn_temperature_floor",
            "max_prefill_predict_length", "sample_length", "decode_sampling_top_k", "stack_trace_interval_seconds",
            "jax_distributed_initialization_timeout"),
    2**30: ("steps", "learning_rate_schedule_steps", "log_period", "eval_interval", "eval_steps", "checkpoint_period",
            "max_num_checkpoints_to_keep", "skip_first_n_steps_for_profiler", "profiler_steps", "inspect_first_step",
            "inspect_num_steps", "max_document_bytes",
            "normalization_layer_epsilon", "latent_norm_epsilon", "adam_eps",
            "rope_low_freq_factor", "rope_high_freq_factor",
            "beta_fast", "beta_slow", "routed_scaling_factor", "lora_alpha", "rope_factor",
            "normalization_scale_offset", "attn_logits_soft_cap", "query_pre_attn_scalar", "attn_temperature_scale",
            "mscale", "mscale_all_dim", "mlp_activations_limit", "load_balance_loss_weight", "router_z_loss_weight",
            "routed_bias_update_rate", "mtp_loss_scaling_factor", "final_logits_soft_cap", "adam_weight_decay",
            "gradient_clipping_threshold", "z_loss_multiplier", "decode_sampling_temperature"),
    2**40: ("rope_max_timescale",),
    2**120: ("learning_rate",),  # absurd ones are told from their steps; this much float32 holds
}

# Keys whose texts may have any character; those of all others are names.
ANY_TEXT = ("prompt", "decode_stop")
# How keys end whose values are paths.
PATHS = ("_path", "_file", "_dir", "_directory", "_report")
# Keys whose value is a list of texts, and an example of one.
TEXTS = {
    "trainable_parameters": "[attention.*]", "lora_parameters": "[attention.query]", "decode_stop": '["Question:"]',
}
# fmt: on


def size_key(kind: str, mesh_axis: str) -> str:
    """The key of a mesh axis's size within a slice (`kind` ici) or between slices (dcn)."""
    return f"{kind}_{MESH_AXES[mesh_axis]}_parallelism"


def scaled_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The model's sizes after `global_parameter_scale`: emb_dim, (moe_)mlp_dim, num_decoder_layers, num_*_heads.

    Parameters grow with layers x emb x mlp, so each doubling of the scale doubles one of them in turn: mlp (and
    heads), then emb, then layers.
    """
    turns, rest = divmod(int(math.log2(config["global_parameter_scale"])), 3)
    width = 2 ** (turns + (rest > 0))
    return {
        "emb_dim": config["base_emb_dim"] * 2 ** (turns + (rest > 1)),
        "mlp_dim": config["base_mlp_dim"] * width,
        "moe_mlp_dim": (config["base_moe_mlp_dim"] or config["base_mlp_dim"]) * width,
        "num_decoder_layers": config["base_num_decoder_layers"] * 2**turns,
        "num_query_heads": config["base_num_query_heads"] * width,
        "num_kv_heads": config["base_num_kv_heads"] * width,
    }


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?` with the most similar of `names`, then those it is a part of; or nothing."""
    names = list(names)
    kind, _, word = name.removesuffix("_parallelism").partition("_")
    if (key := f"{kind}_{MESH_WORDS_ELSEWHERE.get(word)}_parallelism") in names:
        return f" Did you mean {key}?"
    parts_of = [other for other in names if len(name) >= 3 and name in other]
    similar = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=3), *parts_of]))[:4]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def check_value(key: str, value: Any) -> str:
    """What is wrong with `value` for `key`, itself alone; empty where nothing is."""
    if isinstance(value, str) and key not in ANY_TEXT and (problem := unprintable(value, is_name=True)):
        return f"{key}: {problem}"
    if key.endswith(PATHS) and "://" not in value and (problem := too_long(value)):
        return f"{key}={value} {problem}"
    if key in CHOICES and value not in CHOICES[key]:
        choices = ", ".join(choice or "(empty)" for choice in CHOICES[key])
        return f"{key}={value} is none of {choices}{value_hint(key, value)}"
    for words, holds, keys in RANGES:
        if key in keys and not holds(value):
            return f"{key}={dump(value)} must be {words} ({base().comment(key)})"
    for most, keys in MAX_VALUES.items():
        if key in keys and value > most:
            return f"{key}={dump(value)} is more than any machine can do: at most {most:,} ({base().comment(key)})"
    if key in TEXTS and not all(isinstance(text, str) and text for text in value):
        return f"{key}={dump(value)} must be a list of texts, such as {TEXTS[key]}"
    if key == "run_name" and value and not is_run_name(value):
        return (
            f"run_name={value!a} must be a name, or names with / between them, of printable characters and at "
            f"most {MAX_NAME} bytes each; a run writes nowhere but below base_output_directory"
        )
    if key == "base_output_directory" and not value.isprintable():
        return f"base_output_directory={value!a} must be a path of printable characters"
    if key == "mlp_activations":
        unknown = [str(name) for name in value if name not in ACTIVATIONS]
        if unknown or not value:
            named = ", ".join(unknown) or "an empty list"
            return f"mlp_activations: {named}; expected one or more of {', '.join(ACTIVATIONS)}"
    return ""


def is_run_name(name: str) -> bool:
    """Whether `name` is a folder's name, or a path down from the output folder."""
    parts = name.split("/")
    return name.isprintable() and all(
        0 < len(os.fsencode(part)) <= MAX_NAME and part not in (".", "..") for part in parts
    )
