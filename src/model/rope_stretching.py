"""Rotary positions for longer contexts: linear, proportional, Llama 3.1's, YaRN, dynamic and LongRoPE."""

import math

import numpy as np

from src.model.spec import LayerSpec


def stretch(plain: np.ndarray, spec: LayerSpec) -> tuple[np.ndarray, float]:
    """Changes `plain`, the pairs' radians per position, float32 [dim / 2], by `rope_type`.

    Also returns a factor for the rotated dims.
    """
    stretched, pairs, original = plain / spec.rope_factor, len(plain), spec.original_max_position_embeddings
    if spec.rope_type == "linear":  # position interpolation (Chen et al. 2023)
        return stretched, 1.0
    if spec.rope_type == "proportional":  # Barbero et al. 2024, arXiv:2410.06205: slow pairs carry no position
        return np.where(np.arange(pairs) < int(pairs * spec.partial_rotary_factor), stretched, np.float32(0)), 1.0
    if spec.rope_type == "llama3.1":
        # Short wavelengths stay, long ones are stretched, and those between are interpolated by their number of turns.
        turns = original * plain / (2 * np.pi)
        between = max(spec.rope_high_freq_factor - spec.rope_low_freq_factor, 1e-6)  # Llama 4 Scout: the two are equal
        share = np.clip((turns - spec.rope_low_freq_factor) / between, 0.0, 1.0)
        return (stretched + share * (plain - stretched)).astype(np.float32), 1.0
    # The next two use the run's length, so that cached keys stay valid; transformers uses each batch's longest text.
    if spec.rope_type == "dynamic":  # NTK-aware: theta grows with the length (Peng et al. 2023, appendix A.1)
        growth = spec.rope_factor * max(spec.max_length / original, 1.0) - (spec.rope_factor - 1.0)
        return (plain * growth ** (-np.arange(pairs) / max(pairs - 1, 1))).astype(np.float32), 1.0
    if spec.rope_type == "longrope":  # Ding et al. 2024, arXiv:2402.13753
        factors = spec.rope_long_factor if spec.max_length > original else spec.rope_short_factor
        size = math.sqrt(1.0 + math.log(spec.rope_factor) / math.log(max(original, 2)))
        return (plain / np.array(factors)).astype(np.float32), spec.rope_attention_factor or size
    assert spec.rope_type == "yarn"  # Peng et al. 2023, arXiv:2309.00071, section 3

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns in the original length."""
        wave = original / (turns * 2 * math.pi)
        return pairs * math.log(wave) / math.log(spec.rope_max_timescale)

    first, last = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # As in transformers, also if last < first: then the pairs from `first` on stay.
    share = np.clip((np.arange(pairs, dtype=np.float32) - first) / ((last - first) or 1e-3), 0.0, 1.0)
    size = yarn_size(spec, 1.0)
    if spec.mscale and spec.mscale_all_dim:
        size = yarn_size(spec, spec.mscale) / yarn_size(spec, spec.mscale_all_dim)
    return (plain + share * (stretched - plain)).astype(np.float32), spec.rope_attention_factor or size


def yarn_size(spec: LayerSpec, weight: float) -> float:
    """YaRN's attention factor (transformers' `get_mscale`); `weight` is 1, `mscale` or `mscale_all_dim`."""
    return 0.1 * weight * math.log(spec.rope_factor) + 1.0
