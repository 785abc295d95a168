"""Costs that layers declare for counting operations, memory and time. Each mixer and feed-forward has `costs(spec)`."""

from collections.abc import Mapping
from typing import NamedTuple

from src.model.attention_kernels.scores import ScoreSpec


class Costs(NamedTuple):
    """Costs of a mixer (such as attention) or feed-forward layer, besides its weights, which its module declares."""

    activation_size: int  # elements per token of the activations that heads or hidden units shard
    sharded: Mapping[str, tuple[int, ...]]  # logical axis -> sizes of the activation dims that it shards
    # Weight -> the named arrays that make it unnecessary to recompute its matmul, if a remat policy saves all of them.
    saved_by: Mapping[str, tuple[str, ...]] = {}
    output_weight: str = ""  # the weight of the layer's last matmul
    scores: ScoreSpec | None = None  # what its attention kernel computes; None: it has no such kernel
    other_flops: float = 0.0  # operations per token in the forward pass, except matmuls with weights and `scores`
    active: float = 1.0  # fraction of the experts that a token goes through
