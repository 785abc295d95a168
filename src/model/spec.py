"""Describes a model as data: frozen specs made from the config, one entry per layer, and how equal layers repeat.

Tensor letters, here and in every file of the model: B batch, T query position, S key position, D embedding,
F feed-forward hidden, N query heads, K key/value heads, H head size, A factors of a feed-forward layer, E experts,
M tokens sorted by expert, Q compressed query, R compressed keys and values, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from src.config.schema import scaled_sizes
from src.model.attention_kernels.scores import ScoreSpec

VOCAB_MULTIPLE = 128  # the physical vocabulary is a multiple of this: it shards over powers of two up to it


@dataclass(frozen=True)
class NormSpec:
    """A normalisation: `kind` is rms (a scale) or layer (a scale and a bias)."""

    kind: str
    epsilon: float
    scale_offset: float = 0.0  # added to the stored scale


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of the first `dim` of a head, and how they extend to longer contexts."""

    dim: int
    max_timescale: float
    interleave: bool = False  # pairs (2i, 2i + 1), not (i, i + dim / 2)
    kind: str = "default"  # default, linear, llama3.1 or yarn
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 1.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention's sizes (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    query_rank: int  # Q; 0: the query is not compressed
    kv_rank: int  # R
    nope_dim: int  # of a query and key head, without positions
    rope_dim: int  # of a query head, and of the key that all heads share
    value_dim: int
    norm_epsilon: float  # of the norms on what is compressed


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of N heads; a token attends to its segment's tokens up to itself, within `window` or `chunk`."""

    num_query_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H of queries and keys
    scale: float  # of q k
    rope: RopeSpec | None
    latent: LatentSpec | None = None
    window: int = 0  # tokens attended to, the token itself among them; 0: all
    chunk: int = 0  # positions of a block, within which tokens attend; 0: one block
    soft_cap: float = 0.0
    bias: bool = False  # on queries, keys and values
    out_bias: bool = False
    sink: bool = False
    qk_norm: str = "none"  # none, head, all_heads or l2
    temperature_scale: float = 0.0
    temperature_floor: int = 1

    @property
    def scores(self) -> ScoreSpec:
        """Returns what the attention kernel computes."""
        value_dim = self.latent.value_dim if self.latent else self.head_dim
        return ScoreSpec(
            self.num_query_heads,
            self.head_dim,
            value_dim,
            self.scale,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            sink=self.sink,
        )


@dataclass(frozen=True)
class FeedForwardSpec:
    """A feed-forward layer whose hidden array is the product of one factor per activation."""

    mlp_dim: int  # F
    activations: tuple[str, ...]
    bias: bool
    limit: float = 0.0  # factors are clipped to it; 0: not clipped


@dataclass(frozen=True)
class ExpertsSpec:
    """A layer of `count` experts, each a feed-forward layer, and its router."""

    count: int  # E
    per_token: int
    expert: FeedForwardSpec
    shared: FeedForwardSpec | None  # beside them, for every token
    score_func: str  # softmax or sigmoid
    router_bias: bool
    correction_bias: bool
    groups: int
    groups_per_token: int
    group_score: str  # max or top2
    normalise: bool
    scaling: float
    scale_inputs: bool
    capacity_factor: float  # -1: no choice is dropped


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Layers of one `shared_weights` name share one set of weights; "": it has its own."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    norm: NormSpec
    norm_before: bool
    norm_after: bool
    dropout_rate: float
    shared_weights: str = ""


