"""What fills rows from one source: lanes, which keep a place in it, or rows whose number alone says what is in them.

B: rows of a batch, over all hosts.  T: tokens per row.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from src.data.conversations import Conversation, encode_conversation
from src.data.open import Item, RowSource, Source, TrainData
from src.data.order import Shuffle
from src.data.packing import Batch, Cuts, Document, Items, Lane, Layout, end_to_end, fill_row, one_a_row, whole
from src.data.tokenizer import Tokenizer
from src.errors import UserError

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

_CONVERSATIONS_LOOKED_AT = 256  # of each source, before a run


class Feed(Protocol):
    """Fills this host's rows from one source; different rows may be filled at the same time."""

    def fill(self, batch: Batch, row: int, ordinal: int) -> Cuts:
        """Writes the next row from the source into row `row` of this host's batch, which is still padding.

        Args:
            batch: of this host's rows.
            row: which of them.
            ordinal: how many rows of the run before it are from this source.
        """

    def position(self, row: int) -> tuple[int, int]:
        """For a row of this host its lane's position; zeros if none is needed."""


class LaneFeed:
    """A lane for each row.

    Args:
        items: the documents of an ordinal.
        rows: the host's rows of the global batch.
        global_batch: B.
        layout: how documents become rows.
        positions: int32 [rows, 2], where to go on, as `position` gave each; None: at the start.
        end: ordinals from here on don't exist.
    """

    def __init__(
        self,
        items: Items,
        rows: Sequence[int],
        global_batch: int,
        layout: Layout,
        positions: np.ndarray | None,
        end: float,
    ) -> None:
        if positions is None:
            positions = np.zeros((len(rows), 2), np.int32)
        self._lanes = [
            Lane(items, row, global_batch, layout, position, end) for row, position in zip(rows, positions, strict=True)
        ]

    def fill(self, batch: Batch, row: int, ordinal: int) -> Cuts:
        """The next row of the row's own lane, wherever else rows of this source are."""
        del ordinal
        return self._lanes[row].fill(batch, row)

    def position(self, row: int) -> tuple[int, int]:
        """Of the row's own lane."""
        return self._lanes[row].position


class RowFeed:
    """Rows that are a function of their number: nothing is kept of what came before.

    Args:
        documents: those of the row with an ordinal.
        before: how many of the source's rows came before the run's rows are counted.
        end: ordinals from here on don't exist, and leave their rows empty.
    """

    def __init__(self, documents: Callable[[int], list[Document]], before: int, end: float) -> None:
        self._documents = documents
        self._before = before
        self._end = end

    def fill(self, batch: Batch, row: int, ordinal: int) -> Cuts:
        """The documents of row `ordinal` of the source's stream."""
        return fill_row(batch, row, self._documents(self._before + ordinal) if ordinal < self._end else [])

    def position(self, row: int) -> tuple[int, int]:
        """Zeros."""
        del row
        return 0, 0


def make_feed(
    config: "FrozenConfigDict",
    source: Source | RowSource,
    tokenizer: Tokenizer | None,
    rows: Sequence[int],
    global_batch: int,
    *,
    name: str = "",
    before: int = 0,
    positions: np.ndarray | None = None,
    one_epoch: bool = False,
) -> Feed:
    """The feed of a source.

    Args:
        config: `packing`, `use_sft`, `long_documents`, `max_target_length`, `data_shuffle_seed` and what `encode` reads
            of it.
        source: the documents, or rows.
        tokenizer: None where nothing is text.
        rows: the host's rows of the global batch, ascending.
        global_batch: B.
        name: of the source in a mixture.
        before: see RowFeed.
        positions: int32 [rows, 2]: see LaneFeed.
        one_epoch: each document once, and then padding; else without an end.
    """
    documents = Documents(config, source, tokenizer, name)
    if (count := rows_an_epoch(config, source)) is not None:
        return RowFeed(documents.row, before, count if one_epoch else math.inf)
    end = len(source) if one_epoch else math.inf
    return LaneFeed(documents, rows, global_batch, row_layout(config), positions, end)


