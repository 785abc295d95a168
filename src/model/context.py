"""What every block of one forward pass is told."""

from dataclasses import dataclass

import jax

from src.mesh import Layout


@dataclass(frozen=True)
class Context:
    """The rows' positions and segments, and how to compute: arrays and settings shared by all blocks."""

    positions_BT: jax.Array  # from 0 in each segment
    segment_ids_BT: jax.Array  # from 1 in each row; 0 is padding; tokens see their own segment only
    layout: Layout
    kernel: str  # of src/model/kernels.py
    packed: bool  # False: rows hold one segment, then padding, and a causal kernel needs no segments
    dropout_key: jax.Array | None = None  # None: no dropout
    decoding: bool = False  # each row is one token, whose past is in the cache
