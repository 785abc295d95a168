"""Reads the keys of models that a configuration names: Hugging Face folders, and models of the hub (hf://)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.config.model_folders import has_tokenizer, is_hf_folder
from src.config.run_configs import CONFIG, HUB, run_folder
from src.config.yaml import parse_keys, read_file
from src.extras.hf.hub import local_folder, pinned
from src.extras.hf.model_keys import model_yaml, read_model_keys
from src.system.errors import UserError


def folder_keys(folder: str, tokenizer_only: bool) -> dict[str, Any]:
    """Returns the keys of the model and tokenizer in a Hugging Face folder, or in a model of the hub (hf://).

    With `tokenizer_only`, only the tokenizer's keys, which are left out if there is no tokenizer. Raises UserError if
    the folder has no model (unless `tokenizer_only`), and as `local_folder` and `read_model_keys` do.
    """
    name = folder
    if name.startswith(HUB):
        folder = local_folder(name)
    if not (tokenizer_only or is_hf_folder(folder)):
        raise UserError("there is no config.json")
    keys: dict[str, Any] = {}
    if not tokenizer_only:
        keys = parse_keys(model_yaml(read_model_keys(folder)), folder)
    if has_tokenizer(Path(folder).expanduser()):
        path = name if name.startswith(HUB) else str(Path(folder))
        keys |= {"tokenizer_type": "huggingface", "tokenizer_path": path}
    return keys


def pinned_keys(keys: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the keys `names` and `load_weights_rules`, with models of the hub `pinned` to commits.

    A resumed run keeps the commits that it began with. Raises as `pinned` does.
    """
    rules = keys["load_weights_rules"]
    run = run_folder(os.path.join(keys["base_output_directory"], keys["run_name"])) if keys["run_name"] else None
    saved = read_file(run / CONFIG) if run else {}
    saved_rules = [*(saved.get("load_weights_rules") or ()), *[{}] * len(rules)]
    paths = [pinned(rule["path"], str(was.get("path"))) for rule, was in zip(rules, saved_rules, strict=False)]
    return {
        "load_weights_rules": [{**rule, "path": path} for rule, path in zip(rules, paths, strict=True)],
        **{name: pinned(keys[name], str(saved.get(name))) for name in names},
    }
