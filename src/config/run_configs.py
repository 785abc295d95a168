"""Finds the folders of runs, and reads their configurations."""

import os
from pathlib import Path
from typing import Any

from src.config.yaml import read_file
from src.system.errors import UserError, clipped

CONFIG = "config.yml"
HUB = "hf://"  # prefix of a model's name on the Hugging Face hub

# Keys about the machines of one launch, and the changes that it accepts: each launch gives its own.
PER_LAUNCH_KEYS = ("coordinator_address", "num_processes", "process_id", "accept_changes")


def run_folder(path: str) -> Path | None:
    """Returns the folder at `path` if it has a config.yml, else None; raises UserError if it cannot be looked up."""
    if path.startswith("hf://"):  # a model of the hub
        return None
    try:
        folder: Any = Path(path).expanduser()
        if "://" in path:
            from etils import epath

            folder = epath.Path(path)
        return folder if (folder / CONFIG).is_file() else None
    except Exception as error:  # each store's client raises its own types
        reason = f"{error.args[0]} is not read" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(clipped(f"cannot look into {path}: {reason}", 500)) from error


def run_keys(folder: Path) -> dict[str, Any]:
    """Reads the keys of a run, to continue it; raises UserError if its config.yml cannot be read.

    PER_LAUNCH_KEYS are left out; base_output_directory and run_name name this folder, which may have been moved.
    """
    folder = folder.resolve() if folder.name in ("", "..") else folder
    keys = {key: value for key, value in read_file(folder / CONFIG).items() if key not in PER_LAUNCH_KEYS}
    return keys | {"base_output_directory": os.fspath(folder.parent), "run_name": folder.name}
