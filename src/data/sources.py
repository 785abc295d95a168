"""Where documents come from: numbered texts, or conversations, that can be read in any order.

A long text is cut into pieces, so that none owns a row of the batch for thousands of steps. Everything after this
module takes a piece for a document. A conversation is always one piece.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from src.data import order, text_files
from src.data.conversations import Conversation, ConversationSource
from src.errors import UserError

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

Fingerprint = dict[str, str | int]


class Source(Protocol):
    """Texts or conversations numbered from 0, read in any order."""

    def __len__(self) -> int:
        """How many pieces there are."""

    def __getitem__(self, i: int) -> str | Conversation:
        """Piece `i`; a text may be empty."""

    def document_keys(self) -> np.ndarray:
        """uint64 [pieces]: a hash that the pieces of one document share."""

    def fingerprint(self) -> Fingerprint:
        """What makes two sources give the same texts; the same wherever the data lie."""


class TextSource:
    """Text files, each a document, and .jsonl files, each line of which is a JSON object with the document in "text".

    Files are taken in the order of their names. The first piece of every file is read at once, so that an unfit file
    is an error at the start; a later one is an error when it is reached.

    Args:
        path: a file, a folder (its files at any depth, but for hidden ones) or a glob. Empty: the source code of the
            running Python's standard library.
        max_document_bytes: longer documents are cut into pieces, each a document of its own from there on.
        key: the config key that gave `path`, for messages.

    Raises:
        UserError: nothing there, no document in it, or a file that is not text.
    """

    def __init__(self, path: str, max_document_bytes: int, key: str = "dataset_path") -> None:
        self._max_bytes = max_document_bytes
        self._files = text_files.DocumentFiles(path, key)
        pieces = text_files.count_pieces(np.diff(self._files.extent)[:, 0], max_document_bytes)
        self._first_piece = np.cumsum(pieces) - pieces
        self._pieces = int(pieces.sum())
        for document in np.unique(self._files.file, return_index=True)[1]:
            self[int(self._first_piece[document])]

    def __len__(self) -> int:
        """How many pieces there are."""
        return self._pieces

    def __getitem__(self, i: int) -> str:
        """The text of piece `i`; may be empty, as the length of a text in JSON is not known before it is read."""
        document = int(np.searchsorted(self._first_piece, i, side="right")) - 1
        path, start, stop = self._files.locate(document)
        return text_files.read_piece(path, start, stop, i - int(self._first_piece[document]), self._max_bytes)

    def document_keys(self) -> np.ndarray:
        """uint64 [pieces]: a hash of file name and place in the file, which other files don't change."""
        return np.repeat(self._files.keys(), np.diff(self._first_piece, append=self._pieces))

    def fingerprint(self) -> Fingerprint:
        """Counts, and a digest of the files' names and sizes: what is inside the files is not read for it."""
        own = {"type": "text", "pieces": self._pieces, "max_document_bytes": self._max_bytes}
        return {**self._files.fingerprint(), **own}


class Part:
    """Some pieces of another source.

    Args:
        source: the whole.
        pieces: int64, the numbers of its pieces that belong to the part.
        name: tells the part from the source's other parts.
    """

    def __init__(self, source: Source, pieces: np.ndarray, name: str) -> None:
        self._source = source
        self._indices = pieces
        self._name = name

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._indices)

    def __getitem__(self, i: int) -> str | Conversation:
        """Piece `i` of the part."""
        return self._source[int(self._indices[i])]

    def document_keys(self) -> np.ndarray:
        """uint64 [pieces]: the source's keys."""
        return self._source.document_keys()[self._indices]

    def fingerprint(self) -> Fingerprint:
        """The source's, and which part it is."""
        return {**self._source.fingerprint(), "part": self._name}


class SyntheticSource:
    """Random tokens without text: document n is a pure function of (seed, n) and fills exactly one row.

    Args:
        vocab_size: V; ids are in [0, V).
        length: T; a document has T + 1 ids.
        seed: of the hash.
    """

    def __init__(self, vocab_size: int, length: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._places = np.arange(length + 1, dtype=np.uint64)

    def ids(self, n: int) -> np.ndarray:
        """The int32 [T + 1] ids of document `n`."""
        start = order.mix64(order.keys("synthetic", self._seed)[0] ^ n)
        return (order.mix64(self._places + np.uint64(start)) % np.uint64(self._vocab_size)).astype(np.int32)

    def fingerprint(self) -> Fingerprint:
        """What makes two of them give the same ids, beside T."""
        return {"type": "synthetic", "vocab_size": self._vocab_size, "seed": self._seed}


def split(source: Source, fraction: float) -> tuple[Part, Part]:
    """Parts a source into documents to train on and documents held out, all pieces of a document on one side.

    A document is held out where its hash falls in the lowest `fraction` of all values, so that documents added to the
    source later move none. However few there are, the lowest hash is held out and the highest is not.

    Returns:
        The part to train on, the part held out.

    Raises:
        UserError: there is only one document.
    """
    keys = order.mix64(source.document_keys())
    if keys.min() == keys.max():
        raise UserError(
            "nothing can be held out of training data that are one document: name other data with "
            "eval_dataset_path=PATH, or turn evaluation off with eval_interval=-1"
        )
    held_out = ((keys < int(fraction * 2**64)) | (keys == keys.min())) & (keys != keys.max())
    return (
        Part(source, np.flatnonzero(~held_out), f"all but {fraction} of the documents"),
        Part(source, np.flatnonzero(held_out), f"{fraction} of the documents"),
    )


def open_sources(config: "FrozenConfigDict") -> tuple[Source | SyntheticSource, Source | SyntheticSource | None]:
    """The data to train on, and to evaluate on if the run evaluates: only then is a part of the training data held out.

    Raises:
        UserError: a path in the config has no text, or nothing can be held out.
    """
    return _open(config, evaluates=config.eval_interval > 0)


def open_eval_source(config: "FrozenConfigDict") -> Source | SyntheticSource:
    """The data that a run of this config evaluates on, or would.

    Raises:
        UserError: as `open_sources` does.
    """
    if config.dataset_type == "text" and config.eval_dataset_path:
        return _open_files(config, config.eval_dataset_path, "eval_dataset_path")
    return _open(config, evaluates=True)[1]


def _open(
    config: "FrozenConfigDict", evaluates: bool
) -> tuple[Source | SyntheticSource, Source | SyntheticSource | None]:
    if config.dataset_type == "synthetic":
        # Unlike every training seed, which is at least 0: the two must share no document.
        train, held_out = (
            SyntheticSource(config.vocab_size, config.max_target_length, seed)
            for seed in (config.data_shuffle_seed, -1 - config.data_shuffle_seed)
        )
        return train, held_out if evaluates else None
    train = _open_files(config, config.dataset_path, "dataset_path")
    if not evaluates:
        return train, None
    if config.eval_dataset_path:
        return train, _open_files(config, config.eval_dataset_path, "eval_dataset_path")
    return split(train, config.eval_fraction)


def _open_files(config: "FrozenConfigDict", path: str, key: str) -> Source:
    """What the files of `key`=`path` have: conversations with `use_sft`, else texts."""
    if not config.use_sft:
        return TextSource(path, config.max_document_bytes, key)
    if not path:
        raise UserError(f"use_sft=true reads .jsonl files of conversations: set {key}")
    return ConversationSource(path, key)
