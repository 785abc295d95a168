"""Adafactor's scaling (Shazeer and Stern 2018): stores row and column means of a matrix's second moment."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from src.model.params import by_path, nested
from src.step.matrices import MatrixDims
from src.step.optimizer_rules import OptimizerInputs

# The paper's constants, section 9: the term added to squared gradients, the smallest scale of a weight, the largest
# root mean square of an update, and the exponent of the moments' decay.
EPSILON_1, EPSILON_2, CLIP, DECAY = 1e-30, 1e-3, 1.0, 0.8


class AdafactorState(NamedTuple):
    """Second moments, float32, in the nesting of the weights that have them; averaged dims have size 1."""

    count: jax.Array  # int32: number of updates
    rows: Any  # for matrices: means over the outputs
    columns: Any  # for matrices: means over the inputs
    full: Any  # for all other weights


def adafactor(chosen: Any, inputs: OptimizerInputs) -> list[optax.GradientTransformation]:
    """Divides gradients by the root of their second moment, clips, and scales by weight size (algorithms 4 and 5).

    A weight's size is its root mean square, at least EPSILON_2, so the learning rate is relative to that. Layers and
    experts that are stacked in one array have their own rows, columns and scales (`MatrixDims.batch`). No first moment
    is used. Gradients of weights that are not `chosen` pass unchanged.
    """
    is_chosen = by_path(chosen)
    kinds: dict[Any, MatrixDims] = {path: kind for path, kind in by_path(inputs.matrices).items() if is_chosen[path]}

    def init(weights: Any) -> AdafactorState:
        rows, columns, full = {}, {}, {}
        for path, kind in kinds.items():
            zeros = jnp.zeros(by_path(weights)[path].shape)
            if kind.reduction:
                rows[path], columns[path] = _mean(zeros, kind.output), _mean(zeros, kind.reduction)
            else:
                full[path] = zeros
        return AdafactorState(jnp.zeros((), jnp.int32), nested(rows), nested(columns), nested(full))

    def update(gradients: Any, state: AdafactorState, weights: Any) -> tuple[Any, AdafactorState]:
        count = state.count + 1
        decay = 1.0 - count.astype(jnp.float32) ** -DECAY
        rows, columns, full, weights = map(by_path, (state.rows, state.columns, state.full, weights))
        updates = by_path(gradients)
        for path, kind in kinds.items():
            gradient = updates[path].astype(jnp.float32)
            square = jnp.square(gradient) + EPSILON_1
            if kind.reduction:
                rows[path] = decay * rows[path] + (1 - decay) * _mean(square, kind.output)
                columns[path] = decay * columns[path] + (1 - decay) * _mean(square, kind.reduction)
                row_share = rows[path] / _mean(rows[path], kind.reduction)
                scaled = gradient * jax.lax.rsqrt(row_share) * jax.lax.rsqrt(columns[path])
            else:
                full[path] = decay * full[path] + (1 - decay) * square
                scaled = gradient * jax.lax.rsqrt(full[path])
            updates[path] = _clip(scaled, kind, CLIP) * jnp.maximum(EPSILON_2, _root_mean_square(weights[path], kind))
        return nested(updates), AdafactorState(count, nested(rows), nested(columns), nested(full))

    return [optax.GradientTransformation(init, update)]


def clip_matrices(matrices: Any, chosen: Any, threshold: jax.Array) -> optax.GradientTransformation:
    """Scales each matrix or vector in the updates of `chosen` weights to a root mean square of at most `threshold`."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(
            lambda x, kind, is_chosen: _clip(x, kind, threshold) if is_chosen else x, updates, matrices, chosen
        )
    )


def _clip(x: jax.Array, kind: MatrixDims, threshold: jax.Array | float) -> jax.Array:
    return (x / jnp.maximum(1.0, _root_mean_square(x, kind) / threshold)).astype(x.dtype)


def _root_mean_square(x: jax.Array, kind: MatrixDims) -> jax.Array:
    """Root mean square of each matrix or vector, without a vocabulary's padding, whose gradients are always zero."""
    is_word = None
    if kind.vocab is not None:
        dim, size = kind.vocab
        is_word = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) < size
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), kind.dims, keepdims=True, where=is_word))


def _mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.mean(x, dims, keepdims=True)
