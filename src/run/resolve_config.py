"""Resolves command lines to configurations, Hugging Face models among what they may name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from src.config import load as config_load
from src.config.hints import hints
from src.config.schema import Config
from src.config.sources import CONFIG, HUB, has_tokenizer, is_hf_folder, run_folder
from src.config.usage import TRAIN, Usage, help_for
from src.config.yaml import parse_keys, read_file
from src.system.errors import UserError, clipped, show
from src.system.storage_errors import Failure, failure_of


def read_folder(folder: str, tokenizer_only: bool) -> dict[str, Any] | None:
    """Returns the keys of the model and tokenizer in a Hugging Face folder, or of its tokenizer; None: no model."""
    name = folder
    if name.startswith(HUB):
        from src.extras.hf.hub import local_folder

        folder = local_folder(name)
    if not (tokenizer_only or is_hf_folder(folder)):
        if name.startswith(HUB):
            raise UserError("this repository has no config.json")
        return None
    keys: dict[str, Any] = {}
    if not tokenizer_only:
        from src.extras.hf.model_keys import model_yaml, read_model_keys

        keys = parse_keys(model_yaml(read_model_keys(folder)), folder)
    if has_tokenizer(Path(folder).expanduser()):
        path = name if name.startswith(HUB) else str(Path(folder))
        keys |= {"tokenizer_type": "huggingface", "tokenizer_path": path}
    return keys


def _pinned(config: Config) -> Config:
    """Names a model of the hub by its commit; a resumed run keeps those that it began with."""
    keys, rules = ("model_name", "load_parameters_path", "tokenizer_path"), config.load_weights_rules
    if not any(path.startswith(HUB) for path in [*map(config.get, keys), *(rule["path"] for rule in rules)]):
        return config
    from src.extras.hf.hub import pinned

    run = run_folder(f"{config.base_output_directory}/{config.run_name}") if config.run_name else None
    saved = read_file(run / CONFIG) if run else {}
    saved_rules = [*(saved.get("load_weights_rules") or ()), *[{}] * len(rules)]
    paths = [pinned(rule["path"], str(was.get("path"))) for rule, was in zip(rules, saved_rules, strict=False)]
    return config.replace(
        load_weights_rules=[{**rule, "path": path} for rule, path in zip(rules, paths, strict=True)],
        **{key: pinned(config[key], str(saved.get(key))) for key in keys},
    )


def load(
    argv: Sequence[str] | ConfigDict, notes: list[str] | None = None, *, uses_weights: bool = False, command: str = ""
) -> Config:
    """Returns a command line's configuration, as `src.config.load.load`; raises UserError, OSError for a bad disk."""
    unread = hints().environment_notes(os.environ) if any(name.startswith("M_") for name in os.environ) else []
    if notes is not None:
        notes += unread
    try:
        config = config_load.load(argv, notes, uses_weights=uses_weights, command=command, read_folder=read_folder)
        return _pinned(config)
    except OSError as error:  # such as a folder that may not be read
        if failure_of(error) is Failure.TRANSIENT:
            raise
        raise UserError(f"cannot read {clipped(str(error.filename))}: {error.strerror}") from None
    except UserError as error:  # a key that is missed may be among those
        raise UserError("\n".join([str(error), *unread])) from None


def of_command(argv: Sequence[str] | ConfigDict, usage: Usage = TRAIN) -> Config | None:
    """Returns the configuration of a command that needs no JAX, and prints its notes; None for --help alone."""
    if (text := help_for(argv, usage)) is not None:
        show(text)
        return None
    notes: list[str] = []
    config = load(argv, notes, command=usage.command)
    for note in notes:
        show(note)
    return config
