"""Parameters and floating-point operations, counted from the spec."""

import math
from dataclasses import dataclass

import jax

from src.model.decoder import Decoder
from src.model.spec import LayerSpec, ModelSpec
from src.model.weights import abstract, shapes


@dataclass(frozen=True)
class FlopsPerToken:
    """Of one training step, forward and backward, without what rematerialisation computes again."""

    causal: float  # attention counted for the tokens it sees: half of the square
    palm: float  # attention counted in full, as in PaLM (Chowdhery et al. 2022, appendix B)


def count_params(spec: ModelSpec) -> int:
    """The model's parameters, without the rows that pad its vocabulary."""
    _, declarations = abstract(lambda rngs: Decoder(spec, rngs))
    physical = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(declarations)))
    tables = 1 if spec.tied_output else 2
    return physical - tables * (spec.padded_vocab_size - spec.vocab_size) * spec.emb_dim


def flops_per_token(spec: ModelSpec, length: int) -> FlopsPerToken:
    """Matrix products of a training step a token, rows being `length` long.

    A product with a weight of n elements takes 2 n operations forward and twice that backward: 6 n. Attention's two
    products take 2 N H S each for a query that sees S keys; S is `length` in PaLM's count, and half of it, plus the
    token itself, on average under a causal mask. Packing's shorter segments are not taken off.
    """
    weights = sum(_layer_weights(layer, spec.emb_dim) for layer in spec.layers) + spec.emb_dim * spec.vocab_size
    heads = sum(layer.attention.num_query_heads * layer.attention.head_dim for layer in spec.layers)
    return FlopsPerToken(
        causal=6.0 * weights + 12.0 * heads * (length + 1) / 2,
        palm=6.0 * weights + 12.0 * heads * length,
    )


def _layer_weights(layer: LayerSpec, emb_dim: int) -> int:
    attention, feed_forward = layer.attention, layer.feed_forward
    projections = 2 * attention.num_query_heads + 2 * attention.num_kv_heads
    factors = len(feed_forward.activations) + 1
    return emb_dim * (projections * attention.head_dim + factors * feed_forward.mlp_dim)
