"""The parts of a layer, chosen by its settings: the token mixer, the feed-forward module, and their costs."""

from typing import Any

from src.config.attention_types import ATTENTION_TYPES
from src.model.attention_kernels.choose import Kernel, choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.costs import Costs
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import MeshLayout
from src.system.imports import named

# Token mixers by attention_type; src/config/attention_types.py says what else a new mixer needs.
MIXERS: dict[str, Any] = {kind: declared.module for kind, declared in ATTENTION_TYPES.items()}
FEED_FORWARD, EXPERTS = "src.model.feed_forward:FeedForward", "src.model.moe.layer:Experts"


def mixer(layer: LayerSpec) -> Any:
    """Class of the module that mixes a layer's tokens."""
    return named(MIXERS[layer.attention_type])


def feed_forward(layer: LayerSpec) -> Any:
    """Class of a layer's feed-forward part."""
    return named(EXPERTS if layer.num_experts > 1 else FEED_FORWARD)


def layer_costs(layer: LayerSpec) -> dict[str, Costs]:
    """Costs of a layer's parts, by their names in a block: attention and feed_forward."""
    return {"attention": mixer(layer).costs(layer), "feed_forward": feed_forward(layer).costs(layer)}


def attention_scores(spec: ModelSpec) -> list[ScoreSpec]:
    """Score settings of a model's distinct layers, without those whose mixer has no attention kernel."""
    return [scores for layer in dict.fromkeys(spec.layers) if (scores := layer_costs(layer)["attention"].scores)]


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: MeshLayout) -> Kernel:
    """Chooses the attention kernel for a model and sequences of `length` tokens; raises as `choose_kernel` does."""
    return choose_kernel(attention, layout.platform, attention_scores(spec), spec.dtype, length, layout)
