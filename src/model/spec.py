"""Describes a model: the settings of each layer, how layers repeat, and the embedding and output around them.

Tensor letters, in every file of the model that does not explain others: B batch, T query position, S key position, D
embedding, F feed-forward hidden, N query heads, K key/value heads, H head size, A factors of a feed-forward layer, E
experts, M choices of an expert by a token, Q compressed query, R compressed keys and values, V vocabulary, L layers.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from src.config.model_keys import EmbeddingSettings, LayerSettings, LayerSize, Model, NormSettings
from src.config.requirements import LAYER_REQUIREMENTS
from src.config.step_keys import Numerics
from src.model.patterns import shortest_patterns

VOCAB_MULTIPLE = 128  # the vocabulary is padded to a multiple of this, so that it shards over powers of two up to it


@dataclass(frozen=True, kw_only=True)
class LayerSpec(LayerSettings):
    """One decoder layer's resolved settings and sizes. Layers with the same nonempty `shared_weights` share weights.

    Settings without effect on the layer have their defaults, and the sizes declared here are 0 if they have no effect,
    so that layers that compute the same function compare equal.
    """

    emb_dim: int
    mlp_dim: int = 0
    moe_mlp_dim: int = 0
    num_query_heads: int = 0
    num_kv_heads: int = 0
    max_length: int = 0  # max_target_length, if the rotary frequencies depend on it
    shared_weights: str = ""  # empty: not shared


@dataclass(frozen=True)
class LayerGroup:
    """A pattern of layers, run `repeats` times."""

    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def shared(self) -> bool:
        """Whether every repeat uses the same weights."""
        return bool(self.pattern[0].shared_weights)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(EmbeddingSettings):
    """A decoder-only Transformer: its layers, and the resolved settings of everything before and after them.

    `trainable_position_size` is the number of rows of the learned position table, or -1 without one.
    """

    emb_dim: int
    added_positions: str  # positions added to the embedding: learned, sinusoidal or none
    embedding_dropout: float
    layers: tuple[LayerSpec, ...]
    final_norm: NormSettings
    weight_dtype: str
    dtype: str
    stacked: bool = True  # stack the weights of repeated layers, for a scan over them; otherwise each layer has its own

    def __hash__(self) -> int:
        # Functions cached by model look it up often: hashing a hundred layers each time would be slow.
        return hash((self.layers[:1], len(self.layers)))

    @functools.cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers, in the nesting of weights and caches; without `stacked`, only shared groups repeat."""
        groups = group_layers(self.layers)
        if self.stacked:
            return groups
        return tuple(group if group.shared else LayerGroup(group.pattern * group.repeats, 1) for group in groups)

    @property
    def largest_group(self) -> int:
        """Index of the first group with the most layers: pipeline stages split this one."""
        sizes = [len(group.pattern) * group.repeats for group in self.layer_groups]
        return sizes.index(max(sizes))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.num_experts > 1 for layer in self.layers)

    @property
    def has_capacity(self) -> bool:
        """Whether experts of any layer have a limited capacity per sequence."""
        return any(layer.capacity_factor != -1 for layer in self.layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of the output projection; logits past `vocab_size` are masked."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_spec(model: Model, numerics: Numerics, max_target_length: int) -> ModelSpec:
    """Resolves the model that the section describes; sequences have at most `max_target_length` tokens."""
    settings = _values(EmbeddingSettings, model)
    if model.position_type != "learned":
        settings["trainable_position_size"] = -1
    elif model.trainable_position_size == -1:
        settings["trainable_position_size"] = max_target_length
    return ModelSpec(
        **settings,
        emb_dim=model.emb_dim,
        added_positions="none" if model.position_type == "rope" else model.position_type,
        embedding_dropout=model.dropout_rate,
        layers=tuple(_layer_spec(*layer, max_target_length) for layer in layer_models(model)),
        final_norm=NormSettings(**_values(NormSettings, model)),
        weight_dtype=numerics.weight_dtype,
        dtype=numerics.dtype,
    )


def _values(keys: type, model: Model) -> dict[str, Any]:
    """The section's values of the fields that the dataclass `keys` declares, by name."""
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(keys)}


def layer_models(model: Model) -> list[tuple[Model, str]]:
    """Lists each layer's settings, first to last, and the name of the weights it shares; "": not shared."""
    if not model.decoder_segments:
        return [(model, "")] * model.num_decoder_layers
    from src.config.segments import expanded

    return expanded(model)


def _layer_spec(layer: Model, shared_weights: str, max_target_length: int) -> LayerSpec:
    head_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim if layer.attention_type == "mla" else layer.head_dim
    settings = _values(LayerSettings, layer) | {
        **{size.name: getattr(layer, size.name.removeprefix("base_")) for size in dataclasses.fields(LayerSize)},
        "latent_norm_epsilon": layer.latent_norm_epsilon or layer.normalization_layer_epsilon,
        "query_pre_attn_scalar": layer.query_pre_attn_scalar or float(head_dim),
        "position_type": "rope" if layer.position_type == "rope" else "none",
    }
    idle = {key for need in LAYER_REQUIREMENTS if not need.satisfied(settings) for key in need.keys}
    settings = {key.removeprefix("base_"): value for key, value in settings.items() if key not in idle}
    by_length = settings.get("rope_type") in ("dynamic", "longrope")
    max_length = max_target_length if by_length else 0
    return LayerSpec(**settings, emb_dim=layer.emb_dim, shared_weights=shared_weights, max_length=max_length)


@functools.cache  # a hundred layers take a second
def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """Groups layers into the repeated patterns of `shortest_patterns`: a scan compiles each layer of a pattern once."""
    groups, start = [], 0
    for period, repeats in shortest_patterns(layers):
        groups.append(LayerGroup(layers[start : start + period], repeats))
        start += period * repeats
    return tuple(groups)
