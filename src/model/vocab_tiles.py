"""Chooses the number of tiles of the loss from the memory that it would need in one tile."""

import math

import jax.numpy as jnp

from src.config.schema import BatchKeys
from src.config.step_keys import Step
from src.model.flops import all_layers, block_weights, flops_per_token
from src.model.parts import layer_costs
from src.model.spec import ModelSpec
from src.parallel.mesh import MeshLayout

MAX_LOGITS, SMALL = 8 * 2**30, 2**30  # bytes on a device


def vocab_tiles(step: Step, batch: BatchKeys, spec: ModelSpec, layout: MeshLayout) -> int:
    """Returns `num_vocab_tiling`, or for 0 the fewest tiles, a power of 2, that keep the loss's memory small.

    Logits and their gradient should fit in MAX_LOGITS. On accelerators the loss may also use at most the memory of a
    block's backward pass (or SMALL, if that is more), if in one tile it would use more than 0.5 + p times that, where p
    is the percentage that computing the logits twice adds to a step's operations. The tiles divide a device's shard of
    the sequence, so there may be fewer than these limits require.
    """
    length, tiles = batch.max_target_length, step.num_vocab_tiling
    if tiles:
        return tiles
    V, itemsize = spec.padded_vocab_size // layout.shards("vocab"), jnp.dtype(spec.dtype).itemsize
    tokens = batch.per_device_batch_size * layout.mesh.size * length
    tokens /= math.prod(layout.shards(axis) for axis in ("batch", "length"))
    logits = tokens * V * itemsize
    # The gathered weights, their gradient, and a copy of it in another layout: split by tiles, unless V is sharded.
    loss = logits + (3 * V * spec.emb_dim * itemsize if layout.shards("vocab") == 1 else 0)
    most = math.inf
    if layout.platform != "cpu":
        block = max(_block_bytes(spec, layout, tokens), SMALL)
        percent = 100 * 2 * spec.padded_vocab_size * spec.emb_dim / flops_per_token(spec, length).causal
        most = block if loss > (0.5 + percent) * block else math.inf
    tiles, max_tiles = 1, length // layout.shards("norm_length")
    while (2 * logits / tiles > MAX_LOGITS or loss / tiles > most) and max_tiles % (2 * tiles) == 0:
        tiles *= 2
    return tiles


def _block_bytes(spec: ModelSpec, layout: MeshLayout, tokens: float) -> float:
    """Memory of the largest block's backward pass on a device: arrays, gathered weights, their gradient."""
    sizes = []
    for layer in all_layers(spec):
        weights = sum(
            each.size / (layout.shards("expert") if each.used < each.size else 1) for each in block_weights(layer, spec)
        )
        width = sum(part.activation_size for part in layer_costs(layer).values())
        sizes.append((2 * weights + tokens * width) / layout.shards("mlp") + tokens * 6 * spec.emb_dim)
    return max(sizes) * jnp.dtype(spec.dtype).itemsize
