"""Describes a model: the config's section `model`, resolved for the whole and for each layer, and how layers repeat.

Tensor letters, here and in every file of the model: B batch, T query position, S key position, D embedding,
F feed-forward hidden, N query heads, K key/value heads, H head size, A factors of a feed-forward layer, E experts,
M tokens sorted by expert, Q compressed query, R compressed keys and values, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from src.config.model_keys import FeedForwardFacts, Model, PositionFacts
from src.config.schema import KEYS, keys_of, model_of

VOCAB_MULTIPLE = 128  # the physical vocabulary is a multiple of this: it shards over powers of two up to it

LATENT_FACTS = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon"),
)
STRETCH_FACTS = {  # of each rope_type
    "default": (),
    "linear": ("rope_factor",),
    "llama3.1": (
        *("rope_factor", "original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
    ),
    "yarn": (
        *("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "rope_truncate"),
        *("mscale", "mscale_all_dim"),
    ),
}
ROPE_FACTS = {each.name for each in fields(PositionFacts)} - {"position_type", "trainable_position_size"}
EXPERT_FACTS = {each.name for each in fields(FeedForwardFacts) if not each.name.startswith("mlp_")}
MODEL_FACTS = (  # facts of layers that the model itself has too
    *("normalization", "normalization_layer_epsilon", "normalization_scale_offset", "dropout_rate", "position_type"),
)


@dataclass(frozen=True)
class LayerSpec(Model):
    """One decoder layer: its facts, resolved. Layers of one `shared_weights` name share their weights; "": its own.

    Sizes are scaled (`global_parameter_scale` is 1), and facts without effect on the layer have their defaults, so
    that layers are equal that compute the same.
    """

    shared_weights: str = ""

    @property
    def has_experts(self) -> bool:
        """Returns whether the feed-forward layer is one of experts."""
        return self.num_experts > 1

    @property
    def norm_before(self) -> bool:
        """Returns whether attention's and the feed-forward layer's inputs are normalised."""
        return self.normalization_placement in ("before", "both")

    @property
    def norm_after(self) -> bool:
        """Returns whether their outputs are."""
        return self.normalization_placement in ("after", "both")


@dataclass(frozen=True)
class LayerGroup:
    """A pattern of layers, run `repeats` times; with `shared` every repeat uses the same weights."""

    pattern: tuple[LayerSpec, ...]
    repeats: int
    shared: bool


@dataclass(frozen=True)
class ModelSpec(Model):
    """A decoder-only Transformer: its layers, and the facts about what comes before and after them, resolved.

    `position_type` is learned or sinusoidal where positions are added to the embedding, otherwise none;
    `trainable_position_size` is the number of a learned table's rows, otherwise -1.
    """

    layers: tuple[LayerSpec, ...] = ()
    weight_dtype: str = "float32"
    dtype: str = "bfloat16"
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
        return any(layer.has_experts for layer in self.layers)

    @property
    def padded_vocab_size(self) -> int:
        """Returns the embedding's rows and the output projection's columns; those past `vocab_size` are masked."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the model that the config describes."""
    model = model_of(config)
    table = model.position_type if model.position_type in ("learned", "sinusoidal") else "none"
    rows = model.trainable_position_size
    resolved = {
        **{key: getattr(model, key) for key in keys_of("model") if key in MODEL_FACTS or not KEYS[key].per_layer},
        "base_emb_dim": model.emb_dim,
        "position_type": table,
        "trainable_position_size": (config["max_target_length"] if rows == -1 else rows) if table == "learned" else -1,
    }
    for name in ("global_parameter_scale", "base_num_decoder_layers", "decoder_segments"):
        del resolved[name]
    return ModelSpec(**resolved, layers=layer_specs(config), weight_dtype=config["weight_dtype"], dtype=config["dtype"])


def layer_specs(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Returns one spec per layer, first to last: the config's facts, overridden by `decoder_segments`' patterns."""
    return tuple(_layer(facts, shared_weights) for facts, shared_weights in layer_facts(config))


def layer_facts(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Returns each layer's keys, and the name of the weights it shares; "": it has its own."""
    num_layers = model_of(config).num_decoder_layers
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


def _layer(facts: Mapping[str, Any], shared_weights: str) -> LayerSpec:
    layer = model_of(facts)
    idle = set(_without_effect(layer))
    head_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim if layer.attention_type == "mla" else layer.head_dim
    resolved = {
        **{key: getattr(layer, key) for key in keys_of("model") if KEYS[key].per_layer},
        "mlp_activations": tuple(layer.mlp_activations),
        "base_emb_dim": layer.emb_dim,
        "base_mlp_dim": layer.mlp_dim,
        "base_moe_mlp_dim": layer.moe_mlp_dim,
        "base_num_query_heads": layer.num_query_heads,
        "base_num_kv_heads": layer.num_kv_heads,
        "latent_norm_epsilon": layer.latent_norm_epsilon or layer.normalization_layer_epsilon,
        "query_pre_attn_scalar": layer.query_pre_attn_scalar or float(head_dim),
        "position_type": "rope" if layer.position_type == "rope" else "none",
    }
    return LayerSpec(
        **{key: value for key, value in resolved.items() if key not in idle}, shared_weights=shared_weights
    )


def _without_effect(layer: Model) -> Iterator[str]:
    """Yields the facts that say nothing of a layer, whatever their values."""
    if layer.attention_type != "local_sliding":
        yield "sliding_window_size"
    if layer.attention_type != "chunk":
        yield "chunk_attn_window_size"
    yield from ("base_num_kv_heads", "head_dim") if layer.attention_type == "mla" else LATENT_FACTS
    if not layer.attention_bias:
        yield "attention_out_bias"
    if layer.position_type != "rope":
        yield from ROPE_FACTS
    yield from {fact for facts in STRETCH_FACTS.values() for fact in facts}.difference(STRETCH_FACTS[layer.rope_type])
    yield from EXPERT_FACTS if layer.num_experts == 1 else ("base_mlp_dim",)


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
