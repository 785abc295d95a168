"""Opens the tokenizer in a Hugging Face model folder, in either of its formats."""

from pathlib import Path

from src.data.types import Tokenizer
from src.extras.hf.hub import local_folder
from src.system.errors import UserError


def open_tokenizer(path: str, model_vocab_size: int) -> Tokenizer:
    """Opens the tokenizer of a folder, a file, or an hf:// name; raises as `local_folder` and `folder_tokenizer` do."""
    return folder_tokenizer(Path(local_folder(path, weights=False)).expanduser(), model_vocab_size)


def folder_tokenizer(path: Path, model_vocab_size: int) -> Tokenizer:
    """Opens a tokenizer.json, or a folder with a tokenizer.json or else a SentencePiece tokenizer.model.

    `model_vocab_size` is as in `HuggingFaceTokenizer`. Raises UserError if there is no such file, or as
    that class and `SentencePieceTokenizer` do.
    """
    from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer  # needs the package tokenizers

    for file in (path / "tokenizer.json", path):
        if file.is_file():
            return HuggingFaceTokenizer(file, model_vocab_size)
    if (path / "tokenizer.model").is_file():
        from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(str(path / "tokenizer.model"))
    if path.is_dir():
        raise UserError(f"tokenizer_path={path} has neither tokenizer.json nor tokenizer.model: expected one of them")
    raise UserError(
        f"tokenizer_path={path}: there is no such file or folder. tokenizer_type=huggingface reads a tokenizer.json, "
        "or a model's folder with one in it, once it is downloaded"
    )
