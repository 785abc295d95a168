"""What values a configuration may have: choices, ranges, and what keys demand of each other.

Types are config_yaml.py's business; what depends on the devices or the data is checked where those are known.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from src.config_yaml import Plain, base, convert, dump
from src.foreign_keys import value_hint

MESH_AXES = ("data", "fsdp", "tensor")

# Tables, wrapped by hand to be read.
# fmt: off
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
    "opt_type": ("adamw", "sgd"),
    "lr_schedule_type": ("cosine", "wsd"),
    "on_nonfinite": ("stop", "skip"),
    "decode_sampling_strategy": ("greedy", "weighted", "topk", "nucleus", "composite"),
    "dataset_type": ("text", "synthetic"),
    "tokenizer_type": ("byte", "sentencepiece", "huggingface"),
    "profiler": ("", "xplane"),
}

# What numbers may be: in words, as a test, and the keys it is for.
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("a positive number", lambda value: value > 0,
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
      "checkpoint_period", "profiler_steps", "stack_trace_interval_seconds")),
    ("1 or more, or -1", lambda value: value >= 1 or value == -1,
     ("steps", "learning_rate_schedule_steps", "trainable_position_size", "eval_interval", "eval_steps",
      "max_num_checkpoints_to_keep", "max_prefill_predict_length", "num_processes",
      "ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism",
      "dcn_data_parallelism", "dcn_fsdp_parallelism", "dcn_tensor_parallelism")),
    ("0 or more", lambda value: value >= 0,
     ("normalization_scale_offset", "mtp_num_layers", "sliding_window_size", "chunk_attn_window_size",
      "attn_logits_soft_cap", "query_pre_attn_scalar", "attn_temperature_scale", "q_lora_rank", "kv_lora_rank",
      "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mscale", "mscale_all_dim", "mlp_activations_limit",
      "base_moe_mlp_dim", "shared_experts", "lora_rank", "load_balance_loss_weight", "routed_bias_update_rate",
      "mtp_loss_scaling_factor", "final_logits_soft_cap", "adam_weight_decay",
      "gradient_clipping_threshold", "z_loss_multiplier",
      "eval_per_device_batch_size", "sample_length", "decode_sampling_temperature", "decode_sampling_top_k",
      "skip_first_n_steps_for_profiler")),
    ("64 or more", lambda value: value >= 64, ("max_document_bytes",)),
    ("0 or more, or -1", lambda value: value >= -1,
     ("process_id",)),
    ("from 0 to 1", lambda value: 0 <= value <= 1,
     ("warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction")),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1,
     ("adam_b1", "adam_b2", "dropout_rate", "eval_fraction")),
    ("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32,
     ("init_weights_seed", "data_shuffle_seed", "decode_seed")),
    ("a power of two, from 1 up", lambda value: value >= 1 and value & (value - 1) == 0,
     ("global_parameter_scale",)),
)

# Keys whose value is a list of texts, and an example of one.
TEXTS = {
    "trainable_parameters": "[attention.*]", "lora_parameters": "[attention.query]", "decode_stop": '["Question:"]',
}

# Facts that a pattern of decoder_segments may give a layer of its own.
ATTENTION_FACTS = (
    "attention_type", "sliding_window_size", "chunk_attn_window_size", "attention_bias", "attention_sink",
    "attn_logits_soft_cap", "query_pre_attn_scalar", "qk_norm", "attn_temperature_scale", "attn_temperature_floor",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)
ROPE_FACTS = (
    "position_type", "rope_max_timescale", "rope_interleave", "partial_rotary_factor", "rope_type", "rope_factor",
    "original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor", "beta_fast", "beta_slow",
    "rope_truncate", "mscale", "mscale_all_dim",
)
EXPERT_FACTS = (
    "num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "shared_experts", "routed_score_func", "router_bias",
    "routed_bias", "n_routing_groups", "topk_routing_group", "routing_group_score", "norm_topk_prob",
    "routed_scaling_factor", "scale_expert_inputs",
)
LAYER_FACTS = (
    "normalization", "normalization_layer_epsilon", "normalization_scale_offset", "normalization_placement",
    "dropout_rate", "base_num_query_heads", "base_num_kv_heads", "head_dim", *ATTENTION_FACTS, *ROPE_FACTS,
    "base_mlp_dim", "mlp_activations", "mlp_activations_limit", "mlp_bias", *EXPERT_FACTS,
)
# fmt: on


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
    parts_of = [other for other in names if len(name) >= 3 and name in other]
    similar = list(dict.fromkeys([*difflib.get_close_matches(name, names, n=3), *parts_of]))[:4]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def check_value(key: str, value: Any) -> str:
    """What is wrong with `value` for `key`, itself alone; empty where nothing is."""
    if key in CHOICES and value not in CHOICES[key]:
        choices = ", ".join(choice or "(empty)" for choice in CHOICES[key])
        return f"{key}={value} is none of {choices}{value_hint(key, value)}"
    for words, holds, keys in RANGES:
        if key in keys and not holds(value):
            comment = base().comment(key)
            return f"{key}={dump(value)} must be {words}" + (f" ({comment})" if comment else "")
    if key in TEXTS and not all(isinstance(text, str) and text for text in value):
        return f"{key}={dump(value)} must be a list of texts, such as {TEXTS[key]}"
    if key == "mlp_activations":
        unknown = [str(name) for name in value if name not in ACTIVATIONS]
        if unknown or not value:
            named = ", ".join(unknown) or "an empty list"
            return f"mlp_activations: {named}; expected one or more of {', '.join(ACTIVATIONS)}"
    return ""


def check_config(config: Mapping[str, Any], failed: set[str]) -> list[str]:
    """What is wrong with the whole: each problem a sentence that names the keys to change.

    Args:
        config: every key of base.yml, of its right type.
        failed: keys that were already reported; what depends on one of them is not judged.
    """
    problems = []
    for key, value in config.items():
        if key not in failed and (problem := check_value(key, value)):
            problems.append(problem)
            failed = failed | {key}
    for keys, check in RELATIONS:
        if not failed.intersection(keys):
            problems.extend(check(config))
    return problems


def _layer(facts: Mapping[str, Any]) -> list[str]:
    """What the facts of one layer demand of each other."""
    return [*_heads(facts), *_attention(facts), *_rope(facts), *_experts(facts)]


def _heads(facts: Mapping[str, Any]) -> list[str]:
    query_heads, kv_heads = facts["base_num_query_heads"], facts["base_num_kv_heads"]
    if query_heads % kv_heads and facts["attention_type"] != "mla":
        return [f"base_num_query_heads={query_heads} is not a multiple of base_num_kv_heads={kv_heads}"]
    return []


def _rope(facts: Mapping[str, Any]) -> list[str]:
    problems = []
    name = "qk_rope_head_dim" if facts["attention_type"] == "mla" else "head_dim"
    rotated = int(facts[name] * facts["partial_rotary_factor"])
    if facts["position_type"] == "rope" and rotated % 2:
        part = "" if facts["partial_rotary_factor"] == 1 else f" times partial_rotary_factor, {rotated},"
        problems.append(f"position_type=rope rotates pairs: {name}={facts[name]}{part} must be even")
    low, high = facts["rope_low_freq_factor"], facts["rope_high_freq_factor"]
    if high < low and facts["rope_type"] == "llama3.1":
        problems.append(f"rope_high_freq_factor={high} must be at least rope_low_freq_factor={low}")
    return problems


def _attention(facts: Mapping[str, Any]) -> list[str]:
    kind = facts["attention_type"]
    needed = {
        "local_sliding": ("sliding_window_size",),
        "chunk": ("chunk_attn_window_size",),
        "mla": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    }
    problems = [f"attention_type={kind} needs {key}" for key in needed.get(kind, ()) if not facts[key]]
    if kind == "mla":
        problems.extend(
            f"attention_type=mla has no {key}={dump(facts[key])} (set {key}={dump(base().defaults[key])})"
            for key in ("attention_bias", "attention_sink", "attn_logits_soft_cap", "qk_norm", "attn_temperature_scale")
            if facts[key] != base().defaults[key]
        )
    return problems


def _experts(facts: Mapping[str, Any]) -> list[str]:
    experts, chosen = facts["num_experts"], facts["num_experts_per_tok"]
    groups, chosen_groups = facts["n_routing_groups"], facts["topk_routing_group"]
    if experts == 1:
        return []
    if experts % groups or chosen_groups > groups:
        return [
            f"num_experts={experts} must be a multiple of n_routing_groups={groups}, of which "
            f"topk_routing_group={chosen_groups} are chosen"
        ]
    if chosen > chosen_groups * (experts // groups):
        return [f"num_experts_per_tok={chosen} is more than the {chosen_groups * (experts // groups)} to choose from"]
    if facts["routing_group_score"] == "top2" and groups > 1 and experts // groups < 2:
        return [f"routing_group_score=top2 needs two experts a group: num_experts={experts}, n_routing_groups={groups}"]
    return []


def _positions(config: Mapping[str, Any]) -> list[str]:
    size, length = config["trainable_position_size"], config["max_target_length"]
    if size != -1 and config["position_type"] != "learned":
        return [f"trainable_position_size={size} needs position_type=learned (or set it to -1)"]
    if size != -1 and size < length:
        return [f"trainable_position_size={size} is shorter than max_target_length={length}: rows would have none"]
    if config["position_type"] == "sinusoidal" and config["base_emb_dim"] % 2:
        return ["position_type=sinusoidal needs an even base_emb_dim"]
    return []


def _segments(config: Mapping[str, Any]) -> list[str]:
    problems = []
    segments = config["decoder_segments"]
    if not segments:
        return []
    layers = scaled_sizes(config)["num_decoder_layers"]
    fixed = sum(entry["repeats"] * len(entry["pattern"]) for entry in segments if entry["repeats"] != -1)
    open_ended = [entry for entry in segments if entry["repeats"] == -1]
    rest = layers - fixed
    if len(open_ended) > 1:
        problems.append("decoder_segments: only one segment may have repeats: -1, which takes the rest of the layers")
    elif open_ended and (rest <= 0 or rest % len(open_ended[0]["pattern"])):
        problems.append(
            f"decoder_segments: {rest} of {layers} layers are left for the segment with repeats: -1, whose pattern has "
            f"{len(open_ended[0]['pattern'])}; change repeats or base_num_decoder_layers"
        )
    elif not open_ended and rest:
        problems.append(
            f"decoder_segments describe {fixed} layers, the model has {layers}; "
            "change repeats (-1: the rest) or base_num_decoder_layers"
        )
    for number, entry in enumerate(segments, start=1):
        for facts in entry["pattern"]:
            found = _layer({**config, **facts})
            problems.extend(f"decoder_segments, segment {number}: {problem}" for problem in found)
    return problems


def read_segments(value: Any) -> list[Mapping[str, Any]]:
    """decoder_segments as `parse` gives them, with every entry's three keys and every fact of its key's type.

    Returns:
        The segments, immutable mappings: a frozen config can hold no dict within a list.

    Raises:
        ValueError: everything that is wrong with them.
    """
    if not isinstance(value, list):
        return convert(value, [])
    segments, problems = [], []
    for number, entry in enumerate(value, start=1):
        try:
            segments.append(_read_segment(entry))
        except ValueError as error:
            problems.append(f"segment {number}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return segments


def _read_segment(entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or set(entry) - {"repeats", "shared", "pattern"} or not entry.get("pattern"):
        raise ValueError(f"expected {{repeats: n, shared: true or false, pattern: [...]}}, got {dump(entry)}")
    repeats = _convert_named("repeats", entry.get("repeats", Plain("1")), 1)
    if repeats < 1 and repeats != -1:
        raise ValueError(f"repeats={repeats} must be 1 or more, or -1 (the rest of the layers)")
    shared = _convert_named("shared", entry.get("shared", Plain("false")), False)
    if not isinstance(entry["pattern"], list) or not all(isinstance(facts, dict) for facts in entry["pattern"]):
        raise ValueError("pattern must be a list of layers, each {fact: value, ...}; {} is one as the model's keys say")
    pattern = tuple(MappingProxyType(_layer_facts(facts)) for facts in entry["pattern"])
    return MappingProxyType({"repeats": repeats, "shared": shared, "pattern": pattern})


def _layer_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of one layer of a pattern, each of its key's type."""
    typed = {}
    for key, value in facts.items():
        if key not in LAYER_FACTS:
            hint = nearest(key, LAYER_FACTS) or f" Those that may: {', '.join(LAYER_FACTS)}."
            raise ValueError(f"{key} cannot differ by layer.{hint}")
        fact = _convert_named(key, value, base().defaults[key])
        if key == "position_type" and fact not in ("rope", "none"):
            raise ValueError(f"position_type={fact} cannot differ by layer, only rope or none")
        if problem := check_value(key, fact):
            raise ValueError(problem)
        typed[key] = tuple(fact) if isinstance(fact, list) else fact
    return typed


