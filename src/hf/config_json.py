"""Parts of config.json that many families share, read into keys of base.yml and written from them."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from src.config.values import check_value
from src.config.yaml import TYPE_NAMES, base
from src.errors import UserError

Keys = dict[str, Any]
Json = dict[str, Any]

# config.json's name -> the key of base.yml with the same meaning, in most families.
SHARED = {
    "vocab_size": "vocab_size",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "normalization_layer_epsilon",
    "tie_word_embeddings": "logits_via_embedding",
}

# Values that keys of base.yml have for what no config.json means by them: none, the same as another, no router.
OTHER_MEANING = {
    **dict.fromkeys(("attn_logits_soft_cap", "final_logits_soft_cap", "query_pre_attn_scalar"), 0),
    **dict.fromkeys(("mlp_activations_limit", "sliding_window_size", "chunk_attn_window_size", "base_moe_mlp_dim"), 0),
    "num_experts": 1,
}

# Their names of activations -> ours. Their "gelu" is the exact one, which is not here.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}

# Entries that alter no logits in any family: names, dtypes, special tokens, what training and generation read alone.
# fmt: off
INERT = frozenset((
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map",
    "quantization_config", "attention_dropout", "initializer_range", "use_cache", "cache_implementation",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "use_return_dict", "torchscript", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "name_or_path", "attn_implementation",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "max_position_embeddings", "max_sequence_length", "pretraining_tp", "gradient_checkpointing",
    "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size", "max_length", "min_length",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "output_scores",
    "return_dict_in_generate", "unsloth_fixed", "unsloth_version",
))
# fmt: on
# What the class that reads config.json takes for granted, in any family.
ONLY = {"is_causal": True, "is_encoder_decoder": False}

WINDOWED, GLOBAL = "sliding_attention", "full_attention"

# Kinds of scaled rotary positions: their name -> ours, and for each the parameters it has, their name -> our key.
ROPE_TYPES = {"default": "default", "linear": "linear", "llama3": "llama3.1", "yarn": "yarn"}
ORIGINAL = "original_max_position_embeddings"
ROPE_PARAMETERS = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        ORIGINAL: ORIGINAL,
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        ORIGINAL: ORIGINAL,
        "factor": "rope_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "rope_truncate",
    },
}
ROPE_ENTRIES = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", ORIGINAL)
# Those without which transformers reads no rotary positions of their kind.
ROPE_REQUIRED = ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor")


def entry(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    """An entry of config.json, which has the type of `default`; that itself where the entry is absent or null.

    A null where true or false belongs is false, as it is to transformers.

    Raises:
        UserError: it is of another type, such as a number in quotes.
    """
    value = hf.get(name)
    if value is None:
        return False if isinstance(default, bool) and name in hf else default
    fits = (int, float) if isinstance(default, float) else type(default)
    # To Python, true is an integer too.
    if not isinstance(value, fits) or isinstance(value, bool) != isinstance(default, bool):
        expected = TYPE_NAMES[type(default)].partition(",")[0]
        raise UserError(f"config.json has {name} {json.dumps(value)}: expected {expected}")
    return value


def size(hf: Mapping[str, Any], name: str, default: int) -> int:
    """As `entry`, of a number that counts something.

    Raises:
        UserError: it is no integer from 1 up.
    """
    if (value := entry(hf, name, default)) < 1:
        raise UserError(f"config.json has {name} {value}: expected 1 or more")
    return value


def read(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """The keys that `names` maps config.json's entries to; entries that are absent or null give none.

    Raises:
        UserError: an entry is not of its key's type, or no value that the key may have.
    """
    keys = {}
    for name, key in names.items():
        default = base().defaults[key]
        if hf.get(name) is None and not (name in hf and isinstance(default, bool)):
            continue
        keys[key] = entry(hf, name, default)
        if problem := check_value(key, keys[key]):
            raise UserError(f"config.json has {name} {json.dumps(keys[key])}: {problem}")
        if keys[key] == OTHER_MEANING.get(key):
            raise UserError(f"config.json has {name} {keys[key]}, which is not here: expected more")
    return keys


def read_all(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """As `read`.

    Raises:
        UserError: an entry is absent, or as `read` does.
    """
    if missing := [name for name in names if hf.get(name) is None]:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    return read(hf, names)


def write(keys: Mapping[str, Any], names: Mapping[str, str]) -> Json:
    """The reverse of `read`."""
    return {name: keys[key] for name, key in names.items()}


def shared_keys(hf: Mapping[str, Any], **defaults: Any) -> Keys:
    """The keys of `SHARED`; `defaults` are the family's values of entries that its config.json may leave out.

    Raises:
        UserError: config.json lacks one, or as `read` does.
    """
    hf = {"tie_word_embeddings": False, **defaults, **hf}
    sizes = read_all(hf, {name: SHARED[name] for name in ("hidden_size", "num_attention_heads")})
    if hf.get("num_key_value_heads") is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    if hf.get("head_dim") is None:
        hf["head_dim"] = sizes["base_emb_dim"] // sizes["base_num_query_heads"]
    return {"normalization": "rms", "position_type": "rope", **read_all(hf, SHARED)}


def shared_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `shared_keys`."""
    return write(keys, SHARED)


