"""Reads and converts the positions of packing streams, of any layout."""

import numpy as np

from src.data.packing import PLACED_BITS


def documents_consumed(positions: np.ndarray) -> np.ndarray:
    """Counts the items that each stream has finished, int64 [B], given `positions`, int32 [B, 2]."""
    placed = -np.minimum(positions[:, 1].astype(np.int64), 0) & (1 << PLACED_BITS) - 1
    return positions[:, 0].astype(np.int64) + np.bitwise_count(placed)


def remap_position(positions: np.ndarray, rows: int) -> np.ndarray:
    """Converts positions, int32 [B, 2], to another number of streams: int32 [rows, 2].

    The new streams continue after the number of documents consumed so far. If some streams were ahead of the others,
    the documents that they consumed early repeat, and documents that slower streams did not reach are missed.
    """
    consumed = documents_consumed(positions).sum()
    # Stream j has the documents j, j + rows, ..., which are ceil((n - j) / rows) of the first n.
    of_stream = np.maximum(-((np.arange(rows) - consumed) // rows), 0)
    return np.stack([of_stream, np.zeros_like(of_stream)], axis=1).astype(np.int32)
