"""Recognises the folders of Hugging Face models."""

import os
from pathlib import Path


def is_hf_folder(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is the folder of a Hugging Face model: it has a config.json or a .safetensors file."""
    folder = Path(path).expanduser()
    return folder.is_dir() and ((folder / "config.json").is_file() or any(folder.glob("*.safetensors")))


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a Hugging Face model folder has a tokenizer.json or tokenizer.model."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
