"""Translates text to token ids and back: bytes, and SentencePiece models. Opens the tokenizer of a config."""

import hashlib
from pathlib import Path

import numpy as np

from src.config.schema import Data
from src.config.source_spec import all_synthetic
from src.data.types import Fingerprint, Tokenizer
from src.system.errors import UserError


class ByteTokenizer(Tokenizer):
    """Takes the bytes of UTF-8 as ids 0 to 255; bos is 256, eos 257."""

    vocab_size = 258
    bos = 256
    eos = 257
    stop_ids = frozenset({257})

    def encode(self, text: str) -> np.ndarray:
        data = np.frombuffer(text.encode(), np.uint8)
        ids = np.empty(len(data) + 2, np.int32)
        ids[0], ids[1:-1], ids[-1] = self.bos, data, self.eos
        return ids

    def byte_ends(self, text: str) -> np.ndarray:
        return np.arange(1, len(text.encode()) + 1)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def fingerprint(self) -> Fingerprint:
        return {"type": "byte", "vocab_size": self.vocab_size}


class SentencePieceTokenizer(Tokenizer):
    """Reads a SentencePiece model; one without bos, such as T5's, begins with eos. Raises UserError if it is unfit."""

    def __init__(self, path: str) -> None:
        import sentencepiece  # only runs that use it pay for the import

        if not Path(path).is_file():
            raise UserError(
                f"tokenizer_path={path}: there is no such file (python -m src.train_tokenizer trains a tokenizer)"
            )
        self.model = Path(path).read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except RuntimeError:
            raise UserError(f"tokenizer_path={path} is not a SentencePiece model") from None
        self.vocab_size: int = self._processor.vocab_size()
        self.eos: int = self._processor.eos_id()
        if self.eos < 0:
            raise UserError(f"tokenizer_path={path}: the model has no eos token, so documents can't be told apart")
        self.bos: int = self._processor.bos_id() if self._processor.bos_id() >= 0 else self.eos
        self.stop_ids = frozenset({self.eos})
        self._digest = hashlib.sha256(self.model).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        return np.array([self.bos, *self._processor.encode(text), self.eos], np.int32)

    def byte_ends(self, text: str) -> np.ndarray:
        spans = self._processor.encode(text, return_type="offset_mapping", return_bytes=True)["offsets"]
        return np.array(spans, np.int64).reshape(-1, 2)[:, 1]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return self._processor.decode(ids[ids < self.vocab_size].tolist())

    def fingerprint(self) -> Fingerprint:
        return {"type": "sentencepiece", "vocab_size": self.vocab_size, "digest": self._digest}


def make_tokenizer(data: Data, vocab_size: int, needed_by: str = "") -> Tokenizer | None:
    """Opens the keys' tokenizer, None for synthetic data, unless a thing needs one.

    Raises UserError if there is none for that, or it is unfit or exceeds `vocab_size`.
    """
    if all_synthetic(data):
        if needed_by:
            raise UserError(f"{needed_by}: it needs a tokenizer, which dataset_type=synthetic lacks: dataset_type=text")
        return None
    match data.tokenizer_type:
        case "byte":
            tokenizer = ByteTokenizer()
        case "sentencepiece":
            tokenizer = SentencePieceTokenizer(data.tokenizer_path)
        case _:
            from src.extras.hf.hub import local_folder

            folder = local_folder(data.tokenizer_path, weights=False)
            tokenizer = folder_tokenizer(Path(folder).expanduser(), vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} is less than the {tokenizer.vocab_size} ids of the "
            f"{data.tokenizer_type} tokenizer: set vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Says whether a Hugging Face model folder has a tokenizer that `folder_tokenizer` reads."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def folder_tokenizer(path: Path, model_vocab_size: int) -> Tokenizer:
    """Opens a Hugging Face folder's tokenizer (old: a SentencePiece model) or tokenizer.json, or raises UserError."""
    from src.extras.hf.huggingface_tokenizer import HuggingFaceTokenizer  # only runs that use it pay for its imports

    for file in (path / "tokenizer.json", path):
        if file.is_file():
            return HuggingFaceTokenizer(file, model_vocab_size)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(str(path / "tokenizer.model"))
    if path.is_dir():
        raise UserError(f"tokenizer_path={path} has neither tokenizer.json nor tokenizer.model: expected one of them")
    raise UserError(
        f"tokenizer_path={path}: there is no such file or folder. tokenizer_type=huggingface reads a tokenizer.json, "
        "or a model's folder with one in it, once it is downloaded"
    )
