"""Parts of config.json that many families share, read into keys of base.yml and written from them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from src.config_yaml import TYPE_NAMES, base
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

# Their names of activations -> ours. Their "gelu" is the exact one, which is not here.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}

WINDOWED, GLOBAL = "sliding_attention", "full_attention"

# Kinds of scaled rotary positions: their name -> ours, and for each the parameters it has, their name -> our key.
ROPE_TYPES = {"default": "default", "linear": "linear", "llama3": "llama3.1", "yarn": "yarn"}
ORIGINAL_LENGTH = {"original_max_position_embeddings": "original_max_position_embeddings"}
ROPE_PARAMETERS = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        **ORIGINAL_LENGTH,
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        **ORIGINAL_LENGTH,
        "factor": "rope_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "rope_truncate",
    },
}


def entry(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    """An entry of config.json, which has the type of `default`; that itself where the entry is absent or null.

    Raises:
        UserError: it is of another type, such as a number in quotes.
    """
    value = hf.get(name)
    if value is None:
        return default
    fits = (int, float) if isinstance(default, float) else type(default)
    # To Python, true is an integer too.
    if not isinstance(value, fits) or isinstance(value, bool) != isinstance(default, bool):
        expected = TYPE_NAMES[type(default)].partition(",")[0]
        raise UserError(f"config.json has {name} {json.dumps(value)}: expected {expected}")
    return value


def read(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """The keys that `names` maps config.json's entries to; entries that are absent or null give none.

    Raises:
        UserError: an entry is not of its key's type.
    """
    return {key: entry(hf, name, base().defaults[key]) for name, key in names.items() if hf.get(name) is not None}


def read_all(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """As `read`.

    Raises:
        UserError: an entry is absent, or not of its key's type.
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
        UserError: config.json lacks one.
    """
    hf = {**defaults, **{name: value for name, value in hf.items() if value is not None}}
    hf.setdefault("tie_word_embeddings", False)
    read_all(hf, {"hidden_size": "base_emb_dim", "num_attention_heads": "base_num_query_heads"})
    hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    return {"normalization": "rms", "position_type": "rope", **read_all(hf, SHARED)}


def shared_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `shared_keys`."""
    return write(keys, SHARED)


def activation(hf: Mapping[str, Any], entry: str = "hidden_act", default: str = "silu") -> str:
    """Our name of the activation that an entry of config.json names.

    Raises:
        UserError: it is not here.
    """
    name = hf.get(entry, default)
    if name not in ACTIVATIONS:
        raise UserError(f"config.json has {entry} {name}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(keys: Mapping[str, Any], preferred: str = "") -> str:
    """Their name of a model's first activation, `preferred` if it is one; another's where they have none."""
    names = [name for name, ours in ACTIVATIONS.items() if ours == keys["mlp_activations"][0]]
    return preferred if preferred in names else [*names, "silu"][0]


def refuse(hf: Mapping[str, Any], **only: Any) -> None:
    """Raises UserError where an entry of config.json has another value than `only` names for it; absent ones pass."""
    for name, value in only.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json has {name} {hf[name]!r}, which is not here: expected {value!r}")


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
    window = entry(hf, "sliding_window", 0)
    return {"attention_type": "local_sliding", "sliding_window_size": window} if window else {}


def window_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `window_keys`."""
    return {"sliding_window": keys["sliding_window_size"] if keys["attention_type"] == "local_sliding" else None}


def windowed_layers(hf: Mapping[str, Any], count: int, global_every: int, **local: Any) -> Keys:
    """The pattern of a family in which some layers have windows.

    Args:
        hf: config.json, which may tell each layer's kind.
        count: of layers.
        global_every: if it does not: every so manieth has none.
        local: further facts of those that have.

    Raises:
        UserError: a layer's attention is of another kind.
    """
    kinds = entry(hf, "layer_types", []) or [WINDOWED if (i + 1) % global_every else GLOBAL for i in range(count)]
    if others := set(kinds) - {WINDOWED, GLOBAL}:
        raise UserError(f"config.json has layers of {', '.join(sorted(others))}: expected {WINDOWED} or {GLOBAL}")
    return pattern([{"attention_type": "local_sliding", **local} if kind == WINDOWED else {} for kind in kinds])


def layer_types(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kinds of such layers, in config.json's words."""
    return [WINDOWED if layer["attention_type"] == "local_sliding" else GLOBAL for layer in layers]


def rope_keys(hf: Mapping[str, Any], theta: float = 10_000.0) -> Keys:
    """The keys of rotary positions, from transformers 5's rope_parameters or the older rope_theta and rope_scaling.

    Args:
        hf: config.json.
        theta: the family's, where config.json has none.

    Raises:
        UserError: they are scaled in a way that is not here.
    """
    parameters = entry(hf, "rope_parameters", {}) or entry(hf, "rope_scaling", {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(f"config.json has rotary positions of type {kind}: expected one of {', '.join(ROPE_TYPES)}")
    refuse({**hf, **parameters}, partial_rotary_factor=1.0)
    if parameters.get("attention_factor") is not None:
        raise UserError("config.json has an attention_factor for rotary positions: expected mscale, or neither")
    return {
        "rope_max_timescale": entry(parameters, "rope_theta", entry(hf, "rope_theta", theta)),
        "rope_type": ROPE_TYPES[kind],
        # Where rope_scaling doesn't say how long the original length is.
        **read(hf, {"max_position_embeddings": "original_max_position_embeddings"} if kind == "yarn" else {}),
        **read(parameters, ROPE_PARAMETERS[kind]),
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