@dataclass(frozen=True)
class LayerGroup:
    """A pattern of layers, run `repeats` times; with `shared` every repeat uses the same weights."""

    pattern: tuple[LayerSpec, ...]
    repeats: int
    shared: bool


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Transformer: its layers, and what comes before and after them."""

    emb_dim: int  # D
    vocab_size: int  # V, as the tokenizer and a user see it
    layers: tuple[LayerSpec, ...]
    position_table: str  # added to the embedding: "learned", "sinusoidal" or "" for none
    position_table_size: int  # rows of a learned table
    final_norm: NormSpec
    scale_embedding: bool
    mtp_num_layers: int  # extra ones that predict further tokens, each like the last layer
    tied_output: bool
    final_logits_soft_cap: float
    dropout_rate: float
    weight_dtype: str
    dtype: str
    stacked: bool = True  # weights of repeated layers are stacked, for a scan over them; else each has its own arrays

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups the layers as weights and caches are nested."""
        groups = group_layers(self.layers)
        if self.stacked:
            return groups
        return tuple(g if g.shared else LayerGroup(g.pattern * g.repeats, 1, shared=False) for g in groups)

    @property
    def largest_group(self) -> int:
        """Returns the index of the first group with the most layers: the one that pipeline stages split."""
        groups = self.layer_groups
        return max(range(len(groups)), key=lambda index: len(groups[index].pattern) * groups[index].repeats)

    @property
    def has_experts(self) -> bool:
        """Returns whether any layer has experts."""
        return any(isinstance(layer.feed_forward, ExpertsSpec) for layer in self.layers)

    @property
    def padded_vocab_size(self) -> int:
        """Returns the embedding's rows and the output projection's columns; those past `vocab_size` are masked."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the model that the config describes."""
    learned = config["position_type"] == "learned"
    table_size = config["trainable_position_size"]
    return ModelSpec(
        emb_dim=scaled_sizes(config)["emb_dim"],
        vocab_size=config["vocab_size"],
        layers=layer_specs(config),
        position_table=config["position_type"] if config["position_type"] in ("learned", "sinusoidal") else "",
        position_table_size=(config["max_target_length"] if table_size == -1 else table_size) if learned else 0,
        final_norm=_norm(config),
        scale_embedding=config["scale_embedding"],
        mtp_num_layers=config["mtp_num_layers"],
        tied_output=config["logits_via_embedding"],
        final_logits_soft_cap=config["final_logits_soft_cap"],
        dropout_rate=config["dropout_rate"],
        weight_dtype=config["weight_dtype"],
        dtype=config["dtype"],
    )


