"""Finds the folders of runs and of Hugging Face models, and reads the configurations of runs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.config.schema import keys_of
from src.config.yaml import read_file
from src.system.errors import UserError, clipped, did_you_mean

CONFIG = "config.yml"
HUB = "hf://"  # prefix of a model's name on the Hugging Face hub

# Keys about the machines of one launch, and the changes that it accepts: each launch gives its own.
PER_LAUNCH_KEYS = ("coordinator_address", "num_processes", "process_id", "accept_changes")


def is_hf_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a Hugging Face model folder, complete or not, at `path`."""
    folder = Path(path).expanduser()
    return folder.is_dir() and ((folder / "config.json").is_file() or any(folder.glob("*.safetensors")))


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a Hugging Face model folder has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def run_folder(path: str) -> Path | None:
    """Returns the folder at `path` if it is a run's, with a config.yml; raises UserError if a store does not answer."""
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


def runs_in(folder: Path) -> Iterator[str]:
    """Yields the runs in a local folder, newest first."""
    configs = sorted(folder.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return (str(file.parent) for file in configs)


def similar_runs(path: Path) -> str:
    """Suggests a run in the same folder with a similar name (` Did you mean runs/first?`), or returns ""."""
    return did_you_mean(path.name, [Path(run).name for run in runs_in(path.parent)], f"{path.parent}/")


def run_keys(folder: Path) -> dict[str, Any]:
    """Reads every key of a run, to continue it; raises UserError if its config.yml cannot be read."""
    folder = folder if folder.name else folder.resolve()
    keys = {key: value for key, value in read_file(folder / CONFIG).items() if key not in PER_LAUNCH_KEYS}
    return keys | {"base_output_directory": os.fspath(folder.parent), "run_name": folder.name}


def model_keys(folder: Path) -> dict[str, Any]:
    """Reads the keys of a run's model and tokenizer, and its `model_name`; raises UserError as `run_keys` does."""
    keys = read_file(folder / CONFIG)
    if keys.get("position_type") == "learned" and keys.get("trainable_position_size") == "-1":
        keys["trainable_position_size"] = keys["max_target_length"]  # another command may use another length
    wanted = {*keys_of("model"), "model_name", "tokenizer_type", "tokenizer_path"}
    return {key: value for key, value in keys.items() if key in wanted}
