"""Reads and converts the positions of packing streams, as a change of the batch size asks for it."""

import numpy as np

from src.data.best_fit import WINDOW


def documents_consumed(positions: np.ndarray) -> np.ndarray:
    """Counts the items that each stream has finished: int64 [B], from positions int32 [B, 2]."""
    placed = -np.minimum(positions[:, 1].astype(np.int64), 0) & (1 << WINDOW - 1) - 1
    return positions[:, 0].astype(np.int64) + np.bitwise_count(placed)


def remap_position(positions: np.ndarray, rows: int) -> np.ndarray:
    """Converts positions, int32 [B, 2], to another number of streams: int32 [rows, 2].

    They go on after as many documents as were consumed. Documents by which some streams were ahead of the others come
    again, and those by which they were behind are missed.
    """
    consumed = documents_consumed(positions).sum()
    # Stream j has the documents j, j + rows, ...: of the first n it has ceil((n - j) / rows).
    of_stream = np.maximum(-((np.arange(rows) - consumed) // rows), 0)
    return np.stack([of_stream, np.zeros_like(of_stream)], axis=1).astype(np.int32)
