"""Costs: what a layer tells those who count operations, memory and time. Each layer's module has a `costs(spec)`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from src.model.attention_kernels.scores import ScoreSpec


@dataclass(frozen=True)
class Costs:
    """Counts what a mixer (such as attention) or feed-forward layer costs beside its weights, which are declared."""

    width: int  # numbers per token in its activations that are sharded by heads or hidden units
    sharded: Mapping[str, tuple[int, ...]]  # logical axis -> sizes of the activations' dims that it shards
    # Weight -> the named arrays that spare its product in the backward pass, if a remat policy keeps all of them.
    spared_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: str = ""  # the weight whose product is the layer's output
    scores: ScoreSpec | None = None  # of attention's kernel
    products: float = 0.0  # operations per token forward, beside those with weights and of `scores`
    active: float = 1.0  # share of the experts that a token goes through
