"""Resolves command lines to configurations, Hugging Face models among what they may name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from src.config import load as config_load
from src.config.base_yml import TRAIN, Usage, help_for
from src.config.schema import Config
from src.config.yaml import parse_keys
from src.errors import UserError, clipped
from src.storage_errors import Failure, failure_of


class HuggingFaceFolders:
    """Reads Hugging Face models; what can is imported when a folder is named."""

    def model_keys(self, folder: str) -> dict[str, Any] | None:
        """Returns the keys of the model and its tokenizer in a folder; None if it is no Hugging Face model's."""
        from src.hf.folder import is_hf_folder

        if not is_hf_folder(folder):
            return None
        from src.hf.model_keys import model_yaml, read_model_keys

        return parse_keys(model_yaml(read_model_keys(folder)), folder) | self.tokenizer_keys(Path(folder))

    def tokenizer_keys(self, folder: Path) -> dict[str, str]:
        """Returns the keys that name a folder's tokenizer; none where it has none."""
        from src.data.tokenizer import has_tokenizer

        if not has_tokenizer(folder.expanduser()):
            return {}
        return {"tokenizer_type": "huggingface", "tokenizer_path": str(folder)}


def load(argv: Sequence[str] | ConfigDict, notes: list[str] | None = None, *, uses_weights: bool = False) -> Config:
    """Returns the configuration of a command line, as `src.config.load.load` does.

    Raises UserError: everything that is wrong, in one message. Raises OSError: a disk failed, maybe for a time.
    """
    try:
        return config_load.load(argv, notes, uses_weights=uses_weights, folders=HuggingFaceFolders())
    except OSError as error:  # such as a folder that may not be read
        if failure_of(error) is Failure.TRANSIENT:
            raise
        raise UserError(f"cannot read {clipped(str(error.filename))}: {error.strerror}") from None


def of_command(argv: Sequence[str] | ConfigDict, usage: Usage = TRAIN) -> Config | None:
    """Returns the configuration of a command that needs no JAX and prints its notes; None if it only asked for help.

    Raises UserError: a mistake in the command line.
    """
    if (text := help_for(argv, usage)) is not None:
        print(text)
        return None
    notes: list[str] = []
    config = load(argv, notes)
    print("".join(f"{note}\n" for note in notes), end="")
    return config
