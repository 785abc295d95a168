"""A Hugging Face model folder: its config.json and the tensors of its safetensors files."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from src.extras.hf import peft
from src.extras.hf.hub import INDEX, SINGLE, local_folder
from src.extras.hf.safetensors import Tensor, dequantized, open_tensors
from src.system.errors import UserError, first_few
from src.system.json_text import read_object


class HfFolder(NamedTuple):
    """A model folder's config.json and its tensors by name."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_folder(path: str | os.PathLike[str]) -> HfFolder:
    """Reads the folder's config and the headers of its weight files; a folder of adapters gives the adapted model.

    Raises UserError if config.json or safetensors files are missing, if a file is truncated or damaged, or if the
    weights are quantized in an unsupported format; for adapters, also as `local_folder` and `peft.adapted` do.
    """
    path = Path(path).expanduser()
    if base := peft.base_model(path):
        whole = open_folder(local_folder(base))
        return whole._replace(path=path, tensors=peft.adapted(path, whole.tensors))
    if not (file := path / "config.json").is_file():
        raise UserError(
            f"there is no {file}: expected a Hugging Face model folder, with config.json and model*.safetensors"
        )
    config = read_object(file)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    stored: dict[str, Tensor] = {}
    file_of, files = _weight_files(path)
    for name in files:
        tensors = open_tensors(path / name)
        for tensor in tensors:
            if file_of.setdefault(tensor, name) != name:
                raise UserError(
                    f"{path / name} has the tensor {tensor}, but it is also in {file_of[tensor]}, or {INDEX} places it "
                    "there: fetch the whole folder again"
                )
        stored.update(tensors)
    stored_as = next(filter(None, (part.get("quantization_config") for part in (config, text))), {})
    return HfFolder(path, config, dequantized(stored, stored_as, path))


def _weight_files(path: Path) -> tuple[dict[str, str], list[str]]:
    index = path / INDEX
    if index.exists():
        file_of = read_object(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(f'{index} has no "weight_map", which maps tensors to files')
        for tensor, name in file_of.items():
            if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise UserError(f"{index} places {tensor} in {name}: expected the name of a file in the folder")
        files = sorted(set(file_of.values()))
        if SINGLE not in files and (path / SINGLE).is_file():
            # transformers reads this file, and leaves the index there when it replaces an earlier model's files.
            return {}, [SINGLE]
        if missing := [name for name in files if not os.path.isfile(path / name)]:
            raise UserError(f"{path} lacks {first_few(missing)}, which its {INDEX} names: fetch the whole folder")
        return file_of, files
    if (path / SINGLE).is_file():
        return {}, [SINGLE]
    expected = f"expected {SINGLE}, or {INDEX} and the files it names"
    if pickled := sorted(file.name for file in path.glob("*.bin")):
        how = "transformers' save_pretrained(..., safe_serialization=True) writes them"
        raise UserError(f"{path} has only {first_few(pickled)}, pickled by PyTorch: {expected}; {how}")
    raise UserError(f"{path} has neither: {expected}")
