"""Parameters and floating-point operations, counted from the spec."""

import functools
import math
from dataclasses import dataclass

import jax

from src.model.decoder import Decoder
from src.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec
from src.model.weights import abstract, values


@dataclass(frozen=True)
class FlopsPerToken:
    """Of one training step, forward and backward, without what rematerialisation computes again."""

    causal: float  # attention counted for the tokens it sees: half of the square, a window or a block
    palm: float  # attention counted in full, as in PaLM (Chowdhery et al. 2022, appendix B)


def count_params(spec: ModelSpec) -> int:
    """The model's parameters, without the rows that pad its vocabulary; a router's correction bias is among them."""
    _, declarations = abstract(functools.partial(Decoder, spec))
    physical = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values(declarations)))
    tables = 1 if spec.tied_output else 2
    return physical - tables * (spec.padded_vocab_size - spec.vocab_size) * spec.emb_dim


def count_active_params(spec: ModelSpec) -> int:
    """The parameters that a token goes through: of each layer's experts those it is sent to."""
    layers = [*spec.layers, *(spec.layers[-1:] * spec.prediction_layers)]
    idle = 0
    for layer in layers:
        if isinstance(layer.feed_forward, ExpertsSpec):
            experts = layer.feed_forward
            idle += (experts.count - experts.per_token) * _expert_params(experts, spec.emb_dim)
    return count_params(spec) - idle


def _expert_params(spec: ExpertsSpec, emb_dim: int) -> int:
    factors, mlp_dim = len(spec.expert.activations), spec.expert.mlp_dim
    biases = factors * mlp_dim + emb_dim if spec.expert.bias else 0
    return (factors + 1) * emb_dim * mlp_dim + biases


def flops_per_token(spec: ModelSpec, length: int) -> FlopsPerToken:
    """Matrix products of a training step a token, rows being `length` long.

    A product with a weight of n elements takes 2 n operations forward and twice that backward: 6 n. Attention's two
    products take 2 N H S each for a query that sees S keys; S is `length` in PaLM's count, and under a causal mask the
    mean of what tokens see, half of `length` where no window or block says less. Packing's shorter segments are not
    taken off. Extra prediction layers count with their own projection and logits.
    """
    layers = [*spec.layers, *(spec.layers[-1:] * spec.prediction_layers)]
    weights = sum(_layer_weights(layer, spec.emb_dim) for layer in layers)
    weights += (1 + spec.prediction_layers) * spec.emb_dim * spec.vocab_size
    weights += spec.prediction_layers * 2 * spec.emb_dim**2
    causal = palm = 6.0 * weights
    for layer in layers:
        a_key = 6.0 * layer.attention.num_query_heads * (layer.attention.head_dim + layer.attention.value_dim)
        causal += a_key * _mean_seen(layer.attention, length)
        palm += a_key * length
    return FlopsPerToken(causal, palm)


def _mean_seen(attention: AttentionSpec, length: int) -> float:
    """How many keys a token of a row sees on average, itself among them."""

    def seen(block: int, window: int) -> int:
        """The sum over the tokens of one block."""
        window = min(window, block)
        return window * (window + 1) // 2 + (block - window) * window

    block = min(attention.chunk or length, length)
    window = attention.window or length
    return (length // block * seen(block, window) + seen(length % block, window)) / length


def _layer_weights(layer: LayerSpec, emb_dim: int) -> int:
    """Elements of the weights that a token is multiplied by."""
    feed_forward = layer.feed_forward
    if not isinstance(feed_forward, ExpertsSpec):
        return _attention_weights(layer.attention, emb_dim) + _products(feed_forward, emb_dim)
    experts = feed_forward.per_token * _products(feed_forward.expert, emb_dim) + emb_dim * feed_forward.count
    shared = _products(feed_forward.shared, emb_dim) if feed_forward.shared else 0
    return _attention_weights(layer.attention, emb_dim) + experts + shared


def _products(spec: FeedForwardSpec, emb_dim: int) -> int:
    return emb_dim * (len(spec.activations) + 1) * spec.mlp_dim


def _attention_weights(spec: AttentionSpec, emb_dim: int) -> int:
    N, K, H = spec.num_query_heads, spec.num_kv_heads, spec.head_dim
    if not spec.latent:
        return emb_dim * 2 * (N + K) * H
    Q, R = spec.latent.query_rank, spec.latent.kv_rank
    query = emb_dim * Q + Q * N * H if Q else emb_dim * N * H
    keys_and_values = emb_dim * (R + spec.latent.rope_dim) + R * N * (spec.latent.nope_dim + spec.value_dim)
    return query + keys_and_values + N * spec.value_dim * emb_dim
