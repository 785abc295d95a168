"""The parts of a layer, chosen by its settings: the token mixer, the feed-forward module, and their costs."""

from typing import Any

from src.model.attention_kernels.choose import Kernel, choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.costs import Costs
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import Layout
from src.system.imports import named

# Token mixers by attention_type; a module is imported when a layer uses it. Blocks, caches and counts rely on its
# `__call__`, `costs`, `cache_arrays` and `__init__`, in which `out_scale` scales the output's initial values. To add a
# mixer, write a module, add an entry here, and add a choice of that key next to its settings in `AttentionSettings`
# (config/model_keys.py); config/requirements.py lists the settings that each kind uses.
MIXERS = {
    "global": "src.model.attention:Attention",
    "local_sliding": "src.model.attention:Attention",
    "chunk": "src.model.attention:Attention",
    "mla": "src.model.latent_attention:LatentAttention",
    "gated_delta": "src.model.gated_delta:GatedDelta",
}
FEED_FORWARD, EXPERTS = "src.model.feed_forward:FeedForward", "src.model.moe.layer:Experts"


def mixer(layer: LayerSpec) -> Any:
    """Class of the module that mixes a layer's tokens."""
    return named(MIXERS[layer.attention_type])


def feed_forward(layer: LayerSpec) -> Any:
    """Class of a layer's feed-forward part."""
    return named(EXPERTS if layer.num_experts > 1 else FEED_FORWARD)


def layer_costs(layer: LayerSpec) -> dict[str, Costs]:
    """Costs of a layer's parts, by the names that their weights have in a block."""
    return {"attention": mixer(layer).costs(layer), "feed_forward": feed_forward(layer).costs(layer)}


def attention_scores(spec: ModelSpec) -> list[ScoreSpec]:
    """Score settings of the attention kernels of a model's layers."""
    return [scores for layer in dict.fromkeys(spec.layers) if (scores := layer_costs(layer)["attention"].scores)]


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: Layout) -> Kernel:
    """Chooses the attention kernel for a model and sequences of `length` tokens; raises as `choose_kernel`."""
    return choose_kernel(attention, layout.platform, attention_scores(spec), spec.dtype, length, layout)
