"""Opens the tokenizer in a Hugging Face model folder, in either of its formats."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data.types import Tokenizer
from src.extras.hf.hub import local_folder
from src.system.errors import UserError, first_few
from src.system.json_text import read_object

if TYPE_CHECKING:
    from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer  # needs the package sentencepiece


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

        tokenizer = SentencePieceTokenizer(str(path / "tokenizer.model"))
        tokenizer.caveat = _unread(path, tokenizer)
        return tokenizer
    if path.is_dir():
        raise UserError(f"tokenizer_path={path} has neither tokenizer.json nor tokenizer.model: expected one of them")
    raise UserError(
        f"tokenizer_path={path}: there is no such file or folder. tokenizer_type=huggingface reads a tokenizer.json, "
        "or a model's folder with one in it, once it is downloaded"
    )


def _unread(folder: Path, tokenizer: "SentencePieceTokenizer") -> str:
    """Warns, in a clause, of tokens and a template that only the files beside a tokenizer.model have; else ""."""
    settings, special, added = (
        _entries(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    decoder, eos = settings.get("added_tokens_decoder"), settings.get("eos_token") or special.get("eos_token")
    listed = [*added, *(decoder.values() if isinstance(decoder, dict) else ()), eos]
    texts = [each.get("content") if isinstance(each, dict) else each for each in listed]
    ids = {text: tokenizer.piece_id(text) for text in texts if isinstance(text, str)}
    lacking = [text for text, found in ids.items() if found is None]
    unread = [f"added tokens ({first_few(lacking)})"] * bool(lacking)
    if isinstance(texts[-1], str) and ids[texts[-1]] not in (None, tokenizer.eos):
        unread.append(f"eos_token {texts[-1]}")
    if settings.get("chat_template") or (folder / "chat_template.jinja").is_file():
        unread.append("chat template")
    return f"only tokenizer.model is read: no {', nor '.join(unread)} of the files beside it" if unread else ""


def _entries(file: Path) -> dict[str, Any]:
    with contextlib.suppress(UserError, FileNotFoundError):
        return read_object(file)
    return {}
