"""Field-table rows that many families share."""

import functools
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from src.config.schema import KEYS
from src.extras.hf import family
from src.extras.hf.family import UNSET, Field, FieldGroup, Json, Keys, Layers, count_entry, entry, layer_with, require
from src.system.errors import UserError


def rows(text: str) -> tuple[Field, ...]:
    """Parses lines of `entry key`, or of one word if both have the same name."""
    return tuple(Field(names[0], names[-1]) for names in map(str.split, text.strip().splitlines()))


SIZES = rows(
    """
    vocab_size
    hidden_size          base_emb_dim
    intermediate_size    base_mlp_dim
    num_hidden_layers    base_num_decoder_layers
    num_attention_heads  base_num_query_heads
    rms_norm_eps         normalization_layer_epsilon
    tie_word_embeddings  logits_via_embedding
    """
)
HEADS = (
    Field("num_key_value_heads", "base_num_kv_heads", absent=lambda keys: keys["base_num_query_heads"]),
    Field("head_dim", "head_dim", absent=lambda keys: keys["base_emb_dim"] // keys["base_num_query_heads"]),
)
ATTENTION_BIAS = Field("attention_bias", "attention_bias", absent=False)
MLP_BIAS = Field("mlp_bias", "mlp_bias", absent=False)

# transformers' names of activations -> ours.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu": "relu", "relu2": "squared_relu"}
ACTIVATIONS["gelu"] = "gelu_exact"
GATED = {theirs: (ours, "linear") for theirs, ours in ACTIVATIONS.items()}
HIDDEN_ACT = Field("hidden_act", "mlp_activations", absent=GATED["silu"], values=GATED)
DECODER = (*SIZES, *HEADS, HIDDEN_ACT)
LOCAL_EXPERTS = (
    Field("intermediate_size", "base_mlp_dim", written=attrgetter("base_moe_mlp_dim")),
    *rows(
        """
        num_local_experts    num_experts
        num_experts_per_tok
        """
    ),
)

# ---- Layers that differ

WINDOWED, GLOBAL = "sliding_attention", "full_attention"


def layer_pattern(layers: Sequence[Keys]) -> Keys:
    """Returns decoder_segments with one segment per layer, from each layer's own keys; {} if no layer has any."""
    return {"decoder_segments": [{"repeats": 1, "pattern": [keys]} for keys in layers]} if any(layers) else {}


def read_window(hf: Json, keys: Keys) -> Keys:
    """Reads the attention type of a family whose layers either all have a sliding window or all have none."""
    window = Field("sliding_window", "sliding_window_size", UNSET).read(hf, keys)
    return {"attention_type": "local_sliding", **window} if window else {}


def write_window(layers: Layers) -> Json:
    """Reverses `read_window`."""
    windowed = layers[0].attention_type == "local_sliding"
    return {"sliding_window": layers[0].sliding_window_size if windowed else None}


def read_layer_types(hf: Json, default: Sequence[str], *known: str) -> list[str]:
    """Reads layer_types, or `default`; raises UserError unless each layer has one type, and it is `known`."""
    kinds = entry(hf, "layer_types", list(default))
    if unknown := sorted({str(kind) for kind in kinds if kind not in known}):
        raise UserError(f"config.json has layer_types {', '.join(unknown)}: expected {' or '.join(known)}")
    if len(kinds) != len(default):
        raise UserError(f"config.json has {len(kinds)} layer_types: expected {len(default)}, one per layer")
    return kinds


def read_windowed_layers(hf: Json, keys: Keys, global_every: int, **windowed: Any) -> Keys:
    """Reads the pattern of layers with and without windows; layers with windows also get the keys `windowed`.

    If config.json does not list layer types, every `global_every`-th layer has no window. Raises as `read_layer_types`.
    """
    default = [WINDOWED if (i + 1) % global_every else GLOBAL for i in range(keys["base_num_decoder_layers"])]
    of_kind = {WINDOWED: {"attention_type": "local_sliding", **windowed}, GLOBAL: {}}
    return layer_pattern([of_kind[kind] for kind in read_layer_types(hf, default, WINDOWED, GLOBAL)])


def read_kinds(hf: Json, keys: Keys, global_every: int, theta: float, local_theta: float) -> Keys:
    """Reads the pattern of layers with and without windows, each kind with its own rotary positions.

    `theta` (without windows) and `local_theta` (with) apply if config.json gives none; `global_every` is as in
    `read_windowed_layers`. Raises UserError for unsupported entries.
    """
    by_kind = entry(hf, "rope_parameters", {})
    family.require_known(by_kind, (WINDOWED, GLOBAL))
    windowed, everywhere = (entry(by_kind, kind, {}) for kind in (WINDOWED, GLOBAL))
    everywhere = {**everywhere, **entry(hf, "rope_scaling", {})}
    for parameters in (windowed, everywhere):
        require(parameters, truncate=True)  # transformers always truncates here, ignoring this entry
    longest = {"max_position_embeddings": hf.get("max_position_embeddings")}
    of_all = read_rope({**longest, "rope_theta": theta, "rope_parameters": everywhere}, keys)
    local = read_rope({**longest, "rope_theta": local_theta, "rope_parameters": windowed}, keys)
    # Windowed layers inherit the keys in `of_all`: reset those that their type reads, but their entries don't set.
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == local["rope_type"])
    read = {row.key for row in (_SHARE, *ROPE_PARAMETERS[kind])} & of_all.keys()
    local = {**{key: KEYS[key].default for key in sorted(read)}, **local}
    return {**of_all, **read_windowed_layers(hf, keys, global_every, **local)}


