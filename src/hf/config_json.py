"""Parts of config.json that many families share, read into keys of base.yml and written from them."""

from collections.abc import Mapping
from typing import Any

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


def read(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """The keys that `names` maps config.json's entries to; entries that are absent or null give none."""
    return {key: hf[name] for name, key in names.items() if hf.get(name) is not None}


def read_all(hf: Mapping[str, Any], names: Mapping[str, str]) -> Keys:
    """As `read`.

    Raises:
        UserError: an entry is absent.
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
    """Their name of a model's first activation, `preferred` if it is one; empty where they have none."""
    names = [name for name, ours in ACTIVATIONS.items() if ours == keys["mlp_activations"][0]]
    return preferred if preferred in names else [*names, ""][0]


def window_keys(hf: Mapping[str, Any]) -> Keys:
    """The attention of a family whose layers all have a sliding window, or none."""
    window = hf.get("sliding_window")
    return {"attention_type": "local_sliding", "sliding_window_size": window} if window else {}


def window_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `window_keys`."""
    return {"sliding_window": keys["sliding_window_size"] if keys["attention_type"] == "local_sliding" else None}


def rope_keys(hf: Mapping[str, Any]) -> Keys:
    """The keys of rotary positions, from transformers 5's rope_parameters or the older rope_theta and rope_scaling.

    Raises:
        UserError: they are scaled in a way that is not here.
    """
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UserError(f"config.json has rotary positions of type {kind}: expected one of {', '.join(ROPE_TYPES)}")
    if parameters.get("attention_factor") is not None:
        raise UserError("config.json has an attention_factor for rotary positions: expected mscale, or neither")
    return {
        "rope_max_timescale": parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0,
        "rope_type": ROPE_TYPES[kind],
        # Where rope_scaling doesn't say how long the original length is.
        **read(hf, {"max_position_embeddings": "original_max_position_embeddings"} if kind == "yarn" else {}),
        **read(parameters, ROPE_PARAMETERS[kind]),
    }


def rope_json(keys: Mapping[str, Any]) -> Json:
    """The reverse of `rope_keys`, in the older style, which every version of transformers reads."""
    kind = next(name for name, ours in ROPE_TYPES.items() if ours == keys["rope_type"])
    scaling = {"rope_type": kind, **write(keys, ROPE_PARAMETERS[kind])}
    return {"rope_theta": keys["rope_max_timescale"], "rope_scaling": None if kind == "default" else scaling}
