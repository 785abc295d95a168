"""Computes the loss in tiles of the sequence or of the vocabulary, so that one tile's logits are held at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from src.model.decoder import Decoder, OutputPart
from src.parallel.mesh import MeshLayout


def sum_over_tiles(
    sums: Callable[..., tuple[Array, Array]], arrays: tuple[Array, ...], tiles: int, shards: int
) -> tuple[Array, Array]:
    """Adds up `sums(*tile)` over the tiles of `in_tiles`; the backward pass recomputes each tile's logits."""

    def add_tile(totals: tuple[Array, Array], tile: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        return jax.tree.map(jnp.add, totals, jax.checkpoint(sums)(*tile)), None

    zeros = jnp.zeros(()), jnp.zeros(())
    totals, _ = jax.lax.scan(add_tile, zeros, in_tiles(arrays, tiles, shards))
    return totals


def in_tiles(arrays: tuple[Array, ...], tiles: int, shards: int = 1) -> tuple[Array, ...]:
    """Cuts each array [B, T, ...] into [tiles, B, T / tiles, ...], every tile with a piece of each shard of T."""

    def cut(x: Array) -> Array:
        pieces = jnp.moveaxis(x.reshape(x.shape[0], shards, tiles, -1, *x.shape[2:]), 2, 0)
        return pieces.reshape(tiles, x.shape[0], -1, *x.shape[2:])

    return tuple(map(cut, arrays))


def output_parts(model: Decoder, count: int, layout: MeshLayout) -> OutputPart | None:
    """Splits the output projection along V; None if V is sharded or not divisible, or if it is adapted or quantized."""
    V, tied = model.spec.padded_vocab_size, model.spec.logits_via_embedding
    kernel = (model.embedding if tied else model.output)[...]
    if layout.shards("vocab") > 1 or V % count or not isinstance(kernel, Array):  # adapted or quantized
        return None
    # D comes first: a TPU would change the layout of an array that it gathers along the last dim.
    kernel_DV = kernel.T if tied else kernel
    bias_V = jnp.zeros(V) if model.output_bias is None else model.output_bias[...]
    parts = (jnp.moveaxis(x.reshape(*x.shape[:-1], count, -1), -2, 0) for x in (kernel_DV, bias_V, jnp.arange(V)))
    return OutputPart(*parts)


def over_parts(
    of_part: Callable[[Array, OutputPart], tuple[Array, Array]], hidden_BTD: Array, parts: OutputPart
) -> tuple[Array, Array]:
    """Computes the log-sum-exp and the target's logit, [B, T] each, over the whole vocabulary from all of its parts.

    `of_part` computes both for the tokens of a part. The gathered weights and their gradient are split like V, and each
    part is gathered once forward and once backward.
    """
    whole_BTD = hidden_BTD.astype(jnp.float32)  # the dtype in which the gradients of the parts are summed

    def scores(part: OutputPart) -> tuple[Array, Array]:
        return of_part(whole_BTD.astype(hidden_BTD.dtype), part)

    log_normaliser_PBT, target_logit_PBT = jax.lax.map(jax.checkpoint(scores, prevent_cse=False), parts)
    return jax.nn.logsumexp(log_normaliser_PBT, axis=0), jnp.sum(target_logit_PBT, axis=0)
