"""Counts parameters and floating-point operations, from weights' declarations and layers' costs."""

import collections
import functools
import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import jax

from src.model.attention_kernels.scores import ScoreSpec
from src.model.block import Block
from src.model.decoder import Decoder
from src.model.execution import Execution
from src.model.params import abstract, by_path, field, values
from src.model.parts import layer_costs
from src.model.spec import LayerSpec, ModelSpec


class FlopsPerToken(NamedTuple):
    """Operations of matrix products in one training step."""

    causal: float  # attention counts the keys that queries attend to: half of the square, a window or a block
    palm: float  # attention counts all keys, as in PaLM (Chowdhery et al. 2022, appendix B)
    layers: float = 0.0  # of both, the products with layers' weights


@functools.cache  # declaring a hundred layers takes a second
def count_params(spec: ModelSpec) -> int:
    """Returns the model's parameters, a router's correction bias included, without the vocabulary's padding."""
    _, declarations = abstract(functools.partial(Decoder, spec))
    physical = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values(declarations)))
    tables = 1 if spec.logits_via_embedding else 2
    return physical - (spec.padded_vocab_size - spec.vocab_size) * (tables * spec.emb_dim + spec.logits_bias)


def count_active_params(spec: ModelSpec) -> int:
    """Returns the parameters that a token goes through: of each layer's experts only those it is sent to."""
    idle = 0
    for layer, count in all_layers(spec).items():
        idle += count * sum(round(weight.size - weight.used) for weight in block_weights(layer, spec))
    return count_params(spec) - idle


def all_layers(spec: ModelSpec) -> collections.Counter[LayerSpec]:
    """Counts how often each layer occurs, multi-token prediction layers included."""
    return collections.Counter([*spec.layers, *(spec.layers[-1:] * spec.mtp_num_layers)])


class BlockWeight(NamedTuple):
    """One weight of a block, as declared."""

    path: tuple[str, ...]  # in the block
    size: int  # elements
    used: float  # elements that a token goes through: of experts, those it is sent to
    summed: int  # of its entries, those that a product sums over
    taken: float  # numbers of a token that its product takes, for each expert that the token is sent to
    input: tuple[str | None, ...]  # the logical axes of those; none: there is no product
    ends_block: bool  # its product is only added to the residual stream
    spared_by: tuple[str, ...]  # the arrays that spare its product in the backward pass; none: it is not spared


def block_weights(layer: LayerSpec, spec: ModelSpec) -> Iterator[BlockWeight]:
    """Yields the weights of a layer."""
    _, declarations = abstract(functools.partial(Block, layer, spec))
    axes, fan_in = (by_path(field(declarations, name)) for name in ("out_sharding", "fan_in"))
    costs = layer_costs(layer)
    for path, leaf in by_path(values(declarations)).items():
        size, part, name = math.prod(leaf.shape), costs.get(path[0]), path[-1]
        used = part.active * size if "expert" in axes[path] else 1.0 * size
        added = layer.normalization_placement == "before"  # to the residual stream, as it is
        ends_block = path[0] == "feed_forward" and name == part.last and added
        spared_by = part.spared_by.get(name, ()) if part else ()
        summed = math.prod(leaf.shape[dim] for dim in fan_in[path])
        taken = summed * used / size * (leaf.shape[0] if "expert" in axes[path] else 1)
        input_axes = tuple(axes[path][dim] for dim in fan_in[path])
        yield BlockWeight(path, size, used, summed, taken, input_axes, ends_block, spared_by)


def flops_per_token(spec: ModelSpec, length: int) -> FlopsPerToken:
    """Counts the matrix products of a training step per token, forward and backward, in rows of `length` tokens.

    A product with a weight of n elements takes 2 n operations forward and twice that backward: 6 n. Attention's two
    products take 2 N H S each for a query that attends to S keys; S is `length` in PaLM's count, and under a causal
    mask the mean, half of `length` without window or chunk. Packing's shorter segments are not taken off.
    Other products stand in a layer's `costs`. Multi-token prediction layers count with their own projection and logits.
    """
    elements = _head_elements(spec) + spec.mtp_num_layers * 2 * spec.emb_dim**2
    return _flops(3, elements, sum(used for _, used in _layer_products(spec)), spec, length)


