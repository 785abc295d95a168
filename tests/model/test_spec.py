"""Layers as data: what the config's segments say of each layer, and how equal layers are found again."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.model.spec import LayerGroup, group_layers
from tests.tiny import load, spec_of


def layers_of(**overrides):
    return spec_of(load(**overrides)).layers


LAYER = layers_of()[0]
KINDS = {name: dataclasses.replace(LAYER, dropout_rate=index / 100) for index, name in enumerate("ABCDEF")}


def layers(names):
    """`"AAB"` to three layers."""
    return tuple(KINDS[name] for name in names)


def written(plan):
    """Segments as they read: `"A3 BC2"` is three times A, twice BC; a star: shared."""
    name_of = {layer: name for name, layer in KINDS.items()}
    return " ".join(
        "".join(name_of[dataclasses.replace(layer, shared_weights="")] for layer in segment.pattern)
        + f"{segment.repeats}{'*' if segment.shared else ''}"
        for segment in plan
    )


def expand(plan):
    return tuple(layer for segment in plan for _ in range(segment.repeats) for layer in segment.pattern)


@pytest.mark.parametrize(
    ("names", "plan"),
    [
        ("A", "A1"),
        ("A" * 16, "A16"),
        ("AAAAAB" * 4 + "AA", "AAAAAB4 A2"),  # Gemma 3 1B: five local layers and a global one
        ("A" * 3 + "B" * 58, "A3 B58"),  # DeepSeek: dense layers, then experts
        ("AB" * 5, "AB5"),
        ("AABB" * 3, "AABB3"),
        ("ABC", "ABC1"),
    ],
)
def test_segments_of_known_models(names, plan):
    assert written(group_layers(layers(names))) == plan


@given(st.lists(st.tuples(st.text("ABC", min_size=1, max_size=3), st.integers(1, 4)), min_size=1, max_size=4))
def test_segments_are_the_layers_with_the_fewest_bodies(parts):
    original = layers("".join(pattern * repeats for pattern, repeats in parts))
    plan = group_layers(original)
    assert expand(plan) == original
    bodies = sum(len(segment.pattern) for segment in plan)
    assert bodies <= sum(len(pattern) for pattern, _ in parts)
    assert not any(segment.shared for segment in plan)


# Each letter means other facts, so that neighbouring segments may have equal or different ones.
SEGMENTS = st.lists(
    st.tuples(st.text("ABC", min_size=1, max_size=3), st.integers(1, 3), st.booleans()), min_size=1, max_size=4
)


@given(SEGMENTS)
def test_layers_share_weights_within_their_own_shared_segment_alone(parts):
    entries, expected_weights, own = [], [], itertools.count()
    for pattern, repeats, shared in parts:
        facts = ", ".join(f"{{base_mlp_dim: {64 + ord(name)}}}" for name in pattern)
        entries.append(f"{{repeats: {repeats}, shared: {str(shared).lower()}, pattern: [{facts}]}}")
        sets = [next(own) for _ in pattern]
        for _ in range(repeats):
            expected_weights.extend(sets if shared else [next(own) for _ in pattern])
    original = layers_of(base_num_decoder_layers=len(expected_weights), decoder_segments=f"[{', '.join(entries)}]")
    plan = group_layers(original)
    assert expand(plan) == original
    assert weight_sets(plan) == renumbered(expected_weights)


def weight_sets(plan):
    """A number for the set of weights that each layer uses."""
    used = []
    for index, segment in enumerate(plan):
        for repeat, position in itertools.product(range(segment.repeats), range(len(segment.pattern))):
            used.append((index, position) if segment.shared else (index, position, repeat))
    return renumbered(used)


def renumbered(labels):
    first_seen = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [first_seen[label] for label in labels]


def test_two_equal_layers_of_a_shared_pattern_keep_two_sets_of_weights():
    original = layers_of(base_num_decoder_layers=6, decoder_segments="[{repeats: 3, shared: true, pattern: [{}, {}]}]")
    (segment,) = group_layers(original)
    assert segment == LayerGroup(original[:2], repeats=3)
    assert segment.shared


def test_the_facts_of_a_segment_replace_the_models_in_its_layers_alone():
    pattern = "{base_mlp_dim: 48, normalization: layer}, {position_type: none, head_dim: 6}"
    first, second, *rest = layers_of(
        base_num_decoder_layers=7, decoder_segments=f"[{{repeats: -1, pattern: [{pattern}]}}, {{pattern: [{{}}]}}]"
    )
    assert first.mlp_dim == 48
    assert first.normalization == "layer"
    assert second == dataclasses.replace(LAYER, head_dim=6, query_pre_attn_scalar=6.0, position_type="none")
    assert rest == [first, second, first, second, LAYER]


def test_layers_are_equal_whatever_facts_without_effect_on_them_say():
    """So such facts nest no weights otherwise. (A user's are refused; published models have some.)"""
    ignored = {"sliding_window_size": 9, "q_lora_rank": 3, "beta_fast": 2.0, "shared_experts": 1}
    segments = [{"repeats": 1, "shared": False, "pattern": [{}, ignored]}]
    (group,) = group_layers(spec_of(load().replace(decoder_segments=segments)).layers)
    assert (len(group.pattern), group.repeats) == (1, 2)
    local = "attention_type: local_sliding, sliding_window_size: 9"
    first, second = layers_of(decoder_segments=f"[{{pattern: [{{{local}}}, {{{local}, position_type: none}}]}}]")
    assert first.sliding_window_size == second.sliding_window_size == 9
    assert first != second
