"""LoRA adapters in the format of the package `peft`: a folder of two files, for a Hugging Face model."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from src.config.model_folders import is_hf_folder
from src.config.run_configs import HUB
from src.extras.hf.family import Family, unknown_entries
from src.extras.hf.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from src.extras.hf.safetensors import Index, Tensor, open_tensors, write_header
from src.extras.hf.tensor_map import Shapes, WeightPath, lay_out
from src.system.errors import UserError, first_few
from src.system.json_text import read_object

_NAME = "base_model.model.{}.lora_{}.weight"  # tensor of a module's matrix A or B
_ONLY = {"peft_type": "LORA", "bias": "none"}
# Values of init_lora_weights with which adapters add to the model as it is stored. With others, such as pissa, olora
# and loftq, peft also changes the model's own weights, whenever it loads them.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
# Supported entries of adapter_config.json, and entries without effect once the adapters are trained. Any other is
# refused: DoRA, fully trained modules, repeated layers.
_READ = """
    base_model_name_or_path revision r lora_alpha alpha_pattern rank_pattern use_rslora
    fan_in_fan_out target_modules exclude_modules layers_to_transform layers_pattern task_type
    inference_mode lora_dropout auto_mapping peft_version init_lora_weights megatron_core
    loftq_config eva_config corda_config lora_ga_config runtime_config qalora_group_size
"""


def base_model(folder: Path) -> str:
    """Returns the path, or the hf:// name, of the model that a folder's adapters belong to.

    "" if the folder has no adapters, or a whole model. Raises UserError if the adapters do not name a model, or name a
    folder in another format, as adapters trained on a checkpoint of MinText do.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return ""
    entries = read_object(folder / ADAPTER_CONFIG)
    if not isinstance(base := entries.get("base_model_name_or_path"), str) or not base:
        raise UserError(f"{folder / ADAPTER_CONFIG} names no base_model_name_or_path: write the model's folder there")
    revision = f"@{entries['revision']}" if entries.get("revision") else ""
    if not (place := Path(base).expanduser()).is_dir():
        return base if base.startswith(HUB) else f"{HUB}{base}{revision}"
    if not is_hf_folder(place) or place.resolve() == folder.resolve():
        raise UserError(
            f"{folder / ADAPTER_CONFIG} has base_model_name_or_path={base}, which is not a Hugging Face model folder: "
            "write the folder, or the name on the hub, of the same model in that format there"
        )
    return base


def base_notes(base: str) -> list[str]:
    """Returns a line for the user if peft cannot load `base`, the model to which adapters belong; else []."""
    if base.startswith(HUB) or is_hf_folder(base):
        return []
    return [
        f"{ADAPTER_CONFIG} has base_model_name_or_path={base}, a checkpoint of MinText, which peft can't load: export "
        "it with convert to-hf, and write that folder there"
    ]


