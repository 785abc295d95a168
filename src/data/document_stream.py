"""Turns a source into an endless stream of documents in ids, and the stream into rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from src.data.best_fit import best_fit
from src.data.order import Shuffle
from src.data.packing import Cuts, Items, PackingStream, RowLayout, concatenate, fill_row, one_per_row
from src.data.readers.files import ReadAhead
from src.data.streams import StreamReader, StreamSource
from src.data.types import Conversation, Document, InputSpec, Item, RowArrays, RowSource, Source
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


class RowFiller:
    """Fills this host's rows from one source. Threads may fill rows of different streams at once.

    Sources without `rows_per_epoch` need packing streams, B of them, which keep a position: `positions`, int32
    [streams, 2], says where this host's resume. Any other row is a function of its number, and `rows_before` of them
    came before the run's are counted. With `one_epoch` each document comes once, then padding; else rows never end.
    A `StreamSource` fills all rows in their order, by one thread, and goes on where `saved` (see there) says.
    """

    def __init__(
        self,
        inputs: InputSpec,
        source: Source | RowSource,
        streams: Sequence[int],
        global_batch: int,
        *,
        name: str = "",
        rows_before: int = 0,
        positions: np.ndarray | None = None,
        one_epoch: bool = False,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._reader, self._ahead = name, None, None
        self._streams: list[PackingStream] | None = None
        if isinstance(source, StreamSource):
            source.check_rows(len(streams), global_batch)
            self._reader = reader = StreamReader(source, inputs.data.data_shuffle_seed, saved)
            position = saved["position"] if saved else (0, 0)
            stream = PackingStream(lambda number: encode(inputs, reader(number)), 0, 1, layout_of(inputs), position)
            self._streams = [stream] * len(streams)
            return
        self._documents, self._rows_before = DocumentStream(inputs, source, name), rows_before
        row_count, self._end = rows_per_epoch(inputs, source), math.inf
        if one_epoch:
            self._end = len(source) if row_count is None else row_count
        if row_count is None:
            positions = np.zeros((len(streams), 2), np.int32) if positions is None else positions
            read = self._documents.documents
            if len(source) < global_batch and not (one_epoch or inputs.data.use_sft or inputs.rules < 2):
                read = spread(read, len(source), global_batch, inputs)
            if source.is_remote:
                read = self._ahead = ReadAhead(read, global_batch, self._end)
            self._streams = [
                PackingStream(read, stream, global_batch, layout_of(inputs), position, self._end)
                for stream, position in zip(streams, positions, strict=True)
            ]

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Cuts:
        """Writes row `ordinal` of the source, or the next of the stream at `place`, into row `row`, still padding."""
        if self._streams is not None:
            return self._streams[place].fill(batch, row)
        documents = self._documents.row(self._rows_before + ordinal) if ordinal < self._end else []
        return fill_row(batch, row, ((document, 0, len(document.ids) - 1) for document in documents))

    def position(self, place: int) -> tuple[int, int]:
        """Returns the position of the packing stream at `place`; zeros where none is needed."""
        return (0, 0) if self._streams is None or self._reader else self._streams[place].position

    def close(self) -> None:
        """Drops the documents that are being read ahead; rows may be filled after it."""
        if self._ahead:
            self._ahead.close()

    def saved(self) -> dict[str, Any] | None:
        """Returns where a stream goes on after the rows so far, as JSON has it; None for other sources."""
        if self._reader is None:
            return None
        return {**self._reader.saved((position := self._streams[0].position)[0]), "position": position}


def spread(read: Items, count: int, streams: int, inputs: InputSpec) -> Items:
    """Has streams begin at different places of a document, if there are fewer documents, `count`, than streams.

    The ordinals that streams read together belong to several epochs: each has a place in documents, at even distances,
    and reads the part before it last. Documents that fit a row stay whole, and so do rows without packing.
    """
    length = inputs.batch.max_target_length
    unit = 1 if inputs.batch.packing else length

    def documents(ordinal: int) -> list[Document]:
        (document,) = read(ordinal)
        size, begin = len(document.ids) - 1, ordinal - ordinal % streams
        first, epoch, last = (n // count for n in (begin, ordinal, begin + streams - 1))
        place = -(-size // unit) * (epoch - first) // (last - first + 1) * unit if size > length else 0
        slices = (slice(place, None), slice(place + 1)) if place else (slice(None),)
        return [Document(*(None if array is None else array[part] for array in document)) for part in slices]

    return documents


def layout_of(inputs: InputSpec) -> RowLayout:
    """Returns how documents become rows. With `use_sft` a response stays with its prompt where both fit a row."""
    if not inputs.batch.packing:
        return one_per_row
    return best_fit if inputs.data.use_sft else concatenate


def rows_per_epoch(inputs: InputSpec, source: Source | RowSource) -> float | None:
    """Counts the rows of an epoch, infinity without an end; None where only tokenizing all of it could tell."""
    if isinstance(source, StreamSource):
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
