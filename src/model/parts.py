"""The parts of a layer by its facts: the module that mixes its tokens, its feed-forward module, and what they cost."""

from src.model.attention import Attention
from src.model.attention_kernels.choose import Kernel, choose_kernel
from src.model.attention_kernels.scores import ScoreSpec
from src.model.costs import Costs
from src.model.feed_forward import FeedForward
from src.model.gated_delta import GatedDelta
from src.model.latent_attention import LatentAttention
from src.model.moe.layer import Experts
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import Layout

# Modules that mix the tokens of a layer: blocks, caches and counts know their `__call__`, `costs`, `cache_arrays` and
# `__init__`, in which `out_scale` is a factor of the output's initial values.
Mixer = Attention | LatentAttention | GatedDelta
# By attention_type. Another kind is its module, an entry here and in `Mixer`, and a choice of that key beside its facts
# in `AttentionFacts` (config/model_keys.py); config/requirements.py lists by kind the facts that have effect.
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


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: Layout) -> Kernel:
    """Returns the attention kernel for a model's rows of `length` tokens on a layout; raises as `choose_kernel`."""
    return choose_kernel(attention, layout.platform, attention_scores(spec), spec.dtype, length, layout)