def adapted(folder: Path, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the model `base`, with a folder's adapters merged into them as they are read.

    Raises UserError for anything but plain LoRA, if the adapters' file is missing, or if they don't fit the model.
    """
    entries, file = read_object(folder / ADAPTER_CONFIG), folder / ADAPTER_WEIGHTS
    refused = [
        *unknown_entries(entries, {*_ONLY, *_READ.split()}),
        *(name for name in _ONLY if entries.get(name) not in (None, _ONLY[name])),
        *["init_lora_weights"] * (entries.get("init_lora_weights") not in _STARTS),
    ]
    if refused:
        listed = first_few(f"{name}={json.dumps(entries[name])}" for name in refused)
        raise UserError(
            f"{folder / ADAPTER_CONFIG} has {listed}: only plain LoRA is supported; merge the others with peft"
        )
    patterns = entries.get("alpha_pattern") or {}
    if not isinstance(entries.get("lora_alpha"), int | float):
        raise UserError(f"{folder / ADAPTER_CONFIG} has no number lora_alpha, which scales adapters: write it there")
    if not isinstance(patterns, dict) or not all(isinstance(alpha, int | float) for alpha in patterns.values()):
        raise UserError(
            f"{folder / ADAPTER_CONFIG} has alpha_pattern {json.dumps(patterns)}: expected names and numbers"
        )
    if not file.is_file():
        raise UserError(f"{folder} has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}: fetch the whole folder again")
    stored, merged = open_tensors(file), dict(base)
    for name in [name for name in stored if name.endswith(".base_layer.weight")]:  # peft's copy of an output projection
        merged[name.removeprefix("base_model.model.").replace(".base_layer", "")] = stored.pop(name)
    modules = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in stored}
    fan_in_first = bool(entries.get("fan_in_fan_out"))
    for module in sorted(modules):
        pair = [each for letter in "AB" if (each := stored.pop(_NAME.format(module, letter), None))]
        if len(pair) < 2 or (under := merged.get(f"{module}.weight")) is None:
            raise UserError(f"{file} does not fit {base_model(folder)}: the LoRA or the weight of {module} is missing")
        down, up = (each.read(tuple(slice(0, size) for size in each.shape)).astype(np.float32) for each in pair)
        rank = len(down)
        if under.shape[:: -1 if fan_in_first else 1] != (len(up), down.shape[1]):
            raise UserError(f"{file} does not fit {base_model(folder)}: its {module}.weight is {list(under.shape)}")
        fitting = (alpha for name, alpha in patterns.items() if re.match(rf"(.*\.)?({name})$", module))
        scale = next(fitting, entries["lora_alpha"]) / (rank**0.5 if entries.get("use_rslora") else rank)
        merged[f"{module}.weight"] = _merged(under, down, up, scale, fan_in_first)
    if stored:
        raise UserError(f"{file} has {first_few(stored)}: only plain LoRA is supported; merge it with peft")
    return merged


def _merged(base: Tensor, down: np.ndarray, up: np.ndarray, scale: float, fan_in_first: bool) -> Tensor:
    """Adds `scale` times `up` [out, r] times `down` [r, in], in float32, to a matrix [out, in], or [in, out]."""

    def read(index: Index) -> np.ndarray:
        rows, columns = index[::-1] if fan_in_first else index
        added = scale * (up[rows] @ down[:, columns])
        return (base.read(index).astype(np.float32) + (added.T if fan_in_first else added)).astype(base.dtype)

    return base._replace(read=read)


def save_adapters(
    folder: Path,
    family: Family,
    shapes: Shapes,
    vocab_size: int,
    adapters: Mapping[WeightPath, tuple[np.ndarray, np.ndarray]],
    lora: Mapping[str, Any],
) -> None:
    """Writes adapters, each weight's (down, up), into the existing `folder`, in the format of `peft`.

    `lora` has the rank, alpha and base from a checkpoint's meta. Raises UserError if a tensor of the Hugging Face model
    holds several weights, which have separate adapters here, if a weight has an adapter per expert, or as `lay_out`
    does.
    """
    pieces = lay_out(family.tensors, shapes, vocab_size, family.architecture)
    held = Counter(piece.file for piece in pieces)
    arrays: dict[str, np.ndarray] = {}
    fan_in_first = False
    for piece in (piece for piece in pieces if piece.weight in adapters):
        matrices = piece.low_rank(*adapters[piece.weight]) if held[piece.file] == 1 else None
        if matrices is None:
            raise UserError(
                f"{piece.file} can't have an adapter in peft's format: it contains several weights. Use to-hf"
            )
        module = piece.file.removesuffix(".weight")
        for letter, matrix in zip("AB", matrices[:2], strict=True):
            arrays[_NAME.format(module, letter)] = np.ascontiguousarray(matrix, np.float32)
        fan_in_first = matrices[2]
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in arrays}
    entries = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": lora["base"], "bias": "none"},
        **{"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": sorted(modules), "lora_dropout": 0.0},
        **{"fan_in_fan_out": fan_in_first, "inference_mode": True},
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    with open(folder / ADAPTER_WEIGHTS, "wb") as opened:
        write_header(opened, {name: (array.dtype, array.shape) for name, array in arrays.items()})
        for array in arrays.values():
            opened.write(array.reshape(-1).view(np.uint8))
