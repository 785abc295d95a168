"""Reads `decoder_segments`, converts its settings to their types, checks them, and lists the described layers."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from src.config.keys import frozen
from src.config.model_checks import check_layer, check_value
from src.config.schema import KEYS, Model
from src.config.yaml import Plain, convert, dump
from src.system.errors import did_you_mean, first_few


def check_model(model: Model) -> list[str]:
    """Lists the problems with the keys that describe a model, taken together."""
    return [*check_layer(model), *(check_segments(model) if model.decoder_segments else ())]


def check_segments(model: Model) -> Iterator[str]:
    """Checks that the segments add up to the model's layers, and checks each layer of a pattern; yields problems."""
    segments, layers = model.decoder_segments, model.num_decoder_layers
    fixed = sum(entry["repeats"] * len(entry["pattern"]) for entry in segments if entry["repeats"] != -1)
    open_ended = [len(entry["pattern"]) for entry in segments if entry["repeats"] == -1]
    rest = layers - fixed
    if len(open_ended) > 1:
        yield "decoder_segments: only one segment may have repeats: -1, which takes the rest of the layers"
    elif open_ended and (rest <= 0 or rest % open_ended[0]):
        yield (
            f"decoder_segments: {rest} of {layers} layers are left for the segment with repeats: -1, whose pattern has "
            f"{open_ended[0]}; change repeats or base_num_decoder_layers"
        )
    elif not open_ended and rest:
        yield (
            f"decoder_segments describe {fixed} layers, the model has {layers}; "
            "change repeats (-1: the rest) or base_num_decoder_layers"
        )
    for number, entry in enumerate(segments, start=1):
        for keys in entry["pattern"]:
            layer = copy.copy(model)  # not `replace`, which reads keys that are missing because they are invalid
            vars(layer).update(keys)
            for problem in check_layer(layer):
                yield f"decoder_segments, segment {number}: {problem}"


def expanded(model: Model) -> list[tuple[Model, str]]:
    """Lists the layers in order: the settings of each, and the name of the weights that it shares ("": none)."""
    segments, count = model.decoder_segments, model.num_decoder_layers
    counted = sum(max(entry.get("repeats", 1), 0) * len(entry["pattern"]) for entry in segments)
    layers: list[tuple[Model, str]] = []
    for index, entry in enumerate(segments):
        repeats, shared = entry.get("repeats", 1), entry.get("shared", False)
        if repeats == -1:
            repeats = (count - counted) // len(entry["pattern"])
        pattern = [
            (dataclasses.replace(model, **frozen(keys)), f"{index}.{position}" if shared else "")
            for position, keys in enumerate(entry["pattern"])
        ]
        layers += repeats * pattern
    assert len(layers) == count, "config.load checks that decoder_segments add up"
    return layers


def read_segment(entry: Any) -> dict[str, Any]:
    """Adds defaults to an entry of a parsed `decoder_segments`, and converts it; raises ValueError if it is invalid."""
    if not isinstance(entry, dict) or set(entry) - {"repeats", "shared", "pattern"} or not entry.get("pattern"):
        raise ValueError(f"expected {{repeats: n, shared: true or false, pattern: [...]}}, got {dump(entry)}")
    repeats = convert(entry.get("repeats", Plain("1")), 1, "repeats")
    if repeats < 1 and repeats != -1:
        raise ValueError(f"repeats={repeats} must be 1 or more, or -1 (the rest of the layers)")
    shared = convert(entry.get("shared", Plain("false")), False, "shared")
    if not isinstance(entry["pattern"], list) or not all(isinstance(facts, dict) for facts in entry["pattern"]):
        raise ValueError("pattern must be a list of layers, each {key: value, ...}; {} has the model's own values")
    return {"repeats": repeats, "shared": shared, "pattern": list(map(_layer_facts, entry["pattern"]))}


def _layer_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    typed = {}
    for key, value in facts.items():
        if key not in KEYS or not KEYS[key].per_layer:
            per_layer = [other.name for other in KEYS.values() if other.per_layer]
            hint = did_you_mean(key, per_layer) or f" Keys that may: {first_few(per_layer, near=key)}."
            raise ValueError(f"{key} cannot differ by layer.{hint}")
        typed[key] = convert(value, KEYS[key].default, key)
        if key == "position_type" and typed[key] not in ("rope", "none"):
            raise ValueError(f"position_type={typed[key]} cannot differ by layer, only rope or none")
        if problem := check_value(key, typed[key]):
            raise ValueError(problem)
    return typed
