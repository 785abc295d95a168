"""Which token comes next: drawn from a model's logits, or the likeliest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """What tokens are drawn from: all of them, the likeliest few, or both limits, the first applied first."""

    temperature: float  # logits are divided by it; 0: the likeliest token is taken
    top_k: int  # of the likeliest tokens, at most so many; 0: all
    nucleus_p: float  # of those, the fewest that have together at least this probability; 1: all


def sampling(config: Mapping[str, Any]) -> Sampling:
    """What the keys decode_sampling_* ask for."""
    strategy = config["decode_sampling_strategy"]
    return Sampling(
        temperature=0.0 if strategy == "greedy" else float(config["decode_sampling_temperature"]),
        top_k=config["decode_sampling_top_k"] if strategy in ("topk", "composite") else 0,
        nucleus_p=float(config["decode_sampling_nucleus_p"]) if strategy in ("nucleus", "composite") else 1.0,
    )


def draw(
    logits_BV: jax.Array, sampling: Sampling, seed: int, numbers_B: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """A token for each row, int32 [B].

    A row's draw depends on the seed, its number and its token's position: not on other rows, nor on the mesh.

    Args:
        logits_BV: float32.
        sampling: what to draw from.
        seed: of all rows.
        numbers_B: a number for each row.
        positions_B: where in its row each token will stand.
    """
    if sampling.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw_one(logits_V: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw_one)(warped(logits_BV, sampling), numbers_B, positions_B).astype(jnp.int32)


def warped(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits that are drawn from, [B, V]: at the temperature, and minus infinity where a limit leaves a token out.

    The nucleus (Holtzman et al. 2019, section 3.1) is of the probabilities that the limit before it leaves.
    """
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.nucleus_p < 1.0:
        rising_BV = jnp.sort(logits_BV, axis=-1)
        below_BV = jnp.cumsum(jax.nn.softmax(rising_BV, axis=-1), axis=-1)  # of each token and all less likely ones
        left_out_B1 = jnp.sum(below_BV[:, :-1] <= 1.0 - sampling.nucleus_p, axis=-1, keepdims=True)  # never the last
        least_B1 = jnp.take_along_axis(rising_BV, left_out_B1, axis=-1)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return logits_BV
