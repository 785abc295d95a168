"""Turns a source into an endless stream of documents in ids, and says how documents become rows."""

import math

import numpy as np

from src.data.order import Shuffle
from src.data.packing import RowLayout, concatenate, one_per_row
from src.data.types import Conversation, Document, InputSpec, Item, RowSource, Source, is_stream
from src.system.errors import UserError


class DocumentStream:
    """Reads a source's items endlessly: all of them in a random order, then all in another, and so on.

    The order depends on the `name` of the source in a mixture, which is empty for one that is alone.
    """

    def __init__(self, inputs: InputSpec, source: Source | RowSource, name: str = "") -> None:
        self._inputs, self._source, seed = inputs, source, inputs.data.data_shuffle_seed
        if not isinstance(source, RowSource):
            self._order = Shuffle(len(source), seed, name or 0, source.group_sizes())
        elif source.row_count is not None:
            self._order = Shuffle(source.row_count, seed, name or 0)

    def documents(self, ordinal: int) -> list[Document]:
        """Returns the documents of item `ordinal` of the stream."""
        return encode(self._inputs, self._source[self._order(ordinal)])

    def row(self, ordinal: int) -> list[Document]:
        """Returns row `ordinal` of the stream: one of a source of rows, or an item that has a row of its own."""
        if isinstance(self._source, RowSource):
            return self._source.row(ordinal if self._source.row_count is None else self._order(ordinal))
        documents = self.documents(ordinal)
        if len(documents) > 1:
            raise UserError(
                "the tokenizer's chat template rewrites earlier turns, so each turn of a conversation is an example of "
                "its own, and long_documents=truncate has a row for one: set long_documents=split, or packing=true"
            )
        return [document for document in documents if len(document.ids) > 1]


def layout_of(inputs: InputSpec) -> RowLayout:
    """Returns how documents become rows. With `use_sft` a response stays with its prompt where both fit a row."""
    if not inputs.batch.packing:
        return one_per_row
    if not inputs.data.use_sft:
        return concatenate
    from src.data.best_fit import best_fit

    return best_fit


def rows_per_epoch(inputs: InputSpec, source: Source | RowSource) -> float | None:
    """Counts the rows of an epoch, infinity without an end; None where only tokenizing all of it could tell."""
    if is_stream(source):
        return math.inf
    if isinstance(source, RowSource):
        return math.inf if source.row_count is None else source.row_count
    return len(source) if not inputs.batch.packing and inputs.batch.long_documents == "truncate" else None


def encode(inputs: InputSpec, item: Item) -> list[Document]:
    """Tokenizes an item: one document, or for some conversations one for each turn of the assistant."""
    if isinstance(item, Conversation):
        from src.extras.conversations import encode_conversation

        return encode_conversation(inputs.tokenizer, item, inputs.data.sft_train_on_completion_only)
    if isinstance(item, str):  # of an empty one only its own end could be learned
        if item and inputs.count_bytes:
            return [inputs.count_bytes(item)]
        return [Document(inputs.tokenizer.encode(item) if item else np.empty(0, np.int32))]
    if len(item) and item.max() >= inputs.vocab_size:
        raise UserError(f"a document has id {item.max()}: vocab_size={inputs.vocab_size} is too small for these data")
    return [Document(item)]
