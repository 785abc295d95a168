"""Cross-entropy over tokens, in tiles of the sequence so that the logits of one tile are held at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.named_scope("cross_entropy")
def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    tiles: int,
    shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the tokens whose mask is 1: of the loss, in nats, and of the squared log-normaliser.

    The second times `z_loss_multiplier` is the z-loss of PaLM (Chowdhery et al. 2022, section 5). `logits_of` takes
    hidden states [B, t, D] to float32 logits [B, t, V]. Devices share T in `shards` parts, each cut into `tiles`; with
    more than one the backward pass computes each tile's logits again.
    """

    def sums(hidden_BtD: jax.Array, targets_Bt: jax.Array, mask_Bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BtV = logits_of(hidden_BtD)
        log_normaliser_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
        # A sum in place of a lookup, for which XLA would hold the logits in float32.
        is_target_BtV = targets_Bt[..., None] == jnp.arange(logits_BtV.shape[-1])
        target_logit_Bt = jnp.sum(jnp.where(is_target_BtV, logits_BtV, 0.0), axis=-1)
        loss = jnp.sum((log_normaliser_Bt - target_logit_Bt) * mask_Bt)
        return loss, jnp.sum(jnp.square(log_normaliser_Bt) * mask_Bt)

    if tiles == 1:
        return sums(hidden_BTD, targets_BT, mask_BT)

    def add_tile(totals: tuple[jax.Array, jax.Array], tile: tuple[jax.Array, ...]) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, totals, jax.checkpoint(sums)(*tile)), None

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return jax.lax.scan(add_tile, zeros, in_tiles((hidden_BTD, targets_BT, mask_BT), tiles, shards))[0]


def token_log_probs(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    tiles: int,
    shards: int = 1,
) -> jax.Array:
    """Returns the log-probability [B, T] of each target, in nats; the arguments are those of `cross_entropy`."""

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_BtD, targets_Bt = tile
        log_probs_BtV = jax.nn.log_softmax(logits_of(hidden_BtD))
        return jnp.take_along_axis(log_probs_BtV, targets_Bt[..., None], axis=-1)[..., 0]

    tiled = jax.lax.map(of_tile, in_tiles((hidden_BTD, targets_BT), tiles, shards))
    return jnp.moveaxis(tiled.reshape(tiles, -1, shards, tiled.shape[2] // shards), 0, 2).reshape(targets_BT.shape)


def in_tiles(arrays: tuple[jax.Array, ...], tiles: int, shards: int = 1) -> tuple[jax.Array, ...]:
    """Cuts each array [B, T, ...] into [tiles, B, T / tiles, ...], every tile with a piece of each shard of T."""

    def cut(x: jax.Array) -> jax.Array:
        pieces = jnp.moveaxis(x.reshape(x.shape[0], shards, tiles, -1, *x.shape[2:]), 2, 0)
        return pieces.reshape(tiles, x.shape[0], -1, *x.shape[2:])

    return tuple(map(cut, arrays))