def activation(hf: Mapping[str, Any], name: str = "hidden_act", default: str = "silu") -> str:
    """Our name of the activation that an entry of config.json names.

    Raises:
        UserError: it is not here.
    """
    if (value := entry(hf, name, default)) not in ACTIVATIONS:
        raise UserError(f"config.json has {name} {value}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def activation_name(keys: Mapping[str, Any], preferred: str = "") -> str:
    """Their name of a model's first activation, `preferred` if it is one; another's where they have none."""
    names = [name for name, ours in ACTIVATIONS.items() if ours == keys["mlp_activations"][0]]
    return preferred if preferred in names else [*names, "silu"][0]


def refuse(hf: Mapping[str, Any], **only: Any) -> None:
    """Raises UserError where an entry of config.json has another value than `only` names for it.

    Absent ones pass, and null for false.
    """
    for name, value in only.items():
        found = hf.get(name, value)
        if found != value and (found or value):
            raise UserError(f"config.json has {name} {found!r}, which is not here: expected {value!r}")


def refuse_others(hf: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UserError where config.json has an entry beyond `known` ones that is neither null, false, 0 nor empty."""
    if others := [name for name, value in hf.items() if name not in known and value not in (None, False, [], {}, "")]:
        said = ", ".join(f"{name} {json.dumps(hf[name])}" for name in others)
        raise UserError(
            f"config.json has {said}, which is not known here: if the model computes the same without, take it out"
        )


def pattern(layers: Sequence[Keys]) -> Keys:
    """Each layer's own facts, as decoder_segments of a layer each; nothing where no layer has any."""
    return {"decoder_segments": [{"repeats": 1, "pattern": [facts]} for facts in layers]} if any(layers) else {}


def first(layers: Sequence[Mapping[str, Any]], key: str, *values: Any) -> Mapping[str, Any]:
    """The first layer whose `key` is one of `values`, or the model's first."""
    return next((layer for layer in layers if layer[key] in values), layers[0])


def dense_and_sparse(layers: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The first layer without experts and the first with; the model's first for a kind that it has not."""
    dense = first(layers, "num_experts", 1)
    return dense, next((layer for layer in layers if layer["num_experts"] > 1), layers[0])


def window_keys(hf: Mapping[str, Any]) -> Keys:
    """The attention of a family whose layers all have a sliding window, or none."""
    window = read(hf, {"sliding_window": "sliding_window_size"})
    return {"attention_type": "local_sliding", **window} if window else {}


def window_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `window_keys`."""
    return {"sliding_window": keys["sliding_window_size"] if keys["attention_type"] == "local_sliding" else None}


def layer_kinds(hf: Mapping[str, Any], default: Sequence[str], *known: str) -> list[str]:
    """Each layer's kind of attention: what layer_types says, else `default`.

    Raises:
        UserError: a layer is of no `known` kind, or there are not as many as layers.
    """
    kinds = entry(hf, "layer_types", list(default))
    if others := sorted({str(kind) for kind in kinds if kind not in known}):
        raise UserError(f"config.json has layers of {', '.join(others)}: expected {' or '.join(known)}")
    if len(kinds) != len(default):
        raise UserError(f"config.json has {len(kinds)} layer_types: expected {len(default)}, one a layer")
    return kinds


def windowed_layers(hf: Mapping[str, Any], count: int, global_every: int, **local: Any) -> Keys:
    """The pattern of a family in which some layers have windows.

    Args:
        hf: config.json, which may tell each layer's kind.
        count: of layers.
        global_every: if it does not: one in so many has none.
        local: further facts of those that have.

    Raises:
        UserError: as `layer_kinds` does.
    """
    default = [WINDOWED if (i + 1) % global_every else GLOBAL for i in range(count)]
    kinds = layer_kinds(hf, default, WINDOWED, GLOBAL)
    return pattern([{"attention_type": "local_sliding", **local} if kind == WINDOWED else {} for kind in kinds])


def layer_types(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kinds of such layers, in config.json's words."""
    return [WINDOWED if layer["attention_type"] == "local_sliding" else GLOBAL for layer in layers]


def rope_keys(hf: Mapping[str, Any], theta: float = 10_000.0) -> Keys:
    """The keys of rotary positions, from transformers 5's rope_parameters or the older rope_theta and rope_scaling.

    As in transformers, a rope_scaling replaces all of rope_parameters, its theta too; original_max_position_embeddings
    beside them is before the one within; and the length trained on before is max_position_embeddings where neither is.

    Args:
        hf: config.json.
        theta: the family's, where config.json has none.

    Raises:
        UserError: they are scaled in a way that is not here.
    """
    parameters = entry(hf, "rope_scaling", {}) or entry(hf, "rope_parameters", {})
    kind = entry(parameters, "rope_type", entry(parameters, "type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(f"config.json has rotary positions of type {kind}: expected one of {', '.join(ROPE_TYPES)}")
    kinds = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor")
    if unknown := sorted(set(parameters).difference(kinds, *ROPE_PARAMETERS.values())):
        raise UserError(f"config.json has rotary positions with {', '.join(unknown)}, which is not known here")
    refuse({**hf, **parameters}, partial_rotary_factor=1.0)
    if parameters.get("attention_factor") is not None:
        raise UserError("config.json has an attention_factor for rotary positions: expected mscale, or neither")
    if kind != "yarn" and parameters.get("mscale_all_dim"):
        raise UserError(f"config.json has mscale_all_dim for rotary positions of type {kind}: expected type yarn")
    stretching = ROPE_PARAMETERS[kind]
    if ORIGINAL in stretching:
        lengths = (hf.get(ORIGINAL), parameters.get(ORIGINAL), hf.get("max_position_embeddings"))
        parameters = {**parameters, ORIGINAL: next((length for length in lengths if length is not None), None)}
    if kind == "yarn" and parameters.get("factor", 1) is None:
        parameters["factor"] = size(hf, "max_position_embeddings", 0) / size(parameters, ORIGINAL, 0)
    read_all(parameters, {name: key for name, key in stretching.items() if name in ROPE_REQUIRED})
    return {
        "rope_max_timescale": entry(parameters, "rope_theta", entry(hf, "rope_theta", theta)),
        "rope_type": ROPE_TYPES[kind],
        **read(parameters, stretching),
    }


def rope_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `rope_keys`, in the older style, which every version of transformers reads."""
    kind = next(name for name, ours in ROPE_TYPES.items() if ours == keys["rope_type"])
    # A zero stands for an mscale that is not given.
    parameters = {
        name: value for name, value in write(keys, ROPE_PARAMETERS[kind]).items() if value or name == "truncate"
    }
    scaling = {"rope_type": kind, **parameters}
    stretched = "original_max_position_embeddings" in parameters
    return {
        "rope_theta": keys["rope_max_timescale"],
        "rope_scaling": None if kind == "default" else scaling,
        "max_position_embeddings": round(keys["original_max_position_embeddings"] * keys["rope_factor"])
        if stretched
        else keys["max_target_length"],
    }
