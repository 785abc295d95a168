"""The models that Hugging Face folders describe, in keys of base.yml."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from src.config.model_checks import check_model
from src.config.values import check_value, scaled_sizes
from src.config.yaml import base, dump
from src.errors import UserError, first_few
from src.hf import config_json as cj
from src.hf.families import FAMILIES
from src.hf.family import Family, Json, Keys
from src.hf.folder import HfFolder, open_folder
from src.model.spec import layer_facts, model_spec, segments


def model_facts(path: str | os.PathLike[str]) -> Keys:
    """The keys of base.yml that describe the model in a folder.

    Raises:
        UserError: it is no model folder, or its model is of no family here, or uses what is not here.
    """
    return folder_facts(open_folder(path))


def folder_facts(folder: HfFolder) -> Keys:
    """As `model_facts`, of an opened folder."""
    family = folder_family(folder)
    try:
        keys = family.keys(text_config(folder))
        _check(keys)
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None
    if predicted := keys.get("mtp_num_layers"):
        # transformers leaves the extra layers out of what it saves, but not out of config.json.
        names = family.table_names(folder.tensors)
        first = keys["base_num_decoder_layers"]
        tensor = next(row.file for row in family.rows if row.weight == "mtp.projection")
        keys["mtp_num_layers"] = sum(
            tensor.replace("{layer}", str(first + index)) in names for index in range(predicted)
        )
    if "decoder_segments" in keys:
        keys["decoder_segments"] = _compressed(keys)
    return keys


def folder_family(folder: HfFolder) -> Family:
    """The family of a folder's text model.

    Raises:
        UserError: it is none of those here.
    """
    kind = text_config(folder).get("model_type")
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    known = first_few((family.model_type for family in FAMILIES), near=str(kind))
    raise UserError(f"{folder.path} holds a model of type {kind}, which is not supported; those that are: {known}")


def describe(config: Mapping[str, Any]) -> tuple[Family, Json]:
    """The first family that has the model of `config` (every key of base.yml), and the model's config.json.

    A family has it if config.json, read again, describes the same model.

    Raises:
        UserError: no family does.
    """
    wanted, layers = model_spec(config), _layer_keys(config)
    # What alters no logits is the run's own: it stands in no config.json.
    own = {key: config[key] for key in config if key not in base().keys_in("Model:") or key == "dropout_rate"}
    others: dict[str, tuple[Keys, str]] = {}  # as what each family's config.json would be read, and why else it is none
    for family in FAMILIES:
        hf = family.hf_config(layers)
        try:
            read = {**base().defaults, **family.keys(hf), **own}
        except UserError:
            continue
        unfit = _unfit(family, layers)
        if model_spec(read) == wanted and not unfit:
            return family, hf
        others[family.architecture] = (read, unfit or "weights that layers share (decoder_segments)")
    unsaid = {name: _unsaid(layers, _layer_keys(read)) or [rest] for name, (read, rest) in others.items()}
    nearest = min(unsaid, key=lambda name: len(unsaid[name]))
    raise UserError(
        f"no family of Hugging Face's has this model: of the nearest one, {nearest}, config.json cannot say "
        f"{', '.join(unsaid[nearest])}. A run keeps to a family if only keys outside of base.yml's model groups "
        "differ from its model file."
    )


def _unfit(family: Family, layers: Sequence[Mapping[str, Any]]) -> str:
    """Returns what transformers does not load, although the family's config.json can say it; empty: it loads all."""
    D, N = layers[0]["base_emb_dim"], layers[0]["base_num_query_heads"]
    if family.whole_heads and D % N:
        return f"base_num_query_heads={N}, which does not divide base_emb_dim={D}"
    if not family.has_dense_layers and any(layer["num_experts"] == 1 for layer in layers):
        return "num_experts=1"
    return ""


def _unsaid(layers: Sequence[Mapping[str, Any]], read: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys, with their values in `layers`, for which `read` has others, so that the model differs."""
    if len(layers) != len(read):
        return [f"base_num_decoder_layers={len(layers)}"]
    one_layer = {"decoder_segments": [], "base_num_decoder_layers": 1, "global_parameter_scale": 1}
    found: dict[str, Any] = {}
    for wanted, other in zip(layers, read, strict=True):
        spec = model_spec({**wanted, **one_layer})
        for key in base().keys_in("Model:"):
            if wanted[key] != other[key] and model_spec({**wanted, key: other[key], **one_layer}) != spec:
                found.setdefault(key, wanted[key])
    return [f"{key}={dump(value)}" for key, value in found.items()]


def _layer_keys(config: Mapping[str, Any]) -> list[Keys]:
    """The keys of each layer, with `global_parameter_scale` in the sizes."""
    return [
        {**keys, **{f"base_{name}": size for name, size in scaled_sizes(keys).items()}}
        for keys, _ in layer_facts(config)
    ]


def text_config(folder: HfFolder) -> Mapping[str, Any]:
    """config.json's part about the text model: all of it, where the model has no other parts.

    Whether the output projection is tied, the whole says, if it has that entry: to transformers a null there is false.
    """
    whole = folder.config
    text = cj.entry(whole, "text_config", {}) or whole
    return {**text, **{name: whole[name] for name in ("tie_word_embeddings",) if name in whole}}


def _check(keys: Keys) -> None:
    """Raises UserError where the keys are none that a model file may have."""
    layers = [facts for entry in keys.get("decoder_segments", []) for facts in entry["pattern"]]
    problems = [check_value(key, value) for facts in (keys, *layers) for key, value in facts.items()]
    if not any(problems):
        problems = check_model({**base().defaults, **keys})
    if problems := list(dict.fromkeys(filter(None, problems))):
        raise UserError("; ".join(problems))


def model_yaml(keys: Mapping[str, Any]) -> str:
    """The keys whose values are not base.yml's, as lines of YAML, a line for each layer of a pattern."""
    lines = []
    for key, value in keys.items():
        if value == base().defaults[key]:
            continue
        if key != "decoder_segments":
            lines.append(f"{key}: {dump(value)}")
            continue
        lines.append("decoder_segments:")
        for entry in value:
            lines += [f"  - repeats: {entry['repeats']}", "    pattern:"]
            lines += [f"      - {dump(facts)}" for facts in entry["pattern"]]
    return "\n".join([*lines, ""])


def _compressed(keys: Keys) -> list[dict[str, Any]]:
    """The decoder_segments of `keys`, of one layer each, as repeated patterns."""
    layers = [facts for entry in keys["decoder_segments"] for facts in entry["pattern"]]
    result, first = [], 0
    for segment in segments(model_spec({**base().defaults, **keys}).layers):
        period = len(segment.pattern)
        result.append({"repeats": segment.repeats, "pattern": layers[first : first + period]})
        first += period * segment.repeats
    return result
