"""Costs: what a layer tells those who count operations, memory and time. Each layer's module has a `costs(spec)`."""

from collections.abc import Mapping
from typing import NamedTuple

from src.model.attention_kernels.scores import ScoreSpec


class Costs(NamedTuple):
    """Counts what a mixer (such as attention) or feed-forward layer costs beside its weights, which are declared."""

    width: int  # numbers per token in its activations that are sharded by heads or hidden units
    sharded: Mapping[str, tuple[int, ...]]  # logical axis -> sizes of the activations' dims that it shards
    # Weight -> the named arrays that spare its product in the backward pass, if a remat policy keeps all of them.
    spared_by: Mapping[str, tuple[str, ...]] = {}
    last: str = ""  # the weight whose product is the layer's output
    scores: ScoreSpec | None = None  # of attention's kernel
    products: float = 0.0  # operations per token forward, beside those with weights and of `scores`
    active: float = 1.0  # share of the experts that a token goes through
