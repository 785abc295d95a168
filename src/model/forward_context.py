"""Defines ForwardContext: arrays and settings that all blocks of one forward pass share."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from src.model.matmul import with_gradient
from src.model.params import Tree
from src.parallel.mesh import MeshLayout


@dataclass(frozen=True)
class ForwardContext:
    """Positions and segments of the sequences, and how to compute: arrays and settings shared by all blocks."""

    positions_BT: Array  # from 0 in each segment
    segment_ids_BT: Array  # from 1 in each sequence; 0 is padding; tokens attend only within their segment
    layout: MeshLayout
    kernel: str  # key of KERNELS in src/model/attention.py
    packed: bool  # False: sequences hold one segment, then padding, and a causal kernel needs no segments
    dropout_keys_BTW: Array | None = None  # one per token, as key data; None: no dropout
    decoding: bool = False  # each sequence is one token, and earlier tokens are in the cache
    log_internals: bool = False  # blocks report the sum of squares of their outputs
    layer: Array | int = 0  # index in the model of the block that runs
    segment_lists: Any = None  # SegmentLists (cudnn_segments.py), if cuDNN's kernel needs them
    grad_barriers: bool = False  # `Execution.grad_barriers`
    separate_factors: bool = False  # `Execution.for_gpu`: a feed-forward layer's factors are separate arrays
    mlp_in_halves: bool = False  # `Execution.mlp_in_halves`
    recomputes_activated: bool = False  # `Execution.recomputes_activated`

    # Between blocks, T may also be sharded over the mesh axes that shard heads and hidden units within blocks (sequence
    # parallelism). Constraining to one sharding and then the other makes XLA use one all-gather for all of a block's
    # projections, and in the backward pass one reduce-scatter for the sum of their gradients.

    def all_gather_sequence(self, x_BTD: Array) -> Array:
        """All-gathers T before a block's projections, from its sharding between blocks to its sharding within them."""
        return self._reshard(x_BTD, "norm_length", "length")

    def reduce_scatter_sequence(self, x_BTD: Array) -> Array:
        """Reduce-scatters T after a block's last projection, to its sharding between blocks."""
        return self._reshard(x_BTD, "length", "norm_length")

    def _reshard(self, x_BTD: Array, *axes: str) -> Array:
        for axis in axes:
            x_BTD = self.layout.constrain(x_BTD, "batch", axis, "activation_embed")
        return x_BTD

    def grad_barrier(self, *arrays: object) -> tuple:
        """Returns `arrays` (pytrees); with `grad_barriers`, all their gradients are computed before any is used."""
        return grad_barrier(*arrays) if self.grad_barriers else arrays

    def activations(self, x_BTD: Array) -> Tree:
        """With `log_internals`, reports x's sum of squares over non-padding tokens: [1, 1], like the routers' sums."""
        if not self.log_internals:
            return {}
        from src.model.internals import sum_of_squares

        return {"activations": sum_of_squares(x_BTD, self.segment_ids_BT)[None, None]}

    def dropout(self, x_BTD: Array, rate: float, site: Array | int) -> Array:
        """Applies dropout to [B, T, D] by the tokens' keys, if any; `site` numbers the model's places with dropout."""
        if self.dropout_keys_BTW is None or rate == 0.0:
            return x_BTD
        from src.model.dropout import dropout

        return dropout(x_BTD, self.dropout_keys_BTW, rate, site)


grad_barrier = with_gradient(
    lambda *arrays: (arrays, None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)
