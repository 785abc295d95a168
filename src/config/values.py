"""Checks each key's value by itself; `convert` checks its type."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.config.keys import Range, frozen
from src.config.migration_hints import value_hint
from src.config.schema import KEYS
from src.config.yaml import MAX_NAME, convert, dump, too_long, unprintable

ACTIVATIONS = ("silu", "gelu", "gelu_exact", "quick_gelu", "relu", "squared_relu", "linear", "plus_one")


class FlatKeys(dict[str, Any]):
    """Flat keys, also as attributes; a check that reads one that is missing, because it is wrong, raises KeyError."""

    __getattr__ = dict.__getitem__


def check_value(name: str, value: Any) -> str:
    """Returns an error message if `value`, of the key's type, is invalid for the key, else ""."""
    key = KEYS[name]
    if isinstance(value, str) and not key.any_text and (problem := unprintable(value, is_name=True)):
        return f"{name}: {problem}"
    if key.is_path and "://" not in value and (problem := too_long(value)):
        return f"{name}={value} {problem}"
    if key.is_path and re.fullmatch("(?!file|hf)[a-z0-9]+://(/.*)?", value):  # a store would be asked for minutes
        return f"{name}={value} names no bucket; an empty variable of the shell leaves such a path"
    if key.is_path and "://" not in value and Path(os.path.expanduser(value)).is_fifo() and value[:5] != "/dev/":
        return f"{name}={value} is a pipe: expected a file, or /dev/stdin"
    stores = ("gs", "s3") * (not key.is_local) + ("hf",) * (name in ("tokenizer_path", "load_parameters_path"))
    # The others are paths of data: fsspec reads them, and names the protocols that it does not know.
    if key.is_path and "://" in value and value.partition("://")[0] not in stores and not name.endswith("dataset_path"):
        also = "".join(f", {store}://..." for store in stores)
        return f"{name}={value}: expected a path on this machine, or of a file system that is mounted on it{also}"
    if isinstance(key.allowed, Range):
        if not key.allowed.holds(value):
            return f"{name}={dump(value)} must be {key.allowed.words} ({key.comment})"
        if key.most is not None and value > key.most:
            return f"{name}={dump(value)} is more than any machine can do: at most {key.most:,} ({key.comment})"
    elif key.allowed and isinstance(value, tuple) and any(each not in key.allowed for each in value):
        return f"{name}={dump(value)} must be a list of {', '.join(key.allowed)}, or []"
    elif key.allowed and not isinstance(value, tuple) and value not in key.allowed:
        choices = ", ".join(choice or "(empty)" for choice in key.allowed)
        return f"{name}={value} is none of {choices}{value_hint(name, value)}"
    if key.example and not all(isinstance(text, str) and text for text in value):
        return f"{name}={dump(value)} must be a list of texts, such as {key.example}"
    if name == "run_name" and value and not _is_run_name(value):
        return (
            f"run_name={value!a} must be a name, or names with / between them, of printable characters and at "
            f"most {MAX_NAME} bytes each; a run writes nowhere but below base_output_directory"
        )
    if name == "base_output_directory" and not value.isprintable():
        return f"base_output_directory={value!a} must be a path of printable characters"
    if name == "mlp_activations" and not (value and all(activation in ACTIVATIONS for activation in value)):
        wrong = ", ".join(str(activation) for activation in value if activation not in ACTIVATIONS) or "an empty list"
        return f"mlp_activations: {wrong}; expected one or more of {', '.join(ACTIVATIONS)}"
    return ""


def _is_run_name(name: str) -> bool:
    parts = name.split("/")
    sizes = [len(os.fsencode(part)) for part in parts]
    return name.isprintable() and 0 < min(sizes) <= max(sizes) <= MAX_NAME and not {".", ".."} & set(parts)


def read_list(value: Any, noun: str, read: Callable[[Any], dict[str, Any]]) -> tuple[Any, ...]:
    """Returns the entries of a parsed list as `read` does; raises ValueError with all that is wrong, by number."""
    if not isinstance(value, list):
        return convert(value, ())
    entries, problems = [], []
    for number, entry in enumerate(value, start=1):
        try:
            entries.append(read(entry))
        except ValueError as error:
            problems.append(f"{noun} {number}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return frozen(entries)
