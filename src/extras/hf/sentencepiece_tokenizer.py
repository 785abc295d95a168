"""Translates text to token ids and back with a SentencePiece model."""

import hashlib
from pathlib import Path

import numpy as np
import sentencepiece

from src.data.types import Fingerprint, Tokenizer
from src.system.errors import UserError


class SentencePieceTokenizer(Tokenizer):
    """Reads a SentencePiece model; if it has no bos, like T5's, documents begin with eos.

    Raises UserError if there is no such file, if it is not a SentencePiece model, or if it has no eos.
    """

    def __init__(self, path: str) -> None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(
                f"tokenizer_path={path}: there is no such file (python -m src.train_tokenizer trains a tokenizer)"
            )
        self.model = file.read_bytes()
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

    def piece_id(self, piece: str) -> int | None:
        """Returns the id of the model's piece with this spelling; None if there is none."""
        found = self._processor.piece_to_id(piece)
        return found if self._processor.id_to_piece(found) == piece else None

    def fingerprint(self) -> Fingerprint:
        return {"type": "sentencepiece", "vocab_size": self.vocab_size, "digest": self._digest}
