"""Counts the bytes of text that ids stand for, for bits per byte."""

import hashlib
import os

import numpy as np

from src.data.host_arrays import gather_json
from src.data.types import END, Document, Tokenizer


class TextBytes:
    """Tokenizes texts with the bytes of each id, and remembers which of them the tokenizer does not give back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._example = tokenizer, ""
        self._changed: set[str] = set()  # by digest: a text may be read again, and by several processes

    def document(self, text: str) -> Document:
        """Returns the text's ids with their `text_bytes`, which add up to those of the whole text.

        Of a character in several tokens the first one has the bytes, and what the tokenizer leaves out belongs to the
        token after it, or to the last one. A text of which it leaves nothing (SentencePiece, of spaces) has no bytes.
        """
        ids, ends = self._tokenizer.encode(text), np.maximum.accumulate(self._tokenizer.byte_ends(text))
        begin = 1 if len(ends) == len(ids) - 2 else len(self._tokenizer.encode_prompt(text)) - len(ends)
        of_text = slice(begin, begin + len(ends))
        ends[-1:] = len(text.encode())
        if self._tokenizer.decode_spelled(ids[of_text]) != text:
            self._changed.add(hashlib.sha256(text.encode()).hexdigest()[:16])
            self._example = text
        parts = [END] * begin, np.diff(ends, prepend=0), [END] * (len(ids) - of_text.stop)
        return Document(ids, text_bytes=np.concatenate(parts).astype(np.int32))

    def notes(self) -> list[str]:
        """Returns a line for the user where the tokenizer changes texts: their bytes are then not what it costs.

        It is of the texts of all processes, each of which calls this.
        """
        text, decoded = self._example, self._tokenizer.decode_spelled(self._tokenizer.encode_text(self._example))
        at = len(os.path.commonprefix([text, decoded]))  # noqa: RUF071  # characters are to be compared
        excerpts = [each[max(at - 10, 0) : at + 10] for each in (text, decoded)]
        changed = [each for each in gather_json([sorted(self._changed), excerpts]) if each[0]]
        if not changed:
            return []
        before, after = changed[0][1]
        count = len(set().union(*(texts for texts, _ in changed)))
        return [
            f"the tokenizer changes {count} of the texts, such as {before!r} to {after!r}: bits per byte count the "
            "bytes as they were, though nothing predicts what is lost"
        ]
