"""Opens the tokenizer of a config, and defines the byte tokenizer."""

import numpy as np

from src.config.dataset_spec import all_synthetic
from src.config.schema import Data
from src.data.types import Fingerprint, Tokenizer
from src.system.errors import UserError


class ByteTokenizer(Tokenizer):
    """Uses the bytes of UTF-8 as ids 0 to 255; bos is 256, eos 257."""

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


def make_tokenizer(data: Data, vocab_size: int, needed_by: str = "") -> Tokenizer | None:
    """Opens the config's tokenizer; None for synthetic data.

    Raises UserError if the data are synthetic but `needed_by` names a use of the tokenizer, or if the tokenizer is
    unusable or has more ids than `vocab_size`; TransientError if it is on the hub, which does not answer.
    """
    if all_synthetic(data):
        if needed_by:
            raise UserError(
                f"{needed_by}: dataset_type=synthetic lacks the tokenizer that it needs: set dataset_type=text"
            )
        return None
    match data.tokenizer_type:
        case "byte":
            tokenizer = ByteTokenizer()
        case "sentencepiece":
            from src.extras.hf.sentencepiece_tokenizer import SentencePieceTokenizer

            tokenizer = SentencePieceTokenizer(data.tokenizer_path)
        case _:
            from src.extras.hf.folder_tokenizer import open_tokenizer

            tokenizer = open_tokenizer(data.tokenizer_path, vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} is less than the {tokenizer.vocab_size} ids of the "
            f"{data.tokenizer_type} tokenizer: set vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer
