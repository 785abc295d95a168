"""Counts the bytes of text that ids stand for, for bits per byte."""

import numpy as np

from src.data.types import END, Document, Tokenizer


class TextBytes:
    """Tokenizes texts with the bytes of each id, and remembers which of them the tokenizer does not give back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._changed, self._example = tokenizer, set(), ""  # by hash: a text may be read again

    def document(self, text: str) -> Document:
        """Returns the text's ids with their `text_bytes`, which add up to those of the whole text.

        Of a character in several tokens the first one has the bytes, and what the tokenizer leaves out belongs to the
        token after it, or to the last one.
        """
        ids, ends = self._tokenizer.encode(text), np.maximum.accumulate(self._tokenizer.byte_ends(text))
        assert len(ends) == len(ids) - 2, "byte_ends tokenizes as encode does"
        ends[-1:] = len(text.encode())
        if self._tokenizer.decode(ids) != text:
            self._changed.add(hash(text))
            self._example = text
        return Document(ids, text_bytes=np.concatenate([[END], np.diff(ends, prepend=0), [END]]).astype(np.int32))

    def notes(self) -> list[str]:
        """Returns a line for the user where the tokenizer changes texts: their bytes are then not what it costs."""
        if not self._changed:
            return []
        given = self._tokenizer.decode(self._tokenizer.encode(self._example))
        pairs = enumerate(zip(self._example, given, strict=False))
        at = next((index for index, (a, b) in pairs if a != b), min(len(self._example), len(given)))
        before, after = (text[max(at - 10, 0) : at + 10] for text in (self._example, given))
        return [
            f"the tokenizer changes {len(self._changed)} of the texts, such as {before!r} to {after!r}: bits per byte "
            "count the bytes as they were, though nothing predicts what is lost"
        ]
