"""Parameters and floating-point operations, counted from the spec."""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import jax

from src.model.decoder import Decoder
from src.model.segments import POLICIES, Execution
from src.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec
from src.model.weights import abstract, values


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
    """Matrix products of a training step a token, forward and backward, rows being `length` long.

    What rematerialisation computes again is `recomputed_flops`.

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
    ahead = spec.layers[-1:] * spec.prediction_layers
    if "decoder_layer_input" not in kept:
        causal = palm = causal + 2.0 * len(ahead) * 2 * spec.emb_dim**2
    for layer in (*spec.layers, *ahead):
        products = _recomputed_attention(layer.attention, spec.emb_dim, kept)
        products += _recomputed_feed_forward(layer, spec.emb_dim, kept)
        a_key = 2.0 * layer.attention.num_query_heads * (layer.attention.head_dim + layer.attention.value_dim)
        causal += 2.0 * products + a_key * _mean_seen(layer.attention, length)
        palm += 2.0 * products + a_key * length
    return FlopsPerToken(causal, palm)


def _recomputed_attention(spec: AttentionSpec, emb_dim: int, kept: Collection[str]) -> int:
    """Elements of the attention weights that a token is multiplied by once more."""
    N, K, H = spec.num_query_heads, spec.num_kv_heads, spec.head_dim
    # The derivative of a norm needs what went into it, and what is kept has come out of it.
    normalised = spec.qk_norm != "none"
    products = 0 if "out_proj" in kept else N * spec.value_dim * emb_dim
    if not spec.latent:
        again = {name: name not in kept for name in ("query_proj", "key_proj", "value_proj")}
        products += emb_dim * N * H * (again["query_proj"] or normalised)
        return products + emb_dim * K * H * ((again["key_proj"] or normalised) + again["value_proj"])
    Q, R = spec.latent.query_rank, spec.latent.kv_rank
    products += emb_dim * (Q + R + spec.latent.rope_dim)
    if "query_proj" not in kept:
        products += (Q or emb_dim) * N * H
    if not {"key_proj", "value_proj"} <= set(kept):
        products += R * N * (spec.latent.nope_dim + spec.value_dim)
    return products


def _recomputed_feed_forward(layer: LayerSpec, emb_dim: int, kept: Collection[str]) -> int:
    """Elements of the feed-forward weights that a token is multiplied by once more."""
    output_needed = layer.norm_after and "mlpwo" not in kept

    def of(spec: FeedForwardSpec, output_needed: bool) -> int:
        factors = 0 if "mlpwi" in kept else len(spec.activations)
        return emb_dim * spec.mlp_dim * (factors + output_needed)

    spec = layer.feed_forward
    if not isinstance(spec, ExpertsSpec):
        return of(spec, output_needed)
    experts = spec.per_token * of(spec.expert, output_needed)
    return emb_dim * spec.count + experts + (of(spec.shared, output_needed) if spec.shared else 0)


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
