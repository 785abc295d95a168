"""Fills this host's rows of batches from one source: a stream, numbered rows, or documents to pack.

T: tokens per row.  B: rows of a batch, over all hosts.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from src.data.document_stream import DocumentStream, layout_of, rows_per_epoch
from src.data.packing import PackingStream, SourcePacker, Truncation
from src.data.types import InputSpec, RowArrays, Rows, RowSource, Source, is_stream


class SourceStart(NamedTuple):
    """Holds the point in a source at which its rows begin or resume."""

    rows: int = 0  # for `NumberedRows`: the source's entry in `DataPosition.rows_before`
    positions: np.ndarray | None = None  # int32 [streams, 2], of this host's packing streams; None: the start
    saved: Mapping[str, Any] | None = None  # the result of `SourcePacker.saved`; None: the start


FIRST_ROW = SourceStart()


def source_packer(
    inputs: InputSpec,
    source: Source | RowSource,
    streams: Rows,
    global_batch: int,
    name: str = "",
    start: SourceStart = FIRST_ROW,
    *,
    one_epoch: bool = False,
) -> SourcePacker:
    """Chooses the packer for a source: for a stream, for numbered rows, or for documents in packing streams.

    `streams` are the numbers of this host's packing streams, of `global_batch` in total. With `one_epoch` each document
    comes once, followed by padding; otherwise rows never end. Raises as `StreamPacker` does, if the source is a stream.
    """
    packer: SourcePacker
    if is_stream(source):
        from src.extras.readers.streams import StreamPacker

        packer = StreamPacker(inputs, source, len(streams), global_batch, start.saved)
    elif (count := rows_per_epoch(inputs, source)) is not None:
        from src.data.numbered_rows import NumberedRows, row_reader

        packer = NumberedRows(row_reader(inputs, source, name), start.rows, count if one_epoch else math.inf)
    else:
        assert not isinstance(source, RowSource)
        stream = DocumentStream(inputs, source, name)
        packer = PackedDocuments(inputs, source, stream, streams, global_batch, start.positions, one_epoch)
    packer.name = name
    return packer


class PackedDocuments(SourcePacker):
    """Packs documents with packing streams, each of which has a position to resume from."""

    def __init__(
        self,
        inputs: InputSpec,
        source: Source,
        documents: DocumentStream,
        streams: Rows,
        global_batch: int,
        positions: np.ndarray | None,
        one_epoch: bool,
    ) -> None:
        self._ahead: Any = None
        positions = np.zeros((len(streams), 2), np.int32) if positions is None else positions
        end = len(source) if one_epoch else math.inf
        read = documents.documents
        if len(source) < global_batch and not (one_epoch or inputs.data.use_sft or inputs.rules < 2):
            from src.data.few_documents import spread

            read = spread(read, len(source), global_batch, inputs)
        if source.is_remote:
            from src.data.readers.stores import ReadAhead

            read = self._ahead = ReadAhead(read, global_batch, end)
        layout = layout_of(inputs)
        self._streams = [
            PackingStream(read, stream, global_batch, layout, (item, taken), end)
            for stream, (item, taken) in zip(streams, positions.tolist(), strict=True)
        ]

    def fill(self, batch: RowArrays, row: int, ordinal: int, place: int) -> Truncation:
        return self._streams[place].fill(batch, row)

    def position(self, place: int) -> tuple[int, int]:
        return self._streams[place].position

    def close(self) -> None:
        if self._ahead:
            self._ahead.close()
