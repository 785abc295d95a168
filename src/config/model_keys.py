"""The keys that describe a model: the section `config.model`."""

import dataclasses
from typing import Any

from src.config import keys
from src.config.keys import FROM_0, FROM_1, FROM_1_OR_UNSET, POSITIVE, POWER_OF_2, SHARE_ABOVE_0, fact, group, key


# fmt: off
@group
class ModelSize:
    """Model: its size"""
    global_parameter_scale: int = key(1,
        "a power of two that multiplies the parameters: heads and mlp, then embedding, then layers", POWER_OF_2, 2**20)
    base_emb_dim: int = key(2048, "D, width of the residual stream", FROM_1, 2**20)
    base_mlp_dim: int = fact(7168, "F, hidden width of the feed-forward layer", FROM_1, 2**20)
    base_num_decoder_layers: int = key(16, "L", FROM_1, 2**10)
    base_num_query_heads: int = fact(16, "N", FROM_1, 2**16)
    base_num_kv_heads: int = fact(16, "K; fewer than N: grouped-query attention", FROM_1, 2**16)
    head_dim: int = fact(128, "H", FROM_1, 2**16)
    vocab_size: int = key(32_000, "V; padded inside to what sharding needs, never seen outside", FROM_1, 2**24)


@group
class LayerFacts:
    """Model: facts about its layers (most may differ from layer to layer: decoder_segments)"""
    decoder_segments: tuple = key((),
        "layers that differ: [{repeats: n, shared: false, pattern: [{fact: value, ...}, ...]}, ...]")
    normalization: str = fact("rms", "rms: RMSNorm, a scale; layer: LayerNorm, scale and bias", ("rms", "layer"))
    normalization_layer_epsilon: float = fact(1e-5, "added to the variance under the root", POSITIVE)
    normalization_scale_offset: float = fact(0.0, "added to a norm's stored scale (Gemma: 1)", FROM_0)
    normalization_placement: str = fact("before", "attention and feed-forward: before, after (their output) or both",
        ("before", "after", "both"))
    dropout_rate: float = fact(0.0, "on the embedding's and on each residual branch's output", keys.BELOW_1)
    logits_via_embedding: bool = key(False, "the output projection is the embedding table, transposed")
    logits_bias: bool = key(False, "a learned bias of each logit (Pax's C4 models)")
    scale_embedding: bool = key(False, "embeddings times the root of their width (Gemma)")
    embedding_multiplier: float = key(1.0, "embeddings times this (Granite)", POSITIVE)
    layer_scalar: bool = fact(False, "the layer's output times a number of its own that is not trained (Gemma 4)")
    residual_multiplier: float = fact(1.0, "the outputs of attention and feed-forward times this (Granite)", POSITIVE)
    logits_scaling: float = key(1.0, "logits are divided by this (Granite)", POSITIVE)
    final_logits_soft_cap: float = key(0.0, "c: logits become c * tanh(logits / c); 0: off", FROM_0)
    mtp_num_layers: int = key(0, "extra layers that predict further tokens, in training (DeepSeek V3)", FROM_0, 2**4)


