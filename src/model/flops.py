"""Counts parameters and floating-point operations, from the weights' declarations and the layers' costs."""

import collections
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from src.model.attention_kernels.scores import ScoreSpec
from src.model.block import Block
from src.model.decoder import Decoder
from src.model.params import abstract, by_path, field, values
from src.model.parts import layer_costs
from src.model.spec import LayerSpec, ModelSpec


class FlopsPerToken(NamedTuple):
    """Floating-point operations per token of matmuls and of layers' `other_flops`, without recomputation.

    Each function says which passes it counts. The two totals differ in the keys that attention counts.
    """

    causal: float  # only the keys that queries see: up to the query's own, and within its window or chunk
    palm: float  # all keys, as in PaLM (Chowdhery et al. 2022, appendix B)
    layers: float = 0.0  # part of both totals: matmuls with layers' weights


@functools.cache  # declaring a hundred layers takes a second
def count_params(spec: ModelSpec) -> int:
    """Counts the model's parameters, including a router's correction bias, without vocabulary padding."""
    _, declarations = abstract(functools.partial(Decoder, spec))
    physical = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values(declarations)))
    tables = 1 if spec.logits_via_embedding else 2
    return physical - (spec.padded_vocab_size - spec.vocab_size) * (tables * spec.emb_dim + spec.logits_bias)


def count_active_params(spec: ModelSpec) -> int:
    """Counts the parameters that a token goes through: in each layer, only the experts that it is sent to."""
    idle = 0
    for layer, count in (all_layers(spec) - repeated_layers(spec)).items():
        idle += count * sum(round(weight.size - weight.used) for weight in block_weights(layer, spec))
    return count_params(spec) - idle


@functools.cache
def all_layers(spec: ModelSpec) -> collections.Counter[LayerSpec]:
    """Counts layers by their settings, including multi-token prediction layers."""
    return collections.Counter([*spec.layers, *(spec.layers[-1:] * spec.mtp_num_layers)])


def repeated_layers(spec: ModelSpec) -> collections.Counter[LayerSpec]:
    """Counts the layers, by their settings, that use the weights of an earlier layer."""
    repeats = (group.pattern * (group.repeats - 1) for group in spec.layer_groups if group.shared)
    return collections.Counter(layer for layers in repeats for layer in layers)


class BlockWeight(NamedTuple):
    """One weight of a block, and how matmuls and a token use it."""

    path: tuple[str, ...]  # in the block
    size: int  # elements
    used: float  # elements that a token uses; experts count only if the token is sent to them
    summed: int  # size of the dims that a matmul sums over
    taken: float  # input activations that a token's matmul reads: `summed`, times the experts that it is sent to
    input: tuple[str | None, ...]  # logical axes of the summed dims; empty: not used in a matmul
    ends_block: bool  # its output is only added to the residual stream
    saved_by: tuple[str, ...]  # arrays that, if saved, avoid recomputing its matmul; empty: always recomputed


@functools.cache
def block_weights(layer: LayerSpec, spec: ModelSpec) -> tuple[BlockWeight, ...]:
    """Lists the weights of a layer, from their declarations and the layer's costs."""
    return tuple(_block_weights(layer, spec))


def _block_weights(layer: LayerSpec, spec: ModelSpec) -> Iterator[BlockWeight]:
    _, declarations = abstract(functools.partial(Block, layer, spec))
    axes, fan_in = (by_path(field(declarations, name)) for name in ("out_sharding", "fan_in"))
    costs = layer_costs(layer)
    for path, leaf in by_path(values(declarations)).items():
        size, part, name = math.prod(leaf.shape), costs.get(path[0]), path[-1]
        used = part.active * size if part and "expert" in axes[path] else 1.0 * size
        added = layer.normalization_placement == "before"  # its output goes directly to the residual stream
        ends_block = added and part is not None and path[0] == "feed_forward" and name == part.output_weight
        saved_by = part.saved_by.get(name, ()) if part else ()
        summed = math.prod(leaf.shape[dim] for dim in fan_in[path])
        taken = summed * used / size * (leaf.shape[0] if "expert" in axes[path] else 1)
        input_axes = tuple(axes[path][dim] for dim in fan_in[path])
        yield BlockWeight(path, size, used, summed, taken, input_axes, ends_block, saved_by)


def flops_per_token(spec: ModelSpec, length: int) -> FlopsPerToken:
    """Counts the matmuls of a training step per token, forward and backward, for sequences of `length` tokens.

    A matmul with a weight of n elements takes 2 n operations forward and twice that backward: 6 n. Attention's two
    matmuls take 2 N H S each for a query that attends to S keys; S is `length` in PaLM's count, and the mean under a
    causal mask otherwise, half of `length` without window or chunk. Shorter segments from packing are not subtracted.
    Other operations come from a layer's `costs`. Multi-token prediction layers count with their own projection and
    logits.
    """
    elements = head_elements(spec) + spec.mtp_num_layers * 2 * spec.emb_dim**2
    return matmul_flops(3, elements, sum(used for _, used in layer_matmuls(spec)), spec, length)


def layer_matmuls(spec: ModelSpec) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields the paths of layers' weights used in matmuls, with the elements a token uses, over all equal layers."""
    for layer, count in all_layers(spec).items():
        yield from ((each.path, count * each.used) for each in block_weights(layer, spec) if each.input)


def head_elements(spec: ModelSpec) -> int:
    """Counts the elements of the output projection, once for each token that a position predicts."""
    return (1 + spec.mtp_num_layers) * spec.emb_dim * spec.vocab_size


def matmul_flops(
    passes: int, elements: float, in_layers: float, spec: ModelSpec, length: int, attends: bool = True
) -> FlopsPerToken:
    """Counts a token's operations in `passes` passes; a forward pass is one, a backward pass two.

    These are matmuls with the weights that the token uses, `elements` outside and `in_layers` inside the layers;
    attention's matmuls, if `attends`; and the layers' `other_flops`.
    """
    causal = palm = 2.0 * passes * (elements + in_layers)
    for layer, count in all_layers(spec).items():
        if attends and (scores := layer_costs(layer)["attention"].scores):
            # Both matmuls, scores and weighted values, of one query and one key.
            per_key = passes * count * 2.0 * scores.num_heads * (scores.head_dim + scores.value_dim)
            causal += per_key * mean_keys(scores, length)
            palm += per_key * length
        beside = passes * count * sum(part.other_flops for part in layer_costs(layer).values())
        causal, palm = causal + beside, palm + beside
    return FlopsPerToken(causal, palm, 2.0 * passes * in_layers)


def mean_keys(scores: ScoreSpec, length: int) -> float:
    """Mean number of keys that a query sees in a sequence of one segment."""

    def total(block: int) -> int:
        """Sums the keys over the queries of one block."""
        window = min(scores.window or length, block)
        return window * (window + 1) // 2 + (block - window) * window

    block = min(scores.chunk or length, length)
    return (length // block * total(block) + total(length % block)) / length
