"""The models of Hugging Face folders in keys of base.yml, and the family and config.json of a model in such keys."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from src.config.keys import frozen
from src.config.model_checks import check_model
from src.config.schema import KEYS, defaults, keys_of, model_of
from src.config.step_keys import Numerics
from src.config.values import check_value
from src.config.yaml import dump
from src.errors import UserError, first_few
from src.hf.families import FAMILIES
from src.hf.family import Family
from src.hf.fields import Json, Keys, LayerKeys, entry
from src.hf.folder import HfFolder, open_folder
from src.model.spec import ModelSpec, group_layers, layer_models, model_spec


def read_model_keys(path: str | os.PathLike[str]) -> Keys:
    """Returns the keys of base.yml that describe the model in a folder.

    Raises:
        UserError: it is no model folder, or its model is of no family here, or uses what is not here.
    """
    return folder_keys(open_folder(path))


def folder_keys(folder: HfFolder) -> Keys:
    """Returns what `read_model_keys` does, of an opened folder."""
    family = folder_family(folder)
    try:
        keys = family.read_config(_text_config(folder))
        _check(keys)
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None
    if keys.get("mtp_num_layers"):
        # transformers leaves the extra layers out of what it saves, but not out of config.json.
        names, tensor = family.table_names(folder.tensors), family.file_name("mtp.projection")
        numbers = range(keys["base_num_decoder_layers"], keys["base_num_decoder_layers"] + keys["mtp_num_layers"])
        keys["mtp_num_layers"] = sum(tensor.replace("{layer}", str(number)) in names for number in numbers)
    if "decoder_segments" in keys:
        keys["decoder_segments"] = _with_repeats(keys)
    return keys


def folder_family(folder: HfFolder) -> Family:
    """Returns the family of a folder's text model; raises UserError where it is none of those here."""
    kind = _text_config(folder).get("model_type")
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    known = first_few((family.model_type for family in FAMILIES), near=str(kind))
    raise UserError(f"{folder.path} holds a model of type {kind}, which is not supported; those that are: {known}")


def find_family(config: Mapping[str, Any]) -> tuple[Family, Json]:
    """Returns the first family that has the model of `config` (every key of base.yml), and the model's config.json.

    A family has the model if reading its config.json gives the same one.

    Raises:
        UserError: no family has it.
    """
    spec, layers = _spec(config), _layer_keys(config)
    # Keys that alter no logits are the run's, and in no config.json.
    of_run = {key: config[key] for key in config if key not in keys_of("model") or key == "dropout_rate"}
    missing: dict[str, list[str]] = {}  # by family
    for family in FAMILIES:
        hf = family.write_config(layers)
        try:
            read = {**defaults(), **family.read_config(hf), **of_run}
        except UserError:
            continue
        unloadable = _unloadable(family, layers)
        if _spec(read) == spec and not unloadable:
            return family, hf
        rest = unloadable or "weights that layers share (decoder_segments)"
        missing[family.architecture] = _differences(layers, _layer_keys(read)) or [rest]
    closest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no family of Hugging Face's has this model: of the nearest one, {closest}, config.json cannot say "
        f"{', '.join(missing[closest])}. A run keeps to a family if only keys outside of base.yml's model groups "
        "differ from its model file."
    )


def _unloadable(family: Family, layers: LayerKeys) -> str:
    """Returns the key for which transformers loads no such model, although config.json has an entry for it, else ""."""
    D, N = layers[0]["base_emb_dim"], layers[0]["base_num_query_heads"]
    if family.whole_heads and D % N:
        return f"base_num_query_heads={N}, which does not divide base_emb_dim={D}"
    if not family.has_dense_layers and any(layer["num_experts"] == 1 for layer in layers):
        return "num_experts=1"
    return ""


def _differences(layers: LayerKeys, read: LayerKeys) -> list[str]:
    """Returns the keys, with their values in `layers`, that are others in `read` and make it another model."""
    if len(layers) != len(read):
        return [f"base_num_decoder_layers={len(layers)}"]
    one_layer = {"decoder_segments": [], "base_num_decoder_layers": 1, "global_parameter_scale": 1}
    differing: dict[str, Any] = {}
    for layer, other in zip(layers, read, strict=True):
        spec = _spec({**layer, **one_layer})
        for key in keys_of("model"):
            if layer[key] != other[key] and _spec({**layer, key: other[key], **one_layer}) != spec:
                differing.setdefault(key, layer[key])
    return [f"{key}={dump(value)}" for key, value in differing.items()]


def _layer_keys(config: Mapping[str, Any]) -> list[Keys]:
    """Returns the keys of each layer, with `global_parameter_scale` in the sizes."""
    sizes = [key for key in keys_of("model") if key.startswith("base_")]
    return [
        {**config, **vars(layer), **{key: getattr(layer, key.removeprefix("base_")) for key in sizes}}
        for layer, _ in layer_models(model_of(config))
    ]


def _spec(keys: Mapping[str, Any]) -> ModelSpec:
    """Returns the model of these keys in the default dtypes, which config.json does not tell apart."""
    return model_spec(model_of(keys), Numerics(), keys["max_target_length"])


def _text_config(folder: HfFolder) -> Mapping[str, Any]:
    """Returns config.json's part about the text model: all of it, where the model has no other parts."""
    whole = folder.config
    text = entry(whole, "text_config", {}) or whole
    # Of several parts the whole says whether the output projection is tied; to transformers a null there is false.
    return {**text, **{name: whole[name] for name in ("tie_word_embeddings",) if name in whole}}


def _check(keys: Keys) -> None:
    """Raises UserError unless a model file may have these keys."""
    problems = [check_value(key, value) for part in (keys, *_patterns(keys)) for key, value in part.items()]
    if not any(problems):
        problems = check_model({**defaults(), **keys})
    if problems := list(dict.fromkeys(filter(None, problems))):
        raise UserError("; ".join(problems))


def _patterns(keys: Keys) -> list[Keys]:
    return [layer for segment in keys.get("decoder_segments", ()) for layer in segment["pattern"]]


def model_yaml(keys: Mapping[str, Any]) -> str:
    """Returns YAML of the keys whose values are not base.yml's, with a line for each layer of a pattern."""
    lines = []
    for key, value in keys.items():
        if frozen(value) == KEYS[key].default:
            continue
        if key != "decoder_segments":
            lines.append(f"{key}: {dump(value)}")
            continue
        lines.append("decoder_segments:")
        for segment in value:
            lines += [f"  - repeats: {segment['repeats']}", "    pattern:"]
            lines += [f"      - {dump(layer)}" for layer in segment["pattern"]]
    return "\n".join([*lines, ""])


def _with_repeats(keys: Keys) -> Sequence[Mapping[str, Any]]:
    """Returns the decoder_segments of `keys`, of one layer each, as repeated patterns."""
    layers, result, start = _patterns(keys), [], 0
    for group in group_layers(_spec({**defaults(), **keys}).layers):
        period = len(group.pattern)
        result.append({"repeats": group.repeats, "pattern": layers[start : start + period]})
        start += period * group.repeats
    return result
