"""The keys that describe a model: the section `config.model`."""

import dataclasses
from typing import Any

from src.config.attention_types import ATTENTION_TYPES
from src.config.keys import (
    ABOVE_0_OR_UNSET,
    BELOW_1,
    FROM_0,
    FROM_1,
    FROM_1_OR_UNSET,
    POSITIVE,
    POWER_OF_2,
    SHARE_ABOVE_0,
    choice,
    group,
    key,
)


# fmt: off
@group
class ModelSize:
    """Model: its size"""
    global_parameter_scale: int = key(1,
        "power of 2 that scales the parameters: heads and mlp, then embedding, then layers", POWER_OF_2, 2**20)
    base_emb_dim: int = key(2048, "D, width of the residual stream", FROM_1, 2**20)
    base_num_decoder_layers: int = key(16, "L, number of layers", FROM_1, 2**10)
    decoder_segments: tuple = key((),
        "layers that differ: [{repeats: n, shared: false, pattern: [{key: value}, ...]}]")


@group
class LayerSize:
    """Model: sizes of a layer (these keys, and those from norms to experts, may differ by layer: decoder_segments)"""
    base_mlp_dim: int = key(7168, "F, hidden width of the feed-forward layer", FROM_1, 2**20)
    base_moe_mlp_dim: int = key(0, "F of an expert; 0: base_mlp_dim", FROM_0, 2**20)
    base_num_query_heads: int = key(16, "N, query heads", FROM_1, 2**16)
    base_num_kv_heads: int = key(16, "K, key and value heads; fewer than N: grouped-query attention", FROM_1, 2**16)


@group
class EmbeddingSettings:
    """Model: embeddings and logits"""
    vocab_size: int = key(32_000, "V; padded internally to suit sharding, invisible outside", FROM_1, 2**24)
    trainable_position_size: int = key(-1, "learned: rows of the table; -1: max_target_length", FROM_1_OR_UNSET, 2**24)
    scale_embedding: bool = key(False, "multiply embeddings by the square root of their width (Gemma)")
    embedding_multiplier: float = key(1.0, "multiply embeddings by this (Granite)", POSITIVE)
    logits_via_embedding: bool = key(False, "use the transposed embedding table as output projection")
    logits_bias: bool = key(False, "a learned bias for each logit (Pax's C4 models)")
    logits_scaling: float = key(1.0, "divide logits by this (Granite)", POSITIVE)
    final_logits_soft_cap: float = key(0.0, "c: logits become c * tanh(logits / c); 0: off", FROM_0)
    mtp_num_layers: int = key(0, "extra layers that predict further tokens during training (DeepSeek V3)", FROM_0, 2**4)


@group
class NormSettings:
    """Model: norms"""
    normalization: str = key("rms", "rms: RMSNorm (scale); layer: LayerNorm (scale and bias)", ("rms", "layer"))
    normalization_layer_epsilon: float = key(1e-5, "added to the variance under the square root", POSITIVE)
    normalization_scale_offset: float = key(0.0, "added to a norm's stored scale (Gemma: 1)", FROM_0)


@group
class BlockSettings:
    """Model: residual branches"""
    normalization_placement: str = key("before",
        "norms before attention and feed-forward, after (on their output) or both",
        ("before", "after", "both"))
    dropout_rate: float = key(0.0, "on the embeddings and on the output of each residual branch", BELOW_1)
    residual_multiplier: float = key(1.0,
        "multiply the outputs of attention and feed-forward by this (Granite)", POSITIVE)
    layer_scalar: bool = key(False, "multiply each layer's output by an untrained number of the layer (Gemma 4)")