def row_layout(config: "FrozenConfigDict") -> Layout:
    """Returns how lanes lay documents into rows: where both fit a row, a response stays with its prompt."""
    if not config.packing:
        return one_a_row
    return whole if config.use_sft else end_to_end


def rows_an_epoch(config: "FrozenConfigDict", source: Source | RowSource) -> float | None:
    """How many rows an epoch has, infinity without an end; None where only tokenizing all of it could tell."""
    if isinstance(source, RowSource):
        return math.inf if source.row_count is None else source.row_count
    return len(source) if not config.packing and config.long_documents == "truncate" else None


class Documents:
    """The endless stream of a source: all of it in a random order, then all in another, and so on.

    Args:
        config: as for `make_feed`.
        source: the documents, or rows.
        tokenizer: None where nothing is text.
        name: of the source in a mixture, whose order it is that of; empty for one that is alone.
    """

    def __init__(
        self, config: "FrozenConfigDict", source: Source | RowSource, tokenizer: Tokenizer | None, name: str
    ) -> None:
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        seed = config.data_shuffle_seed
        if not isinstance(source, RowSource):
            self._order = Shuffle(len(source), seed, name or 0, source.group_sizes())
        elif source.row_count is not None:
            self._order = Shuffle(source.row_count, seed, name or 0)

    def __call__(self, ordinal: int) -> list[Document]:
        """The documents of item `ordinal` of the stream."""
        return encode(self._config, self._tokenizer, self._source[self._order(ordinal)])

    def row(self, ordinal: int) -> list[Document]:
        """Row `ordinal` of the stream: of a source of rows, or a document and no more of it than a row holds."""
        if isinstance(self._source, RowSource):
            return self._source.row(ordinal if self._source.row_count is None else self._order(ordinal))
        documents = self(ordinal)
        if len(documents) > 1:
            raise UserError(
                "the tokenizer's chat template rewrites earlier turns, so each turn of a conversation is an example of "
                "its own, and long_documents=truncate has a row for one: set long_documents=split, or packing=true"
            )
        return [document for document in documents if len(document.ids) > 1]


def describe_conversations(config: "FrozenConfigDict", data: TrainData, tokenizer: Tokenizer) -> str:
    """Says how many conversations are cut and what is learned, judging by the first ones of each source."""
    looked_at = cut = rewritten = 0
    for name, source in zip(data.names, data.sources, strict=True):
        documents = Documents(config, source, tokenizer, name)
        for ordinal in range(min(len(source), _CONVERSATIONS_LOOKED_AT)):
            found = documents(ordinal)
            looked_at += 1
            rewritten += len(found) > 1
            cut += any(len(document.ids) - 1 > config.max_target_length for document in found)
    longer = f"{cut:,} of {looked_at:,} looked at are longer than a row of {config.max_target_length:,} and cut"
    if not config.sft_train_on_completion_only:
        return f"{longer}; all tokens count"
    turns = f", in {rewritten:,} each turn in an example of its own: the template rewrites earlier turns"
    return f"{longer}; what the assistant says counts{turns if rewritten else ''}"


def encode(config: "FrozenConfigDict", tokenizer: Tokenizer | None, item: Item) -> list[Document]:
    """A source's item in ids: a document, or of some conversations one for each turn of the assistant.

    An empty text has no ids: there is nothing to learn but its own end.
    """
    if isinstance(item, Conversation):
        return encode_conversation(tokenizer, item, config.sft_train_on_completion_only)
    if isinstance(item, str):
        return [Document(tokenizer.encode(item) if item else np.empty(0, np.int32))]
    if len(item) and item.max() >= config.vocab_size:
        raise UserError(f"a document has id {item.max()}: vocab_size={config.vocab_size} is too small for these data")
    return [Document(item)]
