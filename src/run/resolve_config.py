"""Resolves command lines to configurations; they may name Hugging Face models."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from src.config import load as config_load
from src.config.hints import hints
from src.config.run_configs import HUB
from src.config.schema import Config
from src.config.usage import TRAIN, Usage, help_for
from src.system.errors import UserError, clipped, show
from src.system.storage_errors import Failure, failure_of
from src.system.version import title

HUB_KEYS = ("model_name", "load_parameters_path", "tokenizer_path")  # they may name a model on the hub


def read_folder(folder: str, tokenizer_only: bool) -> dict[str, Any] | None:
    """Reads the keys of the model and tokenizer in a Hugging Face folder, or in a model of the hub (hf://).

    Returns None for a local folder without a Hugging Face model. With `tokenizer_only`, reads only the tokenizer's
    keys; {} if there is no tokenizer. Raises as `folder_keys` does.
    """
    if not folder.startswith(HUB):
        from src.config.model_folders import has_tokenizer, is_hf_folder

        if tokenizer_only and not has_tokenizer(Path(folder).expanduser()):
            return {}
        if not (tokenizer_only or is_hf_folder(folder)):
            return None
    from src.extras.hf.named_models import folder_keys

    return folder_keys(folder, tokenizer_only)


def _pinned(config: Config) -> Config:
    """Pins models of the hub to commits; a resumed run keeps the commits that it began with."""
    rules = [rule["path"] for rule in config.checkpoint.load_weights_rules]
    if not any(path.startswith(HUB) for path in [*(config[key] for key in HUB_KEYS), *rules]):
        return config
    from src.extras.hf.named_models import pinned_keys

    return config.replace(**pinned_keys(config, HUB_KEYS))


def load(
    argv: Sequence[str] | ConfigDict, notes: list[str] | None = None, *, uses_weights: bool = False, command: str = ""
) -> Config:
    """Loads a configuration as `src.config.load.load` does, with models of the hub pinned to commits.

    Adds to `notes` a line for each environment variable with which MaxText sets a key; a UserError ends with them too.
    Raises UserError for a mistake in the command line or a file; for a failure that may pass, OSError of a disk, or
    TransientError of the hub.
    """
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
    except UserError as error:  # a key that the user misses may be in an unread variable
        raise UserError("\n".join([str(error), *unread])) from None


def of_command(argv: Sequence[str] | ConfigDict, usage: Usage = TRAIN) -> Config | None:
    """Loads a configuration without using JAX, and prints its notes; None for --help. Raises as `load` does."""
    if (text := help_for(argv, usage)) is not None:
        show(text)
        return None
    show(title())
    notes: list[str] = []
    config = load(argv, notes, command=usage.command)
    for note in notes:
        show(note)
    return config