def layer_share(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> float:
    """Returns the share of the products with layers' weights that are with those of these paths in their block."""
    products = list(_layer_products(spec))
    return sum(used for path, used in products if path in paths) / sum(used for _, used in products)


def product_widths(spec: ModelSpec, paths: Collection[tuple[str, ...]]) -> tuple[float, float]:
    """Counts a token's numbers that the products with layers' weights of these paths take, and that they make.

    What several of a block's part take counts once: of attention's query, key and value.
    """
    inputs = outputs = 0.0
    for layer, count in all_layers(spec).items():
        weights = [each for each in block_weights(layer, spec) if each.path in paths]
        inputs += count * sum({(each.path[0], each.input): each.taken for each in weights}.values())
        outputs += count * sum(each.used / each.summed for each in weights)
    return inputs, outputs


def _layer_products(spec: ModelSpec) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields the paths of layers' weights that are multiplied, with the elements that a token meets."""
    for layer, count in all_layers(spec).items():
        yield from ((each.path, count * each.used) for each in block_weights(layer, spec) if each.input)


def recomputed_flops(spec: ModelSpec, length: int, execution: Execution, vocab_tiles: int) -> FlopsPerToken:
    """Counts the matrix products per token that the backward pass computes again, beside `flops_per_token`.

    A block computes again what its derivatives need and its policy does not keep, and with more than one tile of the
    loss the logits too. Attention's two products always are, in every kernel, since nothing within them has a name to
    be kept by; a kernel that computes scores again by itself is not counted.
    """
    elements = _head_elements(spec) if vocab_tiles > 1 else 0
    if execution.remat_policy == "none":
        return FlopsPerToken(2.0 * elements, 2.0 * elements)
    kept = {name for names in execution.kept for name in names}
    if "decoder_layer_input" not in kept:
        elements += spec.mtp_num_layers * 2 * spec.emb_dim**2
    in_layers = 0.0
    for layer, count in all_layers(spec).items():
        products = [weight for weight in block_weights(layer, spec) if weight.input and not weight.ends_block]
        again = [weight for weight in products if not weight.spared_by or not kept.issuperset(weight.spared_by)]
        in_layers += count * sum(weight.used for weight in again)
    return _flops(1, elements, in_layers, spec, length)


def _head_elements(spec: ModelSpec) -> int:
    return (1 + spec.mtp_num_layers) * spec.emb_dim * spec.vocab_size


def _flops(passes: int, elements: float, in_layers: float, spec: ModelSpec, length: int) -> FlopsPerToken:
    """Returns the operations of `passes` products with so many weights' elements, and with every layer's keys."""
    causal = palm = 2.0 * passes * (elements + in_layers)
    for layer, count in all_layers(spec).items():
        if scores := layer_costs(layer)["attention"].scores:
            # Both products, scores and weighted values, of one query and one key.
            per_key = passes * count * 2.0 * scores.num_heads * (scores.head_dim + scores.value_dim)
            causal += per_key * mean_keys(scores, length)
            palm += per_key * length
        beside = passes * count * sum(part.products for part in layer_costs(layer).values())
        causal, palm = causal + beside, palm + beside
    return FlopsPerToken(causal, palm, 2.0 * passes * in_layers)


def mean_keys(scores: ScoreSpec, length: int) -> float:
    """Returns how many keys a query attends to on average in a row of one segment."""

    def total(block: int) -> int:
        """Sums the keys over the queries of one block."""
        window = min(scores.window or length, block)
        return window * (window + 1) // 2 + (block - window) * window

    block = min(scores.chunk or length, length)
    return (length // block * total(block) + total(length % block)) / length
