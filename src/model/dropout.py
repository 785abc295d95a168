"""Dropout whose masks follow the tokens: the same on every mesh, in every order, however rows go through."""

import functools

import jax
import jax.numpy as jnp

from src.model.forward_context import Context


def token_keys(key: jax.Array, rows: int, length: int) -> jax.Array:
    """A random key for each token of a batch, as numbers [B, T, words], which go with the token wherever it goes."""
    token_BT = jnp.arange(rows * length).reshape(rows, length)
    return jax.random.key_data(jax.vmap(jax.vmap(functools.partial(jax.random.fold_in, key)))(token_BT))


def dropout(x_BTD: jax.Array, rate: float, context: Context, place: jax.Array | int) -> jax.Array:
    """Inverted dropout (Srivastava et al. 2014, section 10) on [B, T, D] by the tokens' keys; none without keys.

    `place` numbers where in the model it stands, so that each has its own mask.
    """
    if context.dropout_keys_BTW is None or rate == 0.0:
        return x_BTD

    def kept(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, x_BTD.shape[2:])

    keep_BTD = jax.vmap(jax.vmap(kept))(jax.random.wrap_key_data(context.dropout_keys_BTW))
    return jnp.where(keep_BTD, x_BTD / (1.0 - rate), 0.0).astype(x_BTD.dtype)