@group
class AttentionSettings:
    """Model: attention"""
    attention_type: str = choice("global", "How a layer mixes its tokens", ATTENTION_TYPES)
    head_dim: int = key(128, "H, head size", FROM_1, 2**16)
    sliding_window_size: int = key(0,
        "local_sliding: number of tokens that a token sees, including itself", FROM_0, 2**24)
    chunk_attn_window_size: int = key(0, "chunk: positions per block; a token sees only its own block", FROM_0, 2**24)
    attention_bias: bool = key(False, "biases in the projections of queries, keys and values")
    attention_out_bias: bool = key(True, "attention_bias: also in the output projection")
    attention_gate: bool = key(False, "multiply attention's output by the sigmoid of a projection")
    attention_sink: bool = key(False,
        "a learned logit per head that takes weight but has no value (gpt-oss)")
    attn_logits_soft_cap: float = key(0.0, "c: scores become c * tanh(scores / c); 0: off", FROM_0)
    query_pre_attn_scalar: float = key(0.0,
        "divide scores by the square root of this; 0: of the query head size", FROM_0)
    qk_norm: str = key("none", "norm queries and keys: head (each), all_heads (jointly), l2 (after RoPE, no scale)",
        ("none", "head", "all_heads", "l2"))
    share_kv_projections: bool = key(False,
        "values are the key projection's output, before qk_norm and RoPE (Gemma 4)")
    value_norm: bool = key(False, "normalise each head's values, without a scale (Gemma 4)")
    query_dim_scale: bool = key(False, "a learned scale for each dim of a query head (Pax's C4 models)")
    attn_temperature_scale: float = key(0.0,
        "s: query scale 1 + s log(1 + floor((1 + pos) / attn_temperature_floor)) (Llama 4)",
        FROM_0)
    attn_temperature_floor: int = key(8192, "number of positions that share one query temperature", FROM_1, 2**24)
    q_lora_rank: int = key(0, "mla: width of the compressed query; 0: not compressed", FROM_0, 2**20)
    kv_lora_rank: int = key(0, "mla: width of the compressed keys and values, which the cache holds", FROM_0, 2**20)
    qk_nope_head_dim: int = key(0, "mla: size of a query head's part without positions", FROM_0, 2**16)
    qk_rope_head_dim: int = key(0, "mla: size of a query head's rotary part; all heads share its key", FROM_0, 2**16)
    v_head_dim: int = key(0, "mla: size of a value head", FROM_0, 2**16)
    latent_norm_epsilon: float = key(0.0,
        "mla: epsilon of the norms of compressed queries, keys, values; 0: as other norms", FROM_0)
    gdn_num_key_heads: int = key(16, "gated_delta: query and key heads", FROM_1, 2**16)
    gdn_num_value_heads: int = key(32,
        "gated_delta: value heads, a multiple of the key heads; each has a state", FROM_1, 2**16)
    gdn_key_head_dim: int = key(128, "gated_delta: size of a query or key", FROM_1, 2**16)
    gdn_value_head_dim: int = key(128, "gated_delta: size of a value", FROM_1, 2**16)
    gdn_conv_kernel_dim: int = key(4, "gated_delta: tokens that its input convolution sums over", FROM_1, 2**10)


@group
class PositionSettings:
    """Model: positions"""
    position_type: str = key("rope", "rope, learned, sinusoidal or none", ("rope", "learned", "sinusoidal", "none"))
    rope_max_timescale: int = key(10_000,
        "rope: theta; pair i of n rotates by theta^(-i/n) radians per position", POSITIVE, 2**40)
    rope_interleave: bool = key(False, "rope: rotate pairs (2i, 2i + 1), not (i, i + half) (DeepSeek, Llama 4)")
    partial_rotary_factor: float = key(1.0,
        "rope: rotated share of a head, or if rope_type=proportional of its pairs (Gemma 4)", SHARE_ABOVE_0)
    rope_type: str = key("default", "for longer contexts; default: off; dynamic and longrope use max_target_length",
        ("default", "linear", "llama3.1", "yarn", "dynamic", "longrope", "proportional"))
    rope_factor: float = key(1.0, "context extension: how many times longer", FROM_1)
    original_max_position_embeddings: int = key(8192,
        "llama3.1, yarn, dynamic, longrope: sequence length of earlier training", FROM_1, 2**24)
    rope_short_factor: tuple = key((), "longrope: stretch of each pair up to the original length")
    rope_long_factor: tuple = key((), "longrope: stretch of each pair if max_target_length is longer")
    rope_attention_factor: float = key(0.0,
        "yarn, longrope: multiply rotated heads by this; 0: computed from rope_factor", FROM_0)
    rope_low_freq_factor: float = key(1.0, "llama3.1: stretch wavelengths above the original length / this", POSITIVE)
    rope_high_freq_factor: float = key(4.0,
        "llama3.1: do not change wavelengths below the original length / this", POSITIVE)
    beta_fast: float = key(32.0, "yarn: do not change pairs that turn more often in the original length", POSITIVE)
    beta_slow: float = key(1.0, "yarn: stretch pairs that turn less often in the original length", POSITIVE)
    rope_truncate: bool = key(True, "yarn: round the two bounds to whole pairs")
    mscale: float = key(0.0,
        "yarn: rotated heads x f(this)/f(mscale_all_dim), f(m) = 1 + 0.1 m log(rope_factor)", FROM_0)
    mscale_all_dim: float = key(0.0, "mla: scores x f(this) squared; if either is 0, rotated heads x f(1)", FROM_0)


