"""Checks each key's value, and the keys that describe a model against each other."""

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from src.config.attention_types import ATTENTION_TYPES
from src.config.hints import hints
from src.config.keys import Range, frozen
from src.config.requirements import OF_SCORES
from src.config.schema import KEYS, Config, Model
from src.config.yaml import MAX_NAME, convert, dump, too_long, unprintable

ACTIVATIONS = ("silu", "gelu", "gelu_exact", "quick_gelu", "relu", "squared_relu", "linear", "plus_one")


def check_value(name: str, value: Any) -> str:
    """Returns an error message if `value`, of the key's type, is invalid for the key, else ""."""
    key = KEYS[name]
    if isinstance(value, str) and not key.any_text and (problem := unprintable(value, is_name=True)):
        return f"{name}: {problem}"
    if key.is_path and "://" not in value and (problem := too_long(value)):
        return f"{name}={value} {problem}"
    if key.is_path and re.fullmatch("(?!file|hf)[a-z0-9]+://(/.*)?", value):  # asking a store would take minutes
        return f"{name}={value} names no bucket; an empty shell variable leaves such a path"
    if key.is_path and os.path.expanduser(value).startswith("~"):
        return f"{name}={value}: {value.partition('/')[0]} is not a user of this machine; for a folder, type ./{value}"
    if key.is_path and "://" not in value and Path(os.path.expanduser(value)).is_fifo() and value[:5] != "/dev/":
        return f"{name}={value} is a pipe: expected a file, or /dev/stdin"
    stores = ("gs", "s3") * (not key.is_local) + ("hf",) * (name in ("tokenizer_path", "load_parameters_path"))
    # Datasets may have any protocol: fsspec reads them, and reports protocols that it does not know.
    if key.is_path and "://" in value and value.partition("://")[0] not in stores and not name.endswith("dataset_path"):
        also = "".join(f", {store}://..." for store in stores)
        return f"{name}={value}: expected a path on this machine, or on a file system mounted on it{also}"
    if isinstance(key.allowed, Range):
        if not key.allowed.holds(value):
            return f"{name}={dump(value)} must be {key.allowed.words} ({key.comment})"
        if key.max is not None and value > key.max:
            return f"{name}={dump(value)} is more than any machine can do: at most {key.max:,} ({key.comment})"
    elif key.allowed and isinstance(value, tuple) and any(each not in key.allowed for each in value):
        return f"{name}={dump(value)} must be a list of {', '.join(key.allowed)}, or []"
    elif key.allowed and not isinstance(value, tuple) and value not in key.allowed:
        choices = ", ".join(choice or "(empty)" for choice in key.allowed)
        return f"{name}={value} is none of {choices}{hints().value_hint(name, value)}"
    if key.example and not all(isinstance(text, str) and text for text in value):
        return f"{name}={dump(value)} must be a list of texts, such as {key.example}"
    if name == "run_name" and value:
        parts = value.split("/")
        sizes = [len(os.fsencode(part)) for part in parts]
        if not value.isprintable() or {".", ".."} & set(parts) or not 0 < min(sizes) <= max(sizes) <= MAX_NAME:
            return (
                f"run_name={value!a} must be a name, or names with / between them, of printable characters and at "
                f"most {MAX_NAME} bytes each; a run only writes below base_output_directory"
            )
    if name == "base_output_directory" and not value.isprintable():
        return f"base_output_directory={value!a} must be a path of printable characters"
    if name == "mlp_activations" and not (value and all(activation in ACTIVATIONS for activation in value)):
        wrong = ", ".join(str(activation) for activation in value if activation not in ACTIVATIONS) or "an empty list"
        return f"mlp_activations: {wrong}; expected one or more of {', '.join(ACTIVATIONS)}"
    return ""


def read_list(value: Any, noun: str, read: Callable[[Any], dict[str, Any]]) -> tuple[Any, ...]:
    """Applies `read` to each entry of a parsed list; returns the results, made immutable.

    Raises ValueError if `value` is not a list, or with the problems of all entries, each after `noun` and its number.
    """
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