def layer_specs(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Returns one spec per layer, first to last: the config's facts, overridden by `decoder_segments`' patterns."""
    return tuple(_layer(facts, shared_weights) for facts, shared_weights in layer_facts(config))


def layer_facts(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Returns each layer's keys, and the name of the weights it shares; "": it has its own."""
    num_layers = scaled_sizes(config)["num_decoder_layers"]
    if not config["decoder_segments"]:
        return [(config, "")] * num_layers
    lengths = [entry.get("repeats", 1) * len(entry["pattern"]) for entry in config["decoder_segments"]]
    rest = num_layers - sum(length for length in lengths if length > 0)
    layers: list[tuple[Mapping[str, Any], str]] = []
    for index, entry in enumerate(config["decoder_segments"]):
        pattern, repeats = entry["pattern"], entry.get("repeats", 1)
        if repeats == -1:
            repeats = rest // len(pattern)
        shared = entry.get("shared", False)
        layers += repeats * [
            ({**config, **facts}, f"{index}.{position}" if shared else "") for position, facts in enumerate(pattern)
        ]
    assert len(layers) == num_layers, "config.load checks that decoder_segments add up"
    return layers


def _layer(facts: Mapping[str, Any], shared_weights: str = "") -> LayerSpec:
    return LayerSpec(
        attention=_attention(facts),
        feed_forward=_feed_forward(facts),
        norm=_norm(facts),
        norm_before=facts["normalization_placement"] in ("before", "both"),
        norm_after=facts["normalization_placement"] in ("after", "both"),
        dropout_rate=facts["dropout_rate"],
        shared_weights=shared_weights,
    )


def _norm(facts: Mapping[str, Any]) -> NormSpec:
    return NormSpec(
        facts["normalization"], facts["normalization_layer_epsilon"], float(facts["normalization_scale_offset"])
    )


def _attention(facts: Mapping[str, Any]) -> AttentionSpec:
    sizes, kind = scaled_sizes(facts), facts["attention_type"]
    latent = None
    if kind == "mla":
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        epsilon = facts["latent_norm_epsilon"] or facts["normalization_layer_epsilon"]
        latent = LatentSpec(*(facts[name] for name in names), epsilon)
    head_dim = latent.nope_dim + latent.rope_dim if latent else facts["head_dim"]
    rope = _rope(facts, latent.rope_dim if latent else head_dim) if facts["position_type"] == "rope" else None
    scale = 1.0 / math.sqrt(facts["query_pre_attn_scalar"] or head_dim)
    if rope and rope.kind == "yarn" and latent and rope.mscale_all_dim:
        # DeepSeek: mscale_all_dim scales the whole score here; embeddings.py scales the rotated part by mscale over it.
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return AttentionSpec(
        num_query_heads=sizes["num_query_heads"],
        num_kv_heads=sizes["num_query_heads"] if latent else sizes["num_kv_heads"],
        head_dim=head_dim,
        scale=scale,
        rope=rope,
        latent=latent,
        window=facts["sliding_window_size"] if kind == "local_sliding" else 0,
        chunk=facts["chunk_attn_window_size"] if kind == "chunk" else 0,
        soft_cap=float(facts["attn_logits_soft_cap"]),
        bias=facts["attention_bias"],
        out_bias=facts["attention_bias"] and facts["attention_out_bias"],
        sink=facts["attention_sink"],
        qk_norm=facts["qk_norm"],
        temperature_scale=float(facts["attn_temperature_scale"]),
        temperature_floor=facts["attn_temperature_floor"],
    )


# Per rope_type, the fields of RopeSpec and the keys they come from.
ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3.1": {
        "factor": "rope_factor",
        "original_length": "original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "rope_truncate",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}


def _rope(facts: Mapping[str, Any], head_dim: int) -> RopeSpec:
    kind = facts["rope_type"]
    return RopeSpec(
        dim=int(head_dim * facts["partial_rotary_factor"]),
        max_timescale=float(facts["rope_max_timescale"]),
        interleave=facts["rope_interleave"],
        kind=kind,
        **{field: facts[key] for field, key in ROPE_FIELDS[kind].items()},
    )


def _feed_forward(facts: Mapping[str, Any]) -> FeedForwardSpec | ExpertsSpec:
    sizes = scaled_sizes(facts)

    def of_width(mlp_dim: int) -> FeedForwardSpec:
        activations, limit = tuple(facts["mlp_activations"]), float(facts["mlp_activations_limit"])
        return FeedForwardSpec(mlp_dim, activations, facts["mlp_bias"], limit)

    if facts["num_experts"] == 1:
        return of_width(sizes["mlp_dim"])
    shared = facts["shared_experts"]
    return ExpertsSpec(
        count=facts["num_experts"],
        per_token=facts["num_experts_per_tok"],
        expert=of_width(sizes["moe_mlp_dim"]),
        shared=of_width(shared * sizes["moe_mlp_dim"]) if shared else None,
        score_func=facts["routed_score_func"],
        router_bias=facts["router_bias"],
        correction_bias=facts["routed_bias"],
        groups=facts["n_routing_groups"],
        groups_per_token=facts["topk_routing_group"],
        group_score=facts["routing_group_score"],
        normalise=facts["norm_topk_prob"],
        scaling=float(facts["routed_scaling_factor"]),
        scale_inputs=facts["scale_expert_inputs"],
        capacity_factor=float(facts["capacity_factor"]),
    )


@functools.cache  # a hundred layers take a second
def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """Groups layers into repeated patterns: the fewest pattern layers, then the fewest groups, then the longest first.

    Each pattern layer is compiled once, so 26 layers of which every sixth differs are 4 x (5 + 1) and 2 x 1.
    """
    count = len(layers)
    number_of = {layer: number for number, layer in enumerate(layers)}
    if len(number_of) == 1:
        return (LayerGroup((layers[0],), count, shared=bool(layers[0].shared_weights)),)
    kinds = [number_of[layer] for layer in layers]  # numbers compare faster than specs
    # best[i] describes layers[i:]: (pattern layers, number of groups, ((period, repeats), the rest's))
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (count + 1)
    for start in range(count - 1, -1, -1):
        candidates = []
        for period in range(1, count - start + 1):
            repeats, end = 1, start + period
            while True:
                bodies, groups, rest = best[end]
                candidates.append((bodies + period, groups + 1, ((period, repeats), *rest)))
                if kinds[end : end + period] != kinds[start : start + period]:
                    break
                repeats, end = repeats + 1, end + period
        best[start] = min(candidates, key=lambda candidate: (*candidate[:2], -math.prod(candidate[2][0])))
    result, start = [], 0
    for period, repeats in best[0][2]:
        pattern = tuple(layers[start : start + period])
        result.append(LayerGroup(pattern, repeats, shared=bool(pattern[0].shared_weights)))
        start += period * repeats
    return tuple(result)