@group
class FeedForwardSettings:
    """Model: feed-forward layers and experts"""
    mlp_activations: tuple = key(("silu", "linear"),
        "factors of the feed-forward layer: [silu, linear] is SwiGLU, [gelu] is plain")
    mlp_activations_limit: float = key(0.0,
        "before activation, clip the gate at this, other factors to +- this; 0: off", FROM_0)
    mlp_bias: bool = key(False, "biases in the feed-forward layer")
    num_experts: int = key(1, "E, number of experts; 1: a dense layer", FROM_1, 2**16)
    num_experts_per_tok: int = key(1, "experts per token", FROM_1, 2**16)
    shared_experts: int = key(0, "width of the shared feed-forward layer, in expert widths", FROM_0, 2**10)
    shared_expert_gate: bool = key(False, "multiply the shared experts' output by the sigmoid of a projection")
    routed_score_func: str = key("softmax", "router scores: softmax or sigmoid of the logits", ("softmax", "sigmoid"))
    router_bias: bool = key(False, "a trained bias in the router (gpt-oss)")
    routed_bias: bool = key(False, "a bias, updated without gradients, for the choice of experts (DeepSeek V3)")
    n_routing_groups: int = key(1, "number of groups of experts", FROM_1, 2**16)
    topk_routing_group: int = key(1, "groups that a token chooses its experts from", FROM_1, 2**16)
    routing_group_score: str = key("max",
        "group score: max over its experts (DeepSeek V2), or sum of the best two (top2, V3)", ("max", "top2"))
    norm_topk_prob: bool = key(False, "divide the chosen scores by their sum")
    routed_scaling_factor: float = key(1.0, "multiply the chosen scores by this", POSITIVE)
    scale_expert_inputs: bool = key(False, "multiply the experts' inputs by the scores, not their outputs (Llama 4)")
    capacity_factor: float = key(-1.0,
        "expert capacity per sequence = this x mean load; overflow is dropped; -1: dropless",
        ABOVE_0_OR_UNSET, 2**16)
# fmt: on


def _scaled(base: str, turn: int) -> Any:
    """Makes a property: the size `base`, doubled by every third doubling of the scale, from number 3 - `turn` on."""

    def size(model: "Model") -> int:
        doublings = model.global_parameter_scale.bit_length() - 1
        return getattr(model, base) * 2 ** ((doublings + turn) // 3)

    return property(size)


@dataclasses.dataclass(frozen=True)
class LayerSettings(NormSettings, BlockSettings, AttentionSettings, PositionSettings, FeedForwardSettings):
    """The settings of a layer, except its sizes."""


@dataclasses.dataclass(frozen=True)
class LayerKeys(LayerSize, LayerSettings):
    """The keys that a pattern in `decoder_segments` may give a layer."""


@dataclasses.dataclass(frozen=True)
class Model(ModelSize, EmbeddingSettings, LayerKeys):
    """Describes a model, or one layer with the settings that its pattern in `decoder_segments` gives it.

    The sizes without `base_` are those at `global_parameter_scale`. Parameters grow with layers x emb x mlp, so each
    doubling of the scale doubles one of them in turn: mlp (and heads), then emb, then layers.
    """

    num_decoder_layers = _scaled("base_num_decoder_layers", 0)
    emb_dim = _scaled("base_emb_dim", 1)
    mlp_dim = _scaled("base_mlp_dim", 2)
    num_query_heads = _scaled("base_num_query_heads", 2)
    num_kv_heads = _scaled("base_num_kv_heads", 2)
    _expert_dim = _scaled("base_moe_mlp_dim", 2)

    @property
    def moe_mlp_dim(self) -> int:
        """Hidden width F of an expert at the model's scale; `mlp_dim` if `base_moe_mlp_dim` is 0."""
        return self._expert_dim or self.mlp_dim