def read_rotated_layers(hf: Json, keys: Keys) -> list[Any]:
    """Reads no_rope_layers: despite its name, true for layers with rotary positions, one entry per layer.

    Without it, every `no_rope_layer_interval`-th layer (4th by default) has none. Raises UserError if it is too short.
    """
    count, every = keys["base_num_decoder_layers"], count_entry(hf, "no_rope_layer_interval", 4)
    rotated = entry(hf, "no_rope_layers", []) or [(i + 1) % every for i in range(count)]
    if len(rotated) < count:
        raise UserError(f"config.json has {len(rotated)} no_rope_layers: expected {count}, one per layer")
    return rotated[:count]


def check_no_windows(hf: Json, layers: Sequence[Any]) -> None:
    """Raises UserError if a layer has a window; use_sliding_window gives one to layers that are true in `layers`."""
    used = entry(hf, "use_sliding_window", False) and hf.get("sliding_window") is not None
    read_layer_types(hf, [WINDOWED if used and windowed else GLOBAL for windowed in layers], GLOBAL)


def write_layer_types(layers: Layers, kind: str = "local_sliding", name: str = WINDOWED) -> Json:
    """Writes layer_types, with `name` for layers whose attention_type is `kind`, and full attention for the others."""
    return {"layer_types": [name if layer.attention_type == kind else GLOBAL for layer in layers]}


_read_every_other = functools.partial(read_windowed_layers, global_every=2)
ALTERNATING_WINDOWS = FieldGroup("layer_types", _read_every_other, write_layer_types)

# ---- Rotary positions

