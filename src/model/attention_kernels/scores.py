"""ScoreSpec, what attention kernels compute, and the limits that choosing a kernel needs without importing it."""

import math
from dataclasses import dataclass

from src.model.spec import LayerSpec

FLASH_BLOCK = 128  # least block of the TPU kernel, which takes whole blocks only
CUDNN_HEAD_DIM = 128  # largest that cuDNN takes on every GPU; Hopper's 256 is left out


@dataclass(frozen=True)
class ScoreSpec:
    """How queries score keys, and which keys they attend to: their segment's up to themselves, by window or chunk."""

    num_heads: int  # N
    head_dim: int  # H of queries and keys
    value_dim: int  # H of values
    scale: float  # of q k
    window: int = 0  # keys attended to, the query's own among them; 0: all
    chunk: int = 0  # positions of a block, within which tokens attend; 0: one block
    soft_cap: float = 0.0
    sink: bool = False

    @property
    def flops_per_key(self) -> float:
        """Returns the operations of both products, scores and weighted values, for one query and one key."""
        return 2.0 * self.num_heads * (self.head_dim + self.value_dim)

    def mean_keys(self, length: int) -> float:
        """Returns how many keys a query attends to on average in a row of one segment."""

        def total(block: int, window: int) -> int:
            """Sums the keys over the queries of one block."""
            window = min(window, block)
            return window * (window + 1) // 2 + (block - window) * window

        block = min(self.chunk or length, length)
        window = self.window or length
        return (length // block * total(block, window) + total(length % block, window)) / length

    def cache_slots(self, length: int) -> int:
        """Returns the tokens that a cache holds for texts of up to `length` tokens."""
        return min(length, self.window or self.chunk or length)


def score_spec(layer: LayerSpec, head_dim: int) -> ScoreSpec:
    """Returns the scores that a layer's facts ask for, with heads of this size."""
    return ScoreSpec(
        num_heads=layer.num_query_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=1.0 / math.sqrt(layer.query_pre_attn_scalar),
        window=layer.sliding_window_size,
        chunk=layer.chunk_attn_window_size,
        soft_cap=layer.attn_logits_soft_cap,
        sink=layer.attention_sink,
    )