def _convert_named(key: str, value: Any, default: Any) -> Any:
    try:
        return convert(value, default)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _remat(config: Mapping[str, Any]) -> list[str]:
    policy, custom = config["remat_policy"], config["remat_custom"]
    if policy != "custom":
        return [f"remat_custom needs remat_policy=custom, not {policy} (or remat_custom={{}})"] if custom else []
    problems = [] if custom else ["remat_policy=custom needs remat_custom, such as remat_custom.out_proj=device"]
    for array, place in custom.items():
        if array not in REMAT_ARRAYS:
            problems.append(f"remat_custom: no array {array}; there are {', '.join(REMAT_ARRAYS)}")
        if place not in ("device", "offload"):
            problems.append(f"remat_custom.{array}={dump(place)} is neither device nor offload")
    return problems


def _mesh(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if sorted(map(str, config["mesh_axes"])) != sorted(MESH_AXES):
        problems.append(f"mesh_axes={dump(config['mesh_axes'])} must name {', '.join(MESH_AXES)}, in any order")
    for kind in ("ici", "dcn"):
        open_keys = [key for key in (f"{kind}_{axis}_parallelism" for axis in MESH_AXES) if config[key] == -1]
        if len(open_keys) > 1:
            problems.append(f"only one {kind} size may be -1 (what is left), not {' and '.join(open_keys)}")
    return problems


def _rules(config: Mapping[str, Any]) -> list[str]:
    problems = []
    names, rules = base().defaults["logical_axis_rules"], config["logical_axis_rules"]
    for name in rules:
        if name not in names:
            problems.append(f"logical_axis_rules has no {name}.{nearest(name, names) or ' It has ' + ', '.join(names)}")
    if missing := [name for name in names if name not in rules]:
        problems.append(
            f"logical_axis_rules lacks {', '.join(missing)}; to change one rule alone, "
            f"write it with a dot: logical_axis_rules.{missing[0]}=[]"
        )
    for name, axes in rules.items():
        if not isinstance(axes, list) or set(map(str, axes)) - set(MESH_AXES) or len(set(axes)) < len(axes):
            problems.append(f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or []")
    return problems


def _schedule(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config["steps"] == -1 and config["learning_rate_schedule_steps"] == -1:
        problems.append("steps=-1 takes its value from learning_rate_schedule_steps, which is -1 too: set one of them")
    warmup, decay = config["warmup_steps_fraction"], config["wsd_decay_steps_fraction"]
    if config["lr_schedule_type"] == "wsd" and warmup + decay > 1:
        problems.append(
            f"warmup_steps_fraction={warmup} and wsd_decay_steps_fraction={decay} leave no room: their sum exceeds 1"
        )
    return problems


def _tiles(config: Mapping[str, Any]) -> list[str]:
    length, tiles = config["max_target_length"], config["num_vocab_tiling"]
    return [f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"] if length % tiles else []


def _tokenizer(config: Mapping[str, Any]) -> list[str]:
    kind, path = config["tokenizer_type"], config["tokenizer_path"]
    if config["dataset_type"] == "synthetic":
        return []
    if kind == "sentencepiece" and not path:
        return ["tokenizer_type=sentencepiece needs tokenizer_path, the .model file"]
    if kind == "huggingface" and not path:
        return ["tokenizer_type=huggingface needs tokenizer_path, a model's folder or a tokenizer.json"]
    if kind == "byte" and path:
        return [
            f"tokenizer_path={path} is not read with tokenizer_type=byte; set tokenizer_type=sentencepiece (a .model "
            "file) or tokenizer_type=huggingface (a model's folder or a tokenizer.json)"
        ]
    return []


def _finetuning(config: Mapping[str, Any]) -> list[str]:
    if config["use_sft"] and (config["dataset_type"] != "text" or not config["dataset_path"]):
        return ["use_sft=true reads .jsonl files of conversations: set dataset_type=text and dataset_path"]
    return []


def _evaluation(config: Mapping[str, Any]) -> list[str]:
    evaluates_text = config["eval_interval"] != -1 and config["dataset_type"] == "text"
    if evaluates_text and not config["eval_dataset_path"] and config["eval_fraction"] == 0:
        return ["eval_interval needs data to evaluate on: set eval_dataset_path or an eval_fraction above 0"]
    return []


def _scoring(config: Mapping[str, Any]) -> list[str]:
    pairs = (("texts_path", "scores_path"), ("tokens_path", "logits_path"))
    return [f"{a} and {b} go together: give both or none" for a, b in pairs if bool(config[a]) != bool(config[b])]


def _decoding(config: Mapping[str, Any]) -> list[str]:
    problems = []
    strategy = config["decode_sampling_strategy"]
    for key, strategies in (
        ("decode_sampling_top_k", ("topk", "composite")),
        ("decode_sampling_nucleus_p", ("nucleus", "composite")),
    ):
        given = config[key] != base().defaults[key]
        if strategy in strategies and not given:
            problems.append(f"decode_sampling_strategy={strategy} needs {key}")
        if strategy not in strategies and given:
            problems.append(f"{key}={config[key]} needs decode_sampling_strategy={' or '.join(strategies)}")
    if config["interactive"] and config["prompt_path"]:
        problems.append("interactive and prompt_path exclude each other: prompts are typed, or read from a file")
    prefill, length = config["max_prefill_predict_length"], config["max_target_length"]
    if prefill >= length:
        problems.append(
            f"max_prefill_predict_length={prefill} leaves no room in max_target_length={length}, prompt and all"
        )
    return problems


def _loading(config: Mapping[str, Any]) -> list[str]:
    if config["load_parameters_path"] and config["load_full_state_path"]:
        return ["load_parameters_path and load_full_state_path exclude each other: weights alone, or the whole state"]
    return []


def _adapters(config: Mapping[str, Any]) -> list[str]:
    if not config["lora_rank"]:
        return []
    problems = []
    if not config["lora_parameters"]:
        problems.append("lora_rank needs lora_parameters, such as [attention.query, attention.value]")
    if not config["load_parameters_path"]:
        problems.append("lora_rank needs load_parameters_path: the weights that its adapters add to")
    return problems


def _processes(config: Mapping[str, Any]) -> list[str]:
    address, count, this = config["coordinator_address"], config["num_processes"], config["process_id"]
    if bool(address) != (count != -1) or bool(address) != (this != -1):
        return ["coordinator_address, num_processes and process_id go together: give all three or none"]
    if address and this >= count:
        return [f"process_id={this} must be less than num_processes={count}"]
    return []


def _accepted(config: Mapping[str, Any]) -> list[str]:
    return [
        f"accept_changes names {name}, which is no key.{nearest(name, base().defaults)}"
        for name in map(str, config["accept_changes"])
        if name not in base().defaults
    ]


# The keys that a check reads, and the check.
RELATIONS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[str]]], ...] = (
    (("base_num_query_heads", "base_num_kv_heads", "attention_type"), _heads),
    (ATTENTION_FACTS, _attention),
    (("head_dim", "attention_type", *ROPE_FACTS), _rope),
    (EXPERT_FACTS, _experts),
    (("trainable_position_size", "position_type", "max_target_length", "base_emb_dim"), _positions),
    (("decoder_segments", "base_num_decoder_layers", "global_parameter_scale", *LAYER_FACTS), _segments),
    (("remat_policy", "remat_custom"), _remat),
    (("mesh_axes", *(f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in MESH_AXES)), _mesh),
    (("logical_axis_rules",), _rules),
    (("steps", "learning_rate_schedule_steps", "warmup_steps_fraction", "wsd_decay_steps_fraction"), _schedule),
    (("max_target_length", "num_vocab_tiling"), _tiles),
    (("dataset_type", "tokenizer_type", "tokenizer_path"), _tokenizer),
    (("use_sft", "dataset_type", "dataset_path"), _finetuning),
    (("eval_interval", "dataset_type", "eval_dataset_path", "eval_fraction"), _evaluation),
    (("texts_path", "scores_path", "tokens_path", "logits_path"), _scoring),
    (
        (
            *("decode_sampling_strategy", "decode_sampling_top_k", "decode_sampling_nucleus_p"),
            *("interactive", "prompt_path", "max_prefill_predict_length", "max_target_length"),
        ),
        _decoding,
    ),
    (("load_parameters_path", "load_full_state_path"), _loading),
    (("lora_rank", "lora_parameters", "load_parameters_path"), _adapters),
    (("coordinator_address", "num_processes", "process_id"), _processes),
    (("accept_changes",), _accepted),
)