ORIGINAL = "original_max_position_embeddings"
_FACTOR, _ORIGINAL_LENGTH = Field("factor", "rope_factor"), Field(ORIGINAL, ORIGINAL)
# ROPE_TYPES: transformers' types of rotary positions -> ours. ROPE_PARAMETERS: the entries of each type; one without a
# default is required, after `read_rope` has filled in those that transformers derives.
_SAME_NAME = ("default", "linear", "yarn", "dynamic", "longrope", "proportional")
ROPE_TYPES = {"llama3": "llama3.1", **{kind: kind for kind in _SAME_NAME}}
_SHARE = Field("partial_rotary_factor", "partial_rotary_factor", 1.0)
_FREQUENCIES = tuple(Field(name, f"rope_{name}") for name in ("low_freq_factor", "high_freq_factor"))
_ATTENTION = Field("attention_factor", "rope_attention_factor", UNSET)
_PAIRS = tuple(Field(f"{length}_factor", f"rope_{length}_factor") for length in ("short", "long"))
_YARN = tuple(Field(name, name, UNSET) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
ROPE_PARAMETERS: dict[str, tuple[Field, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "llama3": (_ORIGINAL_LENGTH, _FACTOR, *_FREQUENCIES),
    "yarn": (_ORIGINAL_LENGTH, _FACTOR, _ATTENTION, *_YARN, Field("truncate", "rope_truncate", UNSET)),
    "dynamic": (_ORIGINAL_LENGTH, _FACTOR),
    "longrope": (_ORIGINAL_LENGTH, _FACTOR, _ATTENTION, *_PAIRS),
    "proportional": (_SHARE, Field("factor", "rope_factor", 1.0)),
}
_ROPE_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(
    row.name for rows in ROPE_PARAMETERS.values() for row in rows
)
ROPE_ENTRIES = f"rope_parameters rope_scaling rope_theta partial_rotary_factor {ORIGINAL}"


def rope(theta: float = 1e4, partial: float = 0.0, kinds: Collection[str] = ROPE_TYPES) -> FieldGroup:
    """Returns the table row for rotary positions; `theta`, `partial` and `kinds` are as in `read_rope`."""
    read = functools.partial(read_rope, theta=theta, partial=partial, kinds=kinds)
    return FieldGroup(ROPE_ENTRIES, read, functools.partial(write_rope, partial=partial))


def read_rope(
    hf: Json, keys: Keys, theta: float = 1e4, partial: float = 0.0, kinds: Collection[str] = ROPE_TYPES
) -> Keys:
    """Reads the keys of rotary positions: from rope_parameters (transformers 5) or rope_scaling (older folders).

    As in transformers, rope_scaling replaces all of rope_parameters, including its theta; an outer
    original_max_position_embeddings takes precedence over the inner one, and max_position_embeddings is the default for
    both (for the type dynamic, it replaces both). `theta` and `partial`, the rotated part of a head (0: whole heads
    only), are defaults for missing entries. Raises UserError for types other than `kinds`, and for parameters that are
    missing or not supported.
    """
    parameters = entry(hf, "rope_scaling", {}) or entry(hf, "rope_parameters", {})
    kind = entry(parameters, "rope_type", entry(parameters, "type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in Phi 3's first folders
    if kind not in kinds:
        raise UserError(f"config.json has rotary positions of type {kind}: expected one of {', '.join(kinds)}")
    if unknown := sorted(set(parameters) - _ROPE_NAMES):
        raise UserError(f"config.json has rotary positions with {', '.join(unknown)}, which is not supported here")
    parameters = {**parameters, _SHARE.name: {_SHARE.name: partial or 1.0, **hf, **parameters}[_SHARE.name]}
    require(parameters, **({} if partial or kind == "proportional" else {_SHARE.name: 1.0}))
    for name in ("attention_factor", "mscale_all_dim"):
        if parameters.get(name) and all(row.name != name for row in ROPE_PARAMETERS[kind]):
            raise UserError(f"config.json has {name} for rotary positions of type {kind}: expected type yarn")
    if _ORIGINAL_LENGTH in ROPE_PARAMETERS[kind]:
        lengths = [hf.get(ORIGINAL), parameters.get(ORIGINAL), hf.get("max_position_embeddings")]
        lengths = lengths[-1:] if kind == "dynamic" else lengths
        parameters = {**parameters, ORIGINAL: next((length for length in lengths if length is not None), None)}
    if kind in ("yarn", "longrope") and parameters.get("factor", 1 if kind == "yarn" else None) is None:
        longest, original = count_entry(hf, "max_position_embeddings", 0), count_entry(parameters, ORIGINAL, 0)
        parameters["factor"] = longest / original
    given = next((entries for entries in (parameters, hf) if "rope_theta" in entries), {"rope_theta": theta})
    if given["rope_theta"] is None:  # transformers can't compute angles from null
        raise UserError("config.json has rope_theta null: expected a number, or no such entry")
    return {
        "rope_max_timescale": entry(given, "rope_theta", theta),
        "rope_type": ROPE_TYPES[kind],
        **(_SHARE.read(parameters, {}) if partial else {}),
        **family.read_fields(ROPE_PARAMETERS[kind], parameters),
    }


def write_rope(layers: Layers, partial: float = 0.0) -> Json:
    """Reverses `read_rope`, in the older style, which every version of transformers reads."""
    layer = layer_with(layers, "rope_max_timescale")
    rope_type = layer.rope_type if layer.position_type == "rope" else "default"
    kind = next(theirs for theirs, ours in ROPE_TYPES.items() if ours == rope_type)
    # Zero means that an entry, such as mscale, is not given.
    written = family.write_fields(ROPE_PARAMETERS[kind], [layer]).items()
    parameters = {name: value for name, value in written if value or name == "truncate"}
    entries = {
        "rope_theta": layer.rope_max_timescale,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **parameters},
    }
    if original := parameters.get(ORIGINAL):
        entries["max_position_embeddings"] = original if kind == "dynamic" else round(original * layer.rope_factor)
    if kind == "longrope":  # Phi's outer entry would take precedence over the inner one
        entries[ORIGINAL] = original
    return {**entries, "partial_rotary_factor": layer.partial_rotary_factor} if partial else entries


def write_kinds(layers: Layers) -> tuple[Json, float]:
    """Reverses `read_kinds`; also returns the theta of windowed layers, which each family names differently."""
    rope_entries = write_rope([layer for layer in layers if layer.attention_type == "global"] or layers)
    local_theta = layer_with(layers, "sliding_window_size").rope_max_timescale
    return {**rope_entries, **write_layer_types(layers)}, local_theta
