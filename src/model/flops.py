"""Parameters and floating-point operations, counted from the spec."""

import collections
import functools
import math
from collections.abc import Set
from dataclasses import dataclass

import jax

from src.model.decoder import Block, Decoder
from src.model.layers import POLICIES, Execution
from src.model.params import abstract, by_path, dotted, field, values
from src.model.spec import AttentionSpec, LayerSpec, ModelSpec


@dataclass(frozen=True)
class FlopsPerToken:
    """Of matrix products in one training step."""

    causal: float  # attention counted for the tokens it sees: half of the square, a window or a block
    palm: float  # attention counted in full, as in PaLM (Chowdhery et al. 2022, appendix B)


@functools.cache  # to see how a hundred layers repeat takes a second
def count_params(spec: ModelSpec) -> int:
    """The model's parameters, without the rows that pad its vocabulary; a router's correction bias is among them."""
    _, declarations = abstract(functools.partial(Decoder, spec))
    physical = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values(declarations)))
    tables = 1 if spec.tied_output else 2
    return physical - tables * (spec.padded_vocab_size - spec.vocab_size) * spec.emb_dim


def count_active_params(spec: ModelSpec) -> int:
    """The parameters that a token goes through: of each layer's experts those it is sent to."""
    idle = 0
    for layer, count in _layers(spec).items():
        _, declarations = abstract(functools.partial(Block, layer, spec))
        sizes, axes = values(declarations), field(declarations, "out_sharding")
        for path, leaf in by_path(sizes).items():
            idle += count * round((1 - _active_share(layer, by_path(axes)[path])) * math.prod(leaf.shape))
    return count_params(spec) - idle


def _layers(spec: ModelSpec) -> collections.Counter[LayerSpec]:
    """Counts how often each layer occurs, those of the extra prediction layers among them."""
    return collections.Counter([*spec.layers, *(spec.layers[-1:] * spec.prediction_layers)])


def _active_share(layer: LayerSpec, axes: tuple[str | None, ...]) -> float:
    """Returns the share of a weight with these logical axes that a token goes through."""
    return layer.feed_forward.per_token / layer.feed_forward.count if "expert" in axes else 1.0


def _multiplied(layer: LayerSpec, spec: ModelSpec) -> dict[str, float]:
    """The weights of a block that a token is multiplied by, as declared: elements by dotted name."""
    _, declarations = abstract(functools.partial(Block, layer, spec))
    axes, fan_in = (by_path(field(declarations, name)) for name in ("out_sharding", "fan_in"))
    return {
        dotted(path): _active_share(layer, axes[path]) * math.prod(leaf.shape)
        for path, leaf in by_path(values(declarations)).items()
        if fan_in[path]
    }


def flops_per_token(spec: ModelSpec, length: int) -> FlopsPerToken:
    """Matrix products of a training step per token, forward and backward, rows being `length` long.

    What rematerialisation computes again is `recomputed_flops`.

    A product with a weight of n elements takes 2 n operations forward and twice that backward: 6 n. Attention's two
    products take 2 N H S each for a query that sees S keys; S is `length` in PaLM's count, and under a causal mask the
    mean of what tokens see, half of `length` where no window or block says less. Packing's shorter segments are not
    taken off. Extra prediction layers count with their own projection and logits.
    """
    weights = (1 + spec.prediction_layers) * spec.emb_dim * spec.vocab_size
    weights += spec.prediction_layers * 2 * spec.emb_dim**2
    causal = palm = 6.0 * weights
    for layer, count in _layers(spec).items():
        products = 6.0 * sum(_multiplied(layer, spec).values())
        a_key = 6.0 * layer.attention.num_query_heads * (layer.attention.head_dim + layer.attention.value_dim)
        causal += count * (products + a_key * _mean_seen(layer.attention, length))
        palm += count * (products + a_key * length)
    return FlopsPerToken(causal, palm)


def recomputed_flops(spec: ModelSpec, length: int, execution: Execution, vocab_tiles: int) -> FlopsPerToken:
    """Matrix products that the backward pass of a training step computes again a token, beside `flops_per_token`.

    A block computes again what its derivatives need and its policy does not keep. The product that ends it is not
    needed where it is only added to the residual stream, and attention's two always are, by every kernel, for none of
    what they make inside has a name to be kept by. A kernel that computes the scores again of itself is not counted.

    Args:
        spec: the model.
        length: of a row.
        execution: which arrays the layers keep.
        vocab_tiles: tiles of the loss; with more than one the logits are computed again.
    """
    logits = (1 + spec.prediction_layers) * spec.emb_dim * spec.vocab_size
    causal = palm = 2.0 * logits if vocab_tiles > 1 else 0.0
    if execution.remat_policy == "none":
        return FlopsPerToken(causal, palm)
    if execution.remat_policy == "custom":
        kept = set(execution.remat_custom)
    else:
        kept = {name for names in POLICIES[execution.remat_policy] for name in names}
    if "decoder_layer_input" not in kept:
        causal = palm = causal + 2.0 * spec.prediction_layers * 2 * spec.emb_dim**2
    for layer, count in _layers(spec).items():
        products = 2.0 * sum(
            elements
            for name, elements in _multiplied(layer, spec).items()
            if _is_recomputed(name.rpartition(".")[2], layer, kept)
        )
        a_key = 2.0 * layer.attention.num_query_heads * (layer.attention.head_dim + layer.attention.value_dim)
        causal += count * (products + a_key * _mean_seen(layer.attention, length))
        palm += count * (products + a_key * length)
    return FlopsPerToken(causal, palm)


# The arrays that, where all are kept, spare a weight's product in the backward pass; any other weight's is made again.
SPARED_BY = {
    "query": ("query_proj",),
    "key": ("key_proj",),
    "value": ("value_proj",),
    "kv_up": ("key_proj", "value_proj"),
    "out": ("out_proj",),
    "wi": ("mlpwi",),
    "wo": ("mlpwo",),
}


def _is_recomputed(name: str, layer: LayerSpec, kept: Set[str]) -> bool:
    """Returns whether the backward pass computes the product with a block's weight again."""
    if name == "wo" and not layer.norm_after:  # it ends the block
        return False
    if name in ("query", "key") and layer.attention.qk_norm != "none":
        # The derivative of a norm needs what went into it, and what is kept has come out of it.
        return True
    return not (name in SPARED_BY and kept >= set(SPARED_BY[name]))


def _mean_seen(attention: AttentionSpec, length: int) -> float:
    """How many keys a token of a row sees on average, itself among them."""

    def seen(block: int, window: int) -> int:
        """The sum over the tokens of one block."""
        window = min(window, block)
        return window * (window + 1) // 2 + (block - window) * window

    block = min(attention.chunk or length, length)
    window = attention.window or length
    return (length // block * seen(block, window) + seen(length % block, window)) / length
