"""Describes a model: the config's section `model`, resolved for the whole and for each layer, and how layers repeat.

Tensor letters, here and in every file of the model: B batch, T query position, S key position, D embedding, F
feed-forward hidden, N query heads, K key/value heads, H head size, A factors of a feed-forward layer, E experts, M
tokens sorted by expert, Q compressed query, R compressed keys and values, V vocabulary, L layers.
"""

import dataclasses
import functools
from dataclasses import dataclass

from src.config.keys import frozen
from src.config.model_keys import Model
from src.config.requirements import LAYER_REQUIREMENTS
from src.config.schema import KEYS, keys_of
from src.config.step_keys import Numerics
from src.model.patterns import shortest_patterns

VOCAB_MULTIPLE = 128  # the vocabulary is padded to a multiple of this, so that it shards over powers of two up to it

PER_LAYER = tuple(key for key in keys_of("model") if KEYS[key].per_layer)
OF_MODEL = (  # including settings that layers and the model both have
    *(key for key in keys_of("model") if key not in PER_LAYER),
    *("normalization", "normalization_layer_epsilon", "normalization_scale_offset", "dropout_rate"),
)


@dataclass(frozen=True)
class LayerSpec(Model):
    """One decoder layer's resolved settings. Layers with the same `shared_weights` share weights; "": not shared.

    Sizes are scaled (`global_parameter_scale` is 1), and settings without effect on the layer have their defaults, so
    that layers that compute the same function compare equal.
    """

    shared_weights: str = ""
    max_length: int = 0  # of a run's texts, if positions depend on it


@dataclass(frozen=True)
class LayerGroup:
    """A pattern of layers, run `repeats` times."""

    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def shared(self) -> bool:
        """Whether every repeat uses the same weights."""
        return bool(self.pattern[0].shared_weights)


@dataclass(frozen=True)
class ModelSpec(Model):
    """A decoder-only Transformer: its layers, and the resolved settings of everything before and after them.

    `position_type` is learned or sinusoidal if positions are added to the embedding, otherwise none;
    `trainable_position_size` is the number of rows of a learned table, otherwise -1.
    """

    layers: tuple[LayerSpec, ...] = ()
    weight_dtype: str = "float32"
    dtype: str = "bfloat16"
    stacked: bool = True  # stack the weights of repeated layers, for a scan over them; otherwise each has its own

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups the layers in the nesting of weights and caches."""
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
        """Rows of the embedding and columns of the output projection; those past `vocab_size` are masked."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_spec(model: Model, numerics: Numerics, max_target_length: int) -> ModelSpec:
    """Resolves the model that the section describes; sequences have at most `max_target_length` tokens."""
    resolved = {key: getattr(model, key) for key in OF_MODEL} | {
        "global_parameter_scale": 1,
        "base_emb_dim": model.emb_dim,
        "base_num_decoder_layers": model.num_decoder_layers,
        "decoder_segments": (),
        "position_type": "none" if model.position_type == "rope" else model.position_type,
    }
    if model.position_type != "learned":
        resolved["trainable_position_size"] = -1
    elif model.trainable_position_size == -1:
        resolved["trainable_position_size"] = max_target_length
    layers = tuple(_layer_spec(*layer, max_target_length) for layer in layer_models(model))
    return ModelSpec(**resolved, layers=layers, weight_dtype=numerics.weight_dtype, dtype=numerics.dtype)


def layer_models(model: Model) -> list[tuple[Model, str]]:
    """Lists each layer's settings, first to last, and the name of the weights it shares; "": not shared."""
    count = model.num_decoder_layers
    if not model.decoder_segments:
        return [(model, "")] * count
    counted = sum(max(entry.get("repeats", 1), 0) * len(entry["pattern"]) for entry in model.decoder_segments)
    layers: list[tuple[Model, str]] = []
    for index, entry in enumerate(model.decoder_segments):
        pattern, repeats = entry["pattern"], entry.get("repeats", 1)
        if repeats == -1:
            repeats = (count - counted) // len(pattern)
        layers += repeats * [
            (dataclasses.replace(model, **frozen(facts)), f"{index}.{position}" if entry.get("shared", False) else "")
            for position, facts in enumerate(pattern)
        ]
    assert len(layers) == count, "config.load checks that decoder_segments add up"
    return layers


def _layer_spec(layer: Model, shared_weights: str, max_target_length: int) -> LayerSpec:
    head_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim if layer.attention_type == "mla" else layer.head_dim
    resolved = {key: getattr(layer, key) for key in PER_LAYER} | {
        "base_emb_dim": layer.emb_dim,
        "base_mlp_dim": layer.mlp_dim,
        "base_moe_mlp_dim": layer.moe_mlp_dim,
        "base_num_query_heads": layer.num_query_heads,
        "base_num_kv_heads": layer.num_kv_heads,
        "latent_norm_epsilon": layer.latent_norm_epsilon or layer.normalization_layer_epsilon,
        "query_pre_attn_scalar": layer.query_pre_attn_scalar or float(head_dim),
        "position_type": "rope" if layer.position_type == "rope" else "none",
    }
    keys = {**vars(layer), **resolved}
    idle = {fact for need in LAYER_REQUIREMENTS if not need.satisfied(keys) for fact in need.keys}
    facts = {key: value for key, value in resolved.items() if key not in idle}
    by_length = facts.get("rope_type") in ("dynamic", "longrope")
    return LayerSpec(**facts, shared_weights=shared_weights, max_length=max_target_length if by_length else 0)


@functools.cache  # a hundred layers take a second
def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """Groups layers into the repeated patterns of `shortest_patterns`; each pattern layer is compiled once."""
    groups, start = [], 0
    for period, repeats in shortest_patterns(layers):
        groups.append(LayerGroup(layers[start : start + period], repeats))
        start += period * repeats
    return tuple(groups)