def check_layer(layer: Model) -> list[str]:
    """Lists the problems with the keys of one layer, or of all layers if they are alike."""
    return [problem for check in LAYER_CHECKS for problem in check(layer)]


def _heads(layer: Model) -> Iterator[str]:
    name, *divisors = ATTENTION_TYPES[layer.attention_type].heads
    heads = getattr(layer, name)
    for divisor in divisors:
        if heads % getattr(layer, divisor):
            yield f"{name}={heads} is not a multiple of {divisor}={getattr(layer, divisor)}"


def _attention(layer: Model) -> Iterator[str]:
    kind = layer.attention_type
    declared = ATTENTION_TYPES[kind]
    for key in declared.needs:
        if not getattr(layer, key):
            yield f"attention_type={kind} needs {key}"
    unread = () if declared.scores is None else [key for key in OF_SCORES if key not in declared.scores]
    for key in unread:
        value, default = getattr(layer, key), KEYS[key].default
        if value != default:
            yield f"attention_type={kind} has no {key}={dump(value)} (set {key}={dump(default)})"


def _rope(layer: Model) -> Iterator[str]:
    name = ATTENTION_TYPES[layer.attention_type].head_dim
    if not name:
        return
    size = getattr(layer, name)
    rotated = int(size * (1 if layer.rope_type == "proportional" else layer.partial_rotary_factor))
    if layer.position_type == "rope" and rotated % 2:
        part = "" if rotated == size else f" times partial_rotary_factor, {rotated},"
        yield f"position_type=rope rotates pairs: {name}={size}{part} must be even"
    for key in ("rope_short_factor", "rope_long_factor") if layer.rope_type == "longrope" else ():
        factors = getattr(layer, key)
        if len(factors) != rotated // 2 or not all(type(x) in (int, float) and 0 < x < math.inf for x in factors):
            yield f"rope_type=longrope needs {key}: a list of {rotated // 2} positive numbers, one for each pair"
    if layer.rope_type == "yarn" and layer.rope_max_timescale == 1:
        yield "rope_max_timescale=1 rotates all pairs alike, and rope_type=yarn tells pairs apart: set it to 2 or more"
    low, high = layer.rope_low_freq_factor, layer.rope_high_freq_factor
    if high < low and layer.rope_type == "llama3.1":
        yield f"rope_high_freq_factor={high} must be at least rope_low_freq_factor={low}"


def _experts(layer: Model) -> Iterator[str]:
    experts, groups, chosen_groups = layer.num_experts, layer.n_routing_groups, layer.topk_routing_group
    candidates = chosen_groups * (experts // groups)
    if experts == 1:
        return
    if experts % groups or chosen_groups > groups:
        yield (
            f"num_experts={experts} must be a multiple of n_routing_groups={groups}, of which "
            f"topk_routing_group={chosen_groups} are chosen"
        )
    elif layer.num_experts_per_tok > candidates:
        yield f"num_experts_per_tok={layer.num_experts_per_tok} is more than the {candidates} to choose from"
    elif layer.routing_group_score == "top2" and groups > 1 and experts // groups < 2:
        yield f"routing_group_score=top2 needs 2 experts per group: num_experts={experts}, n_routing_groups={groups}"


def check_positions(config: Config) -> Iterator[str]:
    """Checks learned and sinusoidal positions, which are added to embeddings; yields problems."""
    model, length = config.model, config.batch.max_target_length
    size = model.trainable_position_size
    if model.position_type == "learned" and -1 != size < length:
        yield f"trainable_position_size={size} is shorter than max_target_length={length}: it must cover all positions"
    elif model.position_type == "sinusoidal" and model.base_emb_dim % 2:
        yield "position_type=sinusoidal needs an even base_emb_dim"


LAYER_CHECKS = (_heads, _attention, _rope, _experts)
