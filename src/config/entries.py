"""Reads the keys whose values are lists of mappings (`ENTRIES`), and converts each setting to its type."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from src.config import dataset_spec
from src.config.keys import FROM_0
from src.config.model_checks import check_value, read_list
from src.config.schema import KEYS
from src.config.yaml import convert, dump
from src.system.errors import did_you_mean, first_few

# The settings that each key's entries may have, with a value of the right type; the first one is required.
RULES: dict[str, dict[str, Any]] = {
    "optimizer_rules": {"match": "", "learning_rate_scale": 1.0, "opt_type": "", "weight_decay": 0.0},
    "load_weights_rules": {"match": "", "path": "", "name": ""},
}
ENTRIES = RULES | {
    key: {name: {"weight": 1.0, "eval_steps": 1}.get(name, "") for name in names}
    for key, names in dataset_spec.ENTRY_KEYS.items()
}
_RANGES = {"learning_rate_scale": FROM_0, "weight_decay": FROM_0}


def read_entries(key: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Reads the parsed value of `key`: a list of mappings, whose settings are converted to their types.

    Raises ValueError with the problems of all entries, or with the names that two datasets have in common.
    """
    entries = read_list(value, "entry", functools.partial(_read_entry, ENTRIES[key]))
    if key in RULES:
        return entries
    names = [entry["name"] for entry in entries]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError("; ".join(f"two entries have the name {name}" for name in twice))
    return entries


def _read_entry(known: Mapping[str, Any], entry: Any) -> dict[str, Any]:
    first = next(iter(known))
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected a mapping such as {{{first}: web, {list(known)[-1]}: ...}}, got {dump(entry)}")
    typed, problems = {}, []
    for name, value in entry.items():
        try:
            typed[name] = _read_setting(known, name, value)
        except ValueError as error:
            problems.append(str(error))
    given = {**entry, **typed}  # with `null` converted to an empty text
    if first == "match" and not given.get("match"):
        problems.append(f"it needs match, a pattern of weights' names, got {dump(entry)}")
    if first == "name" and not re.fullmatch(r"[\w.-]+", str(given.get("name", ""))):
        problems.append("it needs a name, of letters, digits, dots, dashes and underscores")
    if problems:
        raise ValueError("; ".join(problems))
    return typed


def _read_setting(known: Mapping[str, Any], name: str, value: Any) -> Any:
    if name not in known:
        hint = did_you_mean(name, known) or f" There are {first_few(known, near=name)}"
        if name.partition(":")[0] in known:
            hint = " YAML needs a space after the colon"
        raise ValueError(f"no setting {name}.{hint}")
    typed = convert(value, known[name], name)
    if name in _RANGES and not _RANGES[name].holds(typed):
        raise ValueError(f"{name}={dump(typed)} must be {_RANGES[name].words}")
    key = "load_parameters_path" if name == "path" else name  # a rule's path may be whatever that key's is
    if key in KEYS and (problem := check_value(key, typed)):
        raise ValueError(problem.replace(key, name, 1))
    return typed
