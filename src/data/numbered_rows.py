"""Fills numbered rows: the rows of a source of rows, or rows with one document each."""

from collections.abc import Callable

from src.data.document_stream import DocumentStream
from src.data.order import Shuffle
from src.data.packing import SourcePacker, Truncation, fill_row
from src.data.types import Document, InputSpec, RowArrays, RowSource, Source
from src.system.errors import UserError


def row_reader(inputs: InputSpec, source: Source | RowSource, name: str = "") -> Callable[[int], list[Document]]:
    """Makes a function that reads a row by its number in the endless stream of a source.

    `name` is the source's name in a mixture. The function raises UserError if an item has several documents.
    """
    if isinstance(source, RowSource):
        if source.row_count is None:
            return source.row
        order = Shuffle(source.row_count, inputs.data.data_shuffle_seed, name or 0)
        return lambda ordinal: source.row(order(ordinal))
    stream = DocumentStream(inputs, source, name)

    def row(ordinal: int) -> list[Document]:
        documents = stream.documents(ordinal)
        if len(documents) > 1:
            raise UserError(
                "the tokenizer's chat template rewrites earlier turns, so each turn of a conversation is a separate "
                "example, and long_documents=truncate has room for one: set long_documents=split, or packing=true"
            )
        return [document for document in documents if len(document.ids) > 1]

    return row


class NumberedRows(SourcePacker):
    """Fills row n of the source by `read(rows_before + n)`, or with padding if n is at least `end`."""

    def __init__(self, read: Callable[[int], list[Document]], rows_before: int, end: float) -> None:
        self._read, self._rows_before, self._end = read, rows_before, end

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Truncation:
        """Fills row `row` with row `ordinal` of the source, as `SourcePacker.fill` describes."""
        documents = self._read(self._rows_before + ordinal) if ordinal < self._end else []
        return fill_row(batch, row, ((document, 0, len(document.ids) - 1) for document in documents))
