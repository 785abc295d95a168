"""ForwardContext: what all blocks of one forward pass share."""

from dataclasses import dataclass

from jax import Array

from src.parallel.mesh import Layout


@dataclass(frozen=True)
class ForwardContext:
    """The rows' positions and segments, and how to compute: arrays and settings shared by all blocks."""

    positions_BT: Array  # from 0 in each segment
    segment_ids_BT: Array  # from 1 in each row; 0 is padding; tokens attend within their own segment only
    layout: Layout
    kernel: str  # of src/model/attention_kernels
    packed: bool  # False: rows hold one segment, then padding, and a causal kernel needs no segments
    dropout_keys_BTW: Array | None = None  # of each token (src/model/dropout.py); None: no dropout
    decoding: bool = False  # each row is one token, whose past is in the cache
    layer: Array | int = 0  # number of the block that runs, counted through the model

    # Between blocks more devices may share T than within: those that share heads and hidden units there (sequence
    # parallelism). Stating both placements makes one all-gather serve all projections forward, and one reduce-scatter
    # the sum of their gradients backward.

    def all_gather_sequence(self, x_BTD: Array) -> Array:
        """Gathers T before a block's projections, from its placement between blocks to that within."""
        return self._reshard(x_BTD, "norm_length", "length")

    def reduce_scatter_sequence(self, x_BTD: Array) -> Array:
        """Sums and shards T after a block's last projection, from its placement within blocks to that between."""
        return self._reshard(x_BTD, "length", "norm_length")

    def _reshard(self, x_BTD: Array, *axes: str) -> Array:
        for axis in axes:
            x_BTD = self.layout.constrain(x_BTD, "batch", axis, "activation_embed")
        return x_BTD
