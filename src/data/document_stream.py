"""Turns a source into an endless stream of tokenized documents, and chooses the layout of documents in rows."""

import math
from collections.abc import Callable

import numpy as np

from src.data.order import Shuffle
from src.data.packing import RowLayout, concatenate, one_per_row
from src.data.types import Conversation, Document, InputSpec, Item, RowSource, Source, is_stream
from src.system.errors import UserError


class DocumentStream:
    """Reads a source's items endlessly, in a new random order each epoch.

    The order also depends on `name`, the source's name in a mixture ("" for a single source).
    """

    def __init__(self, inputs: InputSpec, source: Source, name: str = "") -> None:
        self._inputs, self._source = inputs, source
        seed, sizes = inputs.data.data_shuffle_seed, source.group_sizes()
        self._order: Callable[[int], int]
        if sizes is None:
            self._order = Shuffle(len(source), seed, name or 0)
        else:
            from src.data.group_shuffle import GroupShuffle

            assert sizes.sum() == len(source)
            self._order = GroupShuffle(sizes, seed, name or 0)

    def documents(self, ordinal: int) -> list[Document]:
        """Reads and tokenizes item `ordinal` of the stream; raises as the source and `encode` do."""
        return encode(self._inputs, self._source[self._order(ordinal)])


def layout_of(inputs: InputSpec) -> RowLayout:
    """Chooses how documents become rows. With `use_sft` a response stays with its prompt if both fit into a row."""
    if not inputs.batch.packing:
        return one_per_row
    if not inputs.data.use_sft:
        return concatenate
    from src.extras.conversation_packing import best_fit

    return best_fit


def rows_per_epoch(inputs: InputSpec, source: Source | RowSource) -> float | None:
    """Counts the rows of an epoch: infinity for endless data, None if all documents would have to be tokenized."""
    if is_stream(source):
        return math.inf
    if isinstance(source, RowSource):
        return math.inf if source.row_count is None else source.row_count
    return len(source) if not inputs.batch.packing and inputs.batch.long_documents == "truncate" else None


def encode(inputs: InputSpec, item: Item) -> list[Document]:
    """Tokenizes an item into a document, or a conversation perhaps into one for each of the assistant's turns.

    Raises UserError if given ids are not below V, or as `encode_conversation` does.
    """
    if isinstance(item, Conversation):
        from src.extras.conversations import encode_conversation

        assert inputs.tokenizer
        return encode_conversation(inputs.tokenizer, item, inputs.data.sft_train_on_completion_only)
    if isinstance(item, str):  # an empty text has no ids: [bos, eos] would teach only to end
        if item and inputs.count_bytes:
            return [inputs.count_bytes(item)]
        assert inputs.tokenizer
        return [Document(inputs.tokenizer.encode(item) if item else np.empty(0, np.int32))]
    if len(item) and item.max() >= inputs.vocab_size:
        raise UserError(f"a document has id {item.max()}: vocab_size={inputs.vocab_size} is too small for these data")
    return [Document(item)]
