"""Converts the models of Hugging Face folders to keys of base.yml, and such keys to a family and config.json."""

import os
from dataclasses import replace
from typing import Any

from src.config.keys import frozen
from src.config.model_checks import check_value
from src.config.schema import KEYS, Model, keys_of
from src.config.segments import check_model
from src.config.step_keys import Numerics
from src.config.yaml import dump
from src.extras.hf.families import FAMILIES
from src.extras.hf.family import Family, Json, Keys, Layers, entry
from src.extras.hf.folder import HfFolder, open_folder
from src.extras.hf.sections import section_of
from src.model.spec import ModelSpec, group_layers, layer_models, model_spec
from src.system.errors import UserError, first_few


def read_model_keys(path: str | os.PathLike[str]) -> Keys:
    """Returns the keys of base.yml that describe a folder's model; raises as `open_folder` and `folder_model` do."""
    return folder_model(open_folder(path))[1]


def folder_model(folder: HfFolder) -> tuple[Family, Keys]:
    """Returns the family and the keys of a folder's text model; raises UserError if config.json is not supported."""
    whole = folder.config
    hf = entry(whole, "text_config", {}) or whole  # the whole config, unless the text model is one of several parts
    if "tie_word_embeddings" in whole:  # the outer entry decides; transformers treats null as false
        hf = {**hf, "tie_word_embeddings": whole["tie_word_embeddings"]}
    kind = str(hf.get("model_type"))
    families = {name: family for family in FAMILIES for name in (family.model_type, *family.other_model_types)}
    if (family := families.get(kind)) is None:
        nearest = min(FAMILIES, key=lambda family: len(family.differences(hf)))
        within = f" (the text_config of a {whole.get('model_type')})" if "text_config" in whole else ""
        entries = first_few(nearest.differences(hf)) or "no entry, so only their code differs"
        raise UserError(
            f"{folder.path} contains a model of type {kind}{within}, which no family here supports. The most similar "
            f"family is {nearest.model_type}; they differ in {entries}. docs/adding_a_family.md shows "
            f"how to add a family; these exist: {', '.join(families)}"
        )
    try:
        keys = family.read_config(hf)
        layers = [segment["pattern"][0] for segment in keys.get("decoder_segments", ())]
        problems = [check_value(key, value) for part in (keys, *layers) for key, value in part.items()]
        problems = list(filter(None, problems)) or list(check_model(section_of("model", keys)))
        if problems:
            raise UserError("; ".join(dict.fromkeys(problems)))
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None
    if keys.get("mtp_num_layers"):
        # transformers drops the extra layers when saving, but keeps their config.json entry.
        names, tensor = family.table_names(folder.tensors), family.file_name("mtp.projection")
        numbers = range(keys["base_num_decoder_layers"], keys["base_num_decoder_layers"] + keys["mtp_num_layers"])
        keys["mtp_num_layers"] = sum(tensor.replace("{layer}", str(number)) in names for number in numbers)
    if layers:
        segments, start = [], 0
        for group in group_layers(_spec(section_of("model", keys), 1).layers):
            period = len(group.pattern)
            segments.append({"repeats": group.repeats, "pattern": layers[start : start + period]})
            start += period * group.repeats
        keys["decoder_segments"] = segments
    return family, keys


def find_family(model: Model, max_target_length: int, preferred: str = "") -> tuple[Family, Json]:
    """Returns a family that can represent this model, and its config.json; raises UserError if there is none.

    `preferred` is the model_type of the family to try first.
    """
    spec, layers = _spec(model, max_target_length), _layers(model)
    others: list[tuple[Family, Model, str]] = []  # what each reads of its own config.json, and can't load
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        hf = family.write_config(layers, max_target_length)
        try:
            # The dropout rate belongs to the run, not to config.json.
            read = section_of("model", {**family.read_config(hf), "dropout_rate": model.dropout_rate})
        except UserError:
            continue
        unloadable = _unloadable(family, layers)
        if _spec(read, max_target_length) == spec and not unloadable:
            return family, hf
        others.append((family, read, unloadable))
    missing: dict[str, list[str]] = {}  # by family
    for family, read, unloadable in others:
        if any(segment.get("shared") for segment in model.decoder_segments):
            unloadable = "weights that layers share (decoder_segments)"
        differing = _differences(layers, _layers(read), max_target_length)
        missing[family.architecture] = differing or [
            unloadable or "this model, although it has an entry for each of its keys"
        ]
    closest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no Hugging Face family supports this model: the config.json of the nearest, {closest}, can't express "
        f"{', '.join(missing[closest])}. A run stays exportable if only keys outside of base.yml's model groups "
        "differ from its model file."
    )


def _unloadable(family: Family, layers: Layers) -> str:
    """Names the key for which transformers can't load such a model despite its config.json entry, else ""."""
    D, N = layers[0].base_emb_dim, layers[0].base_num_query_heads
    if family.whole_heads and D % N:
        return f"base_num_query_heads={N}, which does not divide base_emb_dim={D}"
    has_dense = any(row.weight == "layer.feed_forward.wi" and "E" not in row.dims.split() for row in family.tensors)
    if not has_dense and any(layer.num_experts == 1 for layer in layers):
        return "num_experts=1"
    return ""


def _differences(layers: Layers, read: Layers, max_target_length: int) -> list[str]:
    """Lists the keys, with their values in `layers`, whose values in `read` differ and change the model."""
    if len(layers) != len(read):
        return [f"base_num_decoder_layers={len(layers)}"]
    differing: dict[str, Any] = {}
    for layer, other in dict.fromkeys(zip(layers, read, strict=True)):
        spec = _spec(replace(layer, base_num_decoder_layers=1), max_target_length)
        for key in (key for key in keys_of("model") if getattr(layer, key) != getattr(other, key)):
            changed = replace(layer, **{key: getattr(other, key)}, base_num_decoder_layers=1)
            if _spec(changed, max_target_length) != spec:
                differing.setdefault(key, getattr(layer, key))
    return [f"{key}={dump(value)}" for key, value in differing.items()]


def _layers(model: Model) -> list[Model]:
    sizes = [key for key in keys_of("model") if key.startswith("base_")]
    whole = {"global_parameter_scale": 1, "decoder_segments": ()}
    return [
        replace(layer, **whole, **{key: getattr(layer, key.removeprefix("base_")) for key in sizes})
        for layer, _ in layer_models(model)
    ]


def _spec(model: Model, max_target_length: int) -> ModelSpec:
    """Builds the model's spec with default dtypes, because config.json's dtypes are ignored in comparing models."""
    return model_spec(model, Numerics(), max_target_length)


def model_yaml(keys: Json) -> str:
    """Formats as YAML the keys that differ from base.yml."""
    return "".join(f"{key}: {dump(value)}\n" for key, value in keys.items() if frozen(value) != KEYS[key].default)
