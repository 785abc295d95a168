"""Dropout whose masks follow the tokens: the same on every mesh and for every order of rows."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from src.model.forward_context import ForwardContext


def token_keys(key: Array, rows: int, length: int) -> Array:
    """Returns a random key for each token of a batch, as key data [B, T, words] that moves with the token."""
    token_BT = jnp.arange(rows * length).reshape(rows, length)
    return jax.random.key_data(jax.vmap(jax.vmap(functools.partial(jax.random.fold_in, key)))(token_BT))


def dropout(x_BTD: Array, rate: float, context: ForwardContext, site: Array | int) -> Array:
    """Applies inverted dropout (Srivastava et al. 2014, section 10) to [B, T, D] by the tokens' keys, if there are any.

    `site` numbers the place in the model, so that each has its own mask.
    """
    if context.dropout_keys_BTW is None or rate == 0.0:
        return x_BTD

    def keep(key: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape[2:])

    keep_BTD = jax.vmap(jax.vmap(keep))(jax.random.wrap_key_data(context.dropout_keys_BTW))
    return jnp.where(keep_BTD, x_BTD / (1.0 - rate), 0.0).astype(x_BTD.dtype)
