"""A family's table of fields: the entries of its config.json, read into keys of base.yml and written from them.

A row of the table is a `Field`, one entry with the meaning of one key, or a `FieldGroup`, entries that mean something
only together. Both read and write. Where two rows have the same entry or key, the later one counts.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.config.needs import OF_LAYERS
from src.config.schema import KEYS, Model
from src.config.values import check_value
from src.config.yaml import type_name
from src.errors import UserError

Keys = dict[str, Any]
Json = dict[str, Any]
Layers = Sequence[Model]  # the facts of each layer, first to last

REQUIRED, UNSET = object(), object()  # values of `Field.absent`

# Values that keys have to say "none" or "as another key", which no number in config.json means.
NOT_IN_JSON = {
    **dict.fromkeys(("attn_logits_soft_cap", "final_logits_soft_cap", "query_pre_attn_scalar"), 0),
    **dict.fromkeys(("mlp_activations_limit", "sliding_window_size", "chunk_attn_window_size", "base_moe_mlp_dim"), 0),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    **{"num_experts": 1, "rope_attention_factor": 0},
}


@dataclass(frozen=True)
class Field:
    """An entry of config.json and the key of base.yml with its meaning."""

    name: str  # config.json's
    key: str  # base.yml's
    # The key's value where the entry is absent or null, or a function that computes it from the keys read so far.
    # REQUIRED: there must be an entry. UNSET: base.yml's default stays.
    absent: Any = REQUIRED
    # config.json's values -> the key's, where they differ. An export writes the first entry with the key's value, or
    # the first of all if none has it.
    values: Mapping[str, Any] | None = None
    written: Callable[[Model], Any] | None = None  # computes the entry from a layer, if not by reading backwards

    @property
    def names(self) -> tuple[str, ...]:
        """Lists the entries that it covers."""
        return (self.name,)

    def read(self, hf: Mapping[str, Any], keys: Keys) -> Keys:
        """Returns the key, if it has a value, by `keys` of the rows above; raises UserError for one it can't have."""
        default = KEYS[self.key].default
        if hf.get(self.name) is None:
            if self.absent is not UNSET:
                return {self.key: self.absent(keys) if callable(self.absent) else self.absent}
            # transformers takes a null for false.
            return {self.key: False} if isinstance(default, bool) and self.name in hf else {}
        if self.values:
            if (value := hf[self.name]) not in list(self.values):
                known = ", ".join(map(str, self.values))
                raise UserError(f"config.json has {self.name} {value}: expected one of {known}")
            return {self.key: self.values[value]}
        value = entry(hf, self.name, default)
        if problem := check_value(self.key, value):
            raise UserError(f"config.json has {self.name} {json.dumps(value)}: {problem}")
        if value == NOT_IN_JSON.get(self.key):
            raise UserError(f"config.json has {self.name} {value}, which is not here: expected more")
        return {self.key: value}

    def write(self, layers: Layers) -> Json:
        """Returns the entry that `read` reads as the key of the first layer that it says something of."""
        layer = layer_with(layers, self.key)
        value = getattr(layer, self.key)
        if self.written:
            value = self.written(layer)
        elif self.values:
            value = next((name for name, other in self.values.items() if other == value), next(iter(self.values)))
        elif self.absent is UNSET and value == NOT_IN_JSON.get(self.key):
            value = None
        return {self.name: list(value) if isinstance(value, tuple) else value}


@dataclass(frozen=True)
class FieldGroup:
    """Entries of config.json that mean something only together."""

    names: tuple[str, ...]
    # Of config.json and the keys above, to further keys; raises UserError for what is not here.
    read: Callable[[Mapping[str, Any], Keys], Keys | None] = lambda hf, keys: None
    write: Callable[[Layers], Json] = lambda layers: {}


Table = tuple[Field | FieldGroup, ...]


def layer_with(layers: Layers, key: str) -> Model:
    """Returns the first layer on which a fact has effect, or else the model's first."""
    needs = [need for need in OF_LAYERS if key in need.keys]
    return next((layer for layer in layers if all(need.met(vars(layer)) for need in needs)), layers[0])


def required_entries(table: Table) -> list[str]:
    """Returns the entries that a config.json has to have."""
    return list(dict.fromkeys(row.name for row in table if isinstance(row, Field) and row.absent is REQUIRED))


def read_fields(table: Table, hf: Mapping[str, Any]) -> Keys:
    """Returns the keys that a table reads in config.json; raises UserError if an entry is missing or not supported."""
    if missing := [name for name in required_entries(table) if hf.get(name) is None]:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    keys: Keys = {}
    for row in table:
        keys.update(row.read(hf, keys) or {})
    return keys


def write_fields(table: Table, layers: Layers) -> Json:
    """Returns the entries of config.json that `read_fields` reads as the layers' keys."""
    return {name: value for row in table for name, value in row.write(layers).items()}


def entry(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns an entry, or `default` if absent or null (false to transformers); raises UserError for another type."""
    value = hf.get(name)
    if value is None:
        return False if isinstance(default, bool) and name in hf else default
    fits = {float: (int, float), tuple: list}.get(type(default), type(default))
    # To Python, true is an integer too.
    if not isinstance(value, fits) or isinstance(value, bool) != isinstance(default, bool):
        expected = type_name(default).partition(",")[0]
        raise UserError(f"config.json has {name} {json.dumps(value)}: expected {expected}")
    return value


def count_entry(hf: Mapping[str, Any], name: str, default: int) -> int:
    """Returns an entry as `entry` does; raises UserError for one that is no integer from 1 up."""
    if (value := entry(hf, name, default)) < 1:
        raise UserError(f"config.json has {name} {value}: expected 1 or more")
    return value


def require(hf: Mapping[str, Any], **values: Any) -> None:
    """Raises UserError for an entry of config.json with another value; absent ones pass, and null for false."""
    for name, value in values.items():
        actual = hf.get(name, value)
        if actual != value and (actual or value):
            raise UserError(f"config.json has {name} {actual!r}, which is not here: expected {value!r}")


def unknown_entries(hf: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Returns the names of entries beyond `known` that are neither null, false, 0 nor empty."""
    return [name for name, value in hf.items() if name not in known and value not in (None, False, [], {}, "")]


def require_known(hf: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UserError for an entry of config.json that `unknown_entries` returns."""
    if unknown := unknown_entries(hf, known):
        listed = ", ".join(f"{name} {json.dumps(hf[name])}" for name in unknown)
        raise UserError(
            f"config.json has {listed}, which is not known here: if the model computes the same without, take it out"
        )
