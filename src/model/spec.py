"""What a model is, as data: frozen specs made from the config, one entry a layer, and how equal layers repeat.

Tensor letters, here and in every file of the model: B batch, T query position, S key position, D embedding,
F feed-forward hidden, N query heads, K key/value heads, H head size, A factors of a feed-forward layer, V vocabulary,
L layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.config import scaled_sizes

VOCAB_MULTIPLE = 128  # the physical vocabulary is a multiple of this: it shards on any mesh, checkpoints fit all


@dataclass(frozen=True)
class NormSpec:
    """A normalisation: `kind` is rms (a scale) or layer (a scale and a bias)."""

    kind: str
    epsilon: float


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; `rope_max_timescale` is None where positions do not rotate queries and keys."""

    num_query_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    bias: bool
    rope_max_timescale: float | None


@dataclass(frozen=True)
class FeedForwardSpec:
    """A feed-forward layer whose hidden array is the product of its `activations`' factors."""

    mlp_dim: int  # F
    activations: tuple[str, ...]
    bias: bool


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Layers of one `shared_weights` name use one set of weights; empty: its own."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    dropout_rate: float
    shared_weights: str = ""


@dataclass(frozen=True)
class Segment:
    """`pattern`, run `repeats` times; with `shared` every repeat uses the pattern's one set of weights."""

    pattern: tuple[LayerSpec, ...]
    repeats: int
    shared: bool


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only Transformer: what stands before, in and after its layers."""

    emb_dim: int  # D
    vocab_size: int  # V, as the tokenizer and a user see it
    layers: tuple[LayerSpec, ...]
    position_table: str  # "learned" or "sinusoidal": added to the embedding; "" : none is
    position_table_size: int  # rows of a learned table
    final_norm: NormSpec
    tied_output: bool
    final_logits_soft_cap: float
    dropout_rate: float
    weight_dtype: str
    dtype: str

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of the output projection; those past `vocab_size` are masked."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the config describes."""
    learned = config["position_type"] == "learned"
    table_size = config["trainable_position_size"]
    return ModelSpec(
        emb_dim=scaled_sizes(config)["emb_dim"],
        vocab_size=config["vocab_size"],
        layers=layer_specs(config),
        position_table=config["position_type"] if config["position_type"] in ("learned", "sinusoidal") else "",
        position_table_size=(config["max_target_length"] if table_size == -1 else table_size) if learned else 0,
        final_norm=_norm(config),
        tied_output=config["logits_via_embedding"],
        final_logits_soft_cap=config["final_logits_soft_cap"],
        dropout_rate=config["dropout_rate"],
        weight_dtype=config["weight_dtype"],
        dtype=config["dtype"],
    )


def layer_specs(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """One spec a layer, first to last: the config's facts, overridden by `decoder_segments`' patterns."""
    num_layers = scaled_sizes(config)["num_decoder_layers"]
    if not config["decoder_segments"]:
        return (_layer(config),) * num_layers
    lengths = [entry.get("repeats", 1) * len(entry["pattern"]) for entry in config["decoder_segments"]]
    rest = num_layers - sum(length for length in lengths if length > 0)
    layers: list[LayerSpec] = []
    for index, entry in enumerate(config["decoder_segments"]):
        pattern, repeats = entry["pattern"], entry.get("repeats", 1)
        if repeats == -1:
            repeats = rest // len(pattern)
        for _ in range(repeats):
            for position, facts in enumerate(pattern):
                shared_weights = f"{index}.{position}" if entry.get("shared", False) else ""
                layers.append(_layer({**config, **facts}, shared_weights))
    assert len(layers) == num_layers, "config.load checks that decoder_segments add up"
    return tuple(layers)


def _layer(facts: Mapping[str, Any], shared_weights: str = "") -> LayerSpec:
    sizes = scaled_sizes(facts)
    return LayerSpec(
        attention=AttentionSpec(
            num_query_heads=sizes["num_query_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=facts["head_dim"],
            bias=facts["attention_bias"],
            rope_max_timescale=float(facts["rope_max_timescale"]) if facts["position_type"] == "rope" else None,
        ),
        feed_forward=FeedForwardSpec(sizes["mlp_dim"], tuple(facts["mlp_activations"]), facts["mlp_bias"]),
        norm=_norm(facts),
        dropout_rate=facts["dropout_rate"],
        shared_weights=shared_weights,
    )


def _norm(facts: Mapping[str, Any]) -> NormSpec:
    return NormSpec(facts["normalization"], facts["normalization_layer_epsilon"])


def segments(layers: Sequence[LayerSpec]) -> tuple[Segment, ...]:
    """`layers` as repeated patterns: with the fewest pattern layers, then the fewest segments, then the longest first.

    Each pattern layer is a body to compile, so 26 layers of which every sixth differs are 4 x (5 + 1) and 2 x 1.
    """
    count = len(layers)
    # best[i] describes layers[i:]: (pattern layers, number of segments, ((period, repeats), the rest's))
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (count + 1)
    for start in range(count - 1, -1, -1):
        candidates = []
        for period in range(1, count - start + 1):
            repeats, end = 1, start + period
            while True:
                bodies, parts, rest = best[end]
                candidates.append((bodies + period, parts + 1, ((period, repeats), *rest)))
                if layers[end : end + period] != layers[start : start + period]:
                    break
                repeats, end = repeats + 1, end + period
        best[start] = min(candidates, key=lambda candidate: (*candidate[:2], -math.prod(candidate[2][0])))
    result, start = [], 0
    for period, repeats in best[0][2]:
        pattern = tuple(layers[start : start + period])
        result.append(Segment(pattern, repeats, shared=bool(pattern[0].shared_weights)))
        start += period * repeats
    return tuple(result)
