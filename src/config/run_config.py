"""A run's folder as CONFIG and as model_name: what its own config.yml says of the run, and of its model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.config.schema import keys_of
from src.config.yaml import read_file
from src.errors import UserError, clipped

CONFIG = "config.yml"

# What a start of the run was told of its machines, and which changes it was to accept: another one says so itself.
OF_ONE_START = ("coordinator_address", "num_processes", "process_id", "accept_changes")


def run_folder(path: str) -> Path | None:
    """Returns the folder at `path`, on a disk or a store, if it is a run's, with a config.yml; else None.

    Raises UserError: the store gives no answer.
    """
    try:
        folder = Path(path).expanduser()
        if "://" in path:
            from etils import epath

            folder = epath.Path(path)
        return folder if (folder / CONFIG).is_file() else None
    except Exception as error:  # each store's client has its own types
        raise UserError(clipped(f"cannot look into {path}: {type(error).__name__}: {error}", 500)) from error


def runs_in(folder: Path) -> Iterator[str]:
    """Yields the runs whose folders lie in a local folder, the newest first."""
    configs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return (str(file.parent) for file in configs)


def run_keys(folder: Path) -> dict[str, Any]:
    """Returns every key of a run, to go on with it; raises UserError if its config.yml cannot be read."""
    folder = folder if folder.name else folder.resolve()
    keys = {key: value for key, value in read_file(folder / CONFIG).items() if key not in OF_ONE_START}
    return keys | {"base_output_directory": os.fspath(folder.parent), "run_name": folder.name}


def model_keys(folder: Path) -> dict[str, Any]:
    """Returns the keys of a run's model and tokenizer, and its `model_name`; raises UserError as `run_keys` does."""
    keys = read_file(folder / CONFIG)
    if keys.get("position_type") == "learned" and keys.get("trainable_position_size") == "-1":
        keys["trainable_position_size"] = keys["max_target_length"]  # which another command may have otherwise
    wanted = {*keys_of("model"), "model_name", "tokenizer_type", "tokenizer_path"}
    return {key: value for key, value in keys.items() if key in wanted}
