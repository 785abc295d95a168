"""Dropout with a key for each token, so that every sharding drops the same activations."""

import jax
import jax.numpy as jnp
from jax import Array

from src.model.params import DROPOUT, random_stream


def dropout_keys(seed: int, step: Array, tokens_BT: Array, ramp_shards: int) -> Array:
    """Makes each token's key for this step, as key data [B, T, W] of W words each.

    `ramp_shards` is the number of the batch's shards if the batch size is ramped up, otherwise 1.
    """
    step_key = jax.random.fold_in(random_stream(seed, DROPOUT), step)
    token_BT = jnp.arange(tokens_BT.size).reshape(tokens_BT.shape)

    def key_of_token(token: Array) -> Array:
        return jax.random.fold_in(step_key, token)

    keys_BTW = jax.random.key_data(jax.vmap(jax.vmap(key_of_token))(token_BT))
    if ramp_shards > 1:  # order keys as the data orders sequences, so that every mesh samples the same
        B, *each = keys_BTW.shape
        keys_BTW = keys_BTW.reshape(B // ramp_shards, ramp_shards, *each).swapaxes(0, 1).reshape(B, *each)
    return keys_BTW


def dropout(x_BTD: Array, keys_BTW: Array, rate: float, site: Array | int) -> Array:
    """Applies inverted dropout (Srivastava et al. 2014, section 10) to [B, T, D] by the tokens' keys.

    `site` is a number for each place of the model that has dropout.
    """

    def keep(key: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape[2:])

    keep_BTD = jax.vmap(jax.vmap(keep))(jax.random.wrap_key_data(keys_BTW))
    return jnp.where(keep_BTD, x_BTD / (1.0 - rate), 0.0).astype(x_BTD.dtype)
