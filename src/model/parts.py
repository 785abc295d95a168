"""The parts of a layer by its settings: the mixer of its tokens, its feed-forward module, and what they cost."""

from typing import Any

from src.model.attention_kernels.choose import Kernel, choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.costs import Costs
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import Layout
from src.system.imports import named

# Modules that mix the tokens of a layer, by attention_type; one is imported once a layer has it. Blocks, caches and
# counts know their `__call__`, `costs`, `cache_arrays` and `__init__`, in which `out_scale` is a factor of the output's
# initial values. Another kind is its module, an entry here, and a choice of that key beside its settings in
# `AttentionFacts` (config/model_keys.py); config/requirements.py lists by kind the settings that have effect.
MIXERS = {
    "global": "src.model.attention:Attention",
    "local_sliding": "src.model.attention:Attention",
    "chunk": "src.model.attention:Attention",
    "mla": "src.model.latent_attention:LatentAttention",
    "gated_delta": "src.model.gated_delta:GatedDelta",
}
FEED_FORWARD, EXPERTS = "src.model.feed_forward:FeedForward", "src.model.moe.layer:Experts"


def mixer(layer: LayerSpec) -> Any:
    """Returns the class of the module that mixes a layer's tokens."""
    return named(MIXERS[layer.attention_type])


def feed_forward(layer: LayerSpec) -> Any:
    """Returns the class of a layer's feed-forward part."""
    return named(EXPERTS if layer.num_experts > 1 else FEED_FORWARD)


def layer_costs(layer: LayerSpec) -> dict[str, Costs]:
    """Returns the costs of a layer's parts, by the names that their weights have in a block."""
    return {"attention": mixer(layer).costs(layer), "feed_forward": feed_forward(layer).costs(layer)}


def attention_scores(spec: ModelSpec) -> list[ScoreSpec]:
    """Returns what the attention kernels of a model's layers compute."""
    return [scores for layer in dict.fromkeys(spec.layers) if (scores := layer_costs(layer)["attention"].scores)]


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: Layout) -> Kernel:
    """Returns the attention kernel for a model's rows of `length` tokens on a layout; raises as `choose_kernel`."""
    return choose_kernel(attention, layout.platform, attention_scores(spec), spec.dtype, length, layout)