@group
class AttentionFacts:
    """Model: attention"""
    attention_type: str = fact("global",
        "global, local_sliding (a window), chunk (blocks), mla (latent) or gated_delta (linear attention)",
        ("global", "local_sliding", "chunk", "mla", "gated_delta"))
    sliding_window_size: int = fact(0, "local_sliding: tokens a token sees, itself among them", FROM_0, 2**24)
    chunk_attn_window_size: int = fact(0, "chunk: positions a block has; a token sees its own block", FROM_0, 2**24)
    attention_bias: bool = fact(False, "biases in the projections of queries, keys and values", excluded_by="mla")
    attention_out_bias: bool = fact(True, "attention_bias: in the output projection too")
    attention_gate: bool = fact(False, "attention's output times the sigmoid of a projection", excluded_by="mla")
    attention_sink: bool = fact(False, "a learned logit per head: weight without a value (gpt-oss)", excluded_by="mla")
    attn_logits_soft_cap: float = fact(0.0, "c: scores become c * tanh(scores / c); 0: off", FROM_0, excluded_by="mla")
    query_pre_attn_scalar: float = fact(0.0, "scores are divided by its root; 0: that of a query head's size", FROM_0)
    qk_norm: str = fact("none", "of queries and keys: head (each), all_heads (at once), l2 (after RoPE, no scale)",
        ("none", "head", "all_heads", "l2"), excluded_by="mla")
    share_kv_projections: bool = fact(False,
        "values are what the keys' projection makes, before qk_norm and RoPE (Gemma 4)", excluded_by="mla")
    value_norm: bool = fact(False, "each head's values are normalised, without a scale (Gemma 4)", excluded_by="mla")
    query_dim_scale: bool = fact(False, "a learned scale of each dim of a query head (Pax's C4 models)",
        excluded_by="mla")
    attn_temperature_scale: float = fact(0.0,
        "s: queries times 1 + s * log(1 + floor((1 + position) / attn_temperature_floor)) (Llama 4)",
        FROM_0, excluded_by="mla")
    attn_temperature_floor: int = fact(8192, "positions the queries' temperature stays the same for", FROM_1, 2**24)
    q_lora_rank: int = fact(0, "mla: width of the compressed query; 0: it is not compressed", FROM_0, 2**20)
    kv_lora_rank: int = fact(0, "mla: width of the compressed keys and values, which the cache holds", FROM_0, 2**20)
    qk_nope_head_dim: int = fact(0, "mla: size of a query head's part without positions", FROM_0, 2**16)
    qk_rope_head_dim: int = fact(0, "mla: size of its rotary part, whose key all heads share", FROM_0, 2**16)
    v_head_dim: int = fact(0, "mla: size of a value head", FROM_0, 2**16)
    latent_norm_epsilon: float = fact(0.0, "mla: epsilon of the norms on what is compressed; 0: that of others", FROM_0)
    gdn_num_key_heads: int = fact(16, "gated_delta: heads of queries and keys", FROM_1, 2**16)
    gdn_num_value_heads: int = fact(32, "gated_delta: heads of values, a multiple; each has a state", FROM_1, 2**16)
    gdn_key_head_dim: int = fact(128, "gated_delta: size of a query or key", FROM_1, 2**16)
    gdn_value_head_dim: int = fact(128, "gated_delta: size of a value", FROM_1, 2**16)
    gdn_conv_kernel_dim: int = fact(4, "gated_delta: tokens that the convolution before it sums over", FROM_1, 2**10)


@group
class PositionFacts:
    """Model: positions"""
    position_type: str = fact("rope", "rope, learned, sinusoidal or none", ("rope", "learned", "sinusoidal", "none"))
    trainable_position_size: int = key(-1, "learned: rows of the table; -1: max_target_length", FROM_1_OR_UNSET, 2**24)
    rope_max_timescale: int = fact(10_000, "rope: longest wavelength over 2 pi (theta)", POSITIVE, 2**40)
    rope_interleave: bool = fact(False, "rope: pairs (2i, 2i + 1) rotate, not (i, i + half) (DeepSeek, Llama 4)")
    partial_rotary_factor: float = fact(1.0,
        "rope rotates this first fraction of a head; rope_type=proportional: of its pairs (Gemma 4)", SHARE_ABOVE_0)
    rope_type: str = fact("default", "for longer contexts; default: off; dynamic, longrope: by max_target_length",
        ("default", "linear", "llama3.1", "yarn", "dynamic", "longrope", "proportional"))
    rope_factor: float = fact(1.0, "how many times longer", FROM_1)
    original_max_position_embeddings: int = fact(8192, "not linear: the length trained on before", FROM_1, 2**24)
    rope_short_factor: tuple = fact((), "longrope: how much each pair is stretched up to the original length")
    rope_long_factor: tuple = fact((), "longrope: how much where max_target_length is longer; as many as pairs")
    rope_attention_factor: float = fact(0.0, "yarn, longrope: rotated heads times this; 0: by rope_factor", FROM_0)
    rope_low_freq_factor: float = fact(1.0, "llama3.1: waves above the original length / this are stretched", POSITIVE)
    rope_high_freq_factor: float = fact(4.0, "llama3.1: waves below the original length / this stay", POSITIVE)
    beta_fast: float = fact(32.0, "yarn: pairs that turn more often in the original length stay", POSITIVE)
    beta_slow: float = fact(1.0, "yarn: pairs that turn less often in it are stretched", POSITIVE)
    rope_truncate: bool = fact(True, "yarn: the two bounds are rounded to whole pairs")
    mscale: float = fact(0.0,
        "m; yarn: rotated heads are times 1 + 0.1 m log(rope_factor), over the same of mscale_all_dim", FROM_0)
    mscale_all_dim: float = fact(0.0, "mla: scores times its square; either 0: m is 1, nothing is divided by", FROM_0)


