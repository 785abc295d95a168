"""The parts of a layer by its facts: the module that mixes its tokens, its feed-forward module, and what they cost."""

from typing import Protocol

from jax import Array

from src.model.attention import Attention
from src.model.attention_kernels.choose import choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.cache import Cache, CacheArray
from src.model.costs import Costs
from src.model.feed_forward import FeedForward
from src.model.forward_context import ForwardContext
from src.model.gated_delta import GatedDelta
from src.model.latent_attention import LatentAttention
from src.model.moe.layer import Experts
from src.model.params import Rngs
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import Layout


class Mixer(Protocol):
    """A module that mixes the tokens of a layer: all that a block, a cache and those who count know of it."""

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs) -> None:
        """Declares the weights, those of the output with initial values times `out_scale`."""

    @staticmethod
    def costs(spec: LayerSpec) -> Costs:
        """Counts what it makes beside its weights' products."""

    @staticmethod
    def cache_arrays(spec: LayerSpec, rows: int, length: int) -> dict[str, CacheArray]:
        """Declares the cache for `rows` texts of up to `length` tokens."""

    def __call__(self, x_BTD: Array, context: ForwardContext, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Maps [B, T, D] to [B, T, D]; returns the cache with these tokens too, which is None in training."""


# By attention_type. Another kind is its module, an entry here and a choice of that key (config/model_keys.py), beside
# its facts in `AttentionFacts`; config/needs.py lists by kind the facts that have effect.
MIXERS: dict[str, type[Mixer]] = {
    "global": Attention,
    "local_sliding": Attention,
    "chunk": Attention,
    "mla": LatentAttention,
    "gated_delta": GatedDelta,
}


def mixer(layer: LayerSpec) -> type[Mixer]:
    """Returns the module that mixes a layer's tokens."""
    return MIXERS[layer.attention_type]


def feed_forward(layer: LayerSpec) -> type[FeedForward] | type[Experts]:
    """Returns the module of a layer's feed-forward part."""
    return Experts if layer.num_experts > 1 else FeedForward


def layer_costs(layer: LayerSpec) -> dict[str, Costs]:
    """Returns the costs of a layer's parts, by the names that their weights have in a block."""
    return {"attention": mixer(layer).costs(layer), "feed_forward": feed_forward(layer).costs(layer)}


def attention_scores(spec: ModelSpec) -> list[ScoreSpec]:
    """Returns what the attention kernels of a model's layers compute."""
    return [scores for layer in dict.fromkeys(spec.layers) if (scores := layer_costs(layer)["attention"].scores)]


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: Layout) -> str:
    """Returns the attention kernel for a model's rows of `length` tokens on a layout; raises as `choose_kernel`."""
    return choose_kernel(attention, layout.platform, attention_scores(spec), spec.dtype, length, layout)