@group
class FeedForwardFacts:
    """Model: feed-forward layers and experts"""
    mlp_activations: tuple = fact(("silu", "linear"),
        "the factors of the feed-forward layer: [silu, linear] is SwiGLU, [gelu] is plain")
    mlp_activations_limit: float = fact(0.0, "gate at most this, others within +- this, then activated; 0: off", FROM_0)
    mlp_bias: bool = fact(False, "biases in the feed-forward layer")
    num_experts: int = fact(1, "E; 1: the layer is dense", FROM_1, 2**16)
    num_experts_per_tok: int = fact(1, "experts a token goes through", FROM_1, 2**16)
    base_moe_mlp_dim: int = fact(0, "F of an expert; 0: base_mlp_dim", FROM_0, 2**20)
    shared_experts: int = fact(0, "width of the feed-forward layer beside the experts, in experts", FROM_0, 2**10)
    shared_expert_gate: bool = fact(False, "the shared experts' output times the sigmoid of a projection")
    routed_score_func: str = fact("softmax", "of the router's logits: softmax or sigmoid", ("softmax", "sigmoid"))
    router_bias: bool = fact(False, "a trained bias in the router (gpt-oss)")
    routed_bias: bool = fact(False, "a bias that corrects the choice of experts, without gradient (DeepSeek V3)")
    n_routing_groups: int = fact(1, "groups of experts", FROM_1, 2**16)
    topk_routing_group: int = fact(1, "groups a token chooses its experts from", FROM_1, 2**16)
    routing_group_score: str = fact("max",
        "a group's score: max of its experts' (DeepSeek V2), or top2: the sum of the best two (V3)", ("max", "top2"))
    norm_topk_prob: bool = fact(False, "the chosen scores are divided by their sum")
    routed_scaling_factor: float = fact(1.0, "the chosen scores times this", POSITIVE)
    scale_expert_inputs: bool = fact(False, "scores multiply the experts' inputs, not their outputs (Llama 4)")
    capacity_factor: float = fact(-1.0,
        "times the mean, what an expert takes of a row, the rest is dropped; -1: all", keys.ABOVE_0_OR_UNSET, 2**16)
# fmt: on


def _scaled(base: str, turn: int) -> Any:
    """Makes the property of a size, which every third doubling of the model's scale doubles."""

    def size(model: "Model") -> int:
        doublings = model.global_parameter_scale.bit_length() - 1
        return getattr(model, base) * 2 ** ((doublings + turn) // 3)

    return property(size)


@dataclasses.dataclass(frozen=True)
class Model(ModelSize, LayerFacts, AttentionFacts, PositionFacts, FeedForwardFacts):
    """Describes a model, or one layer of it with the facts that its pattern gives it in `decoder_segments`.

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
        """Returns F of an expert."""
        return self._expert_dim or self.mlp_dim
