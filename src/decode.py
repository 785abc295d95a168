"""Text from a model: each next token is drawn from the whole row computed again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from src.data.tokenizer import Tokenizer
from src.errors import UserError
from src.model.context import Context
from src.train_step import StepPlan


def encode_prompt(tokenizer: Tokenizer, prompt: str, length: int, row_length: int) -> np.ndarray:
    """The prompt's ids, int32 [n], after which `length` tokens are to be drawn.

    Raises:
        UserError: both do not fit in a row of `row_length`.
    """
    ids = tokenizer.encode(prompt)[:-1]  # without the document's end
    if len(ids) + length > row_length:
        raise UserError(
            f"The prompt's {len(ids)} tokens and sample_length={length} are more than "
            f"max_target_length={row_length}. Use a shorter prompt or a smaller sample_length."
        )
    return ids


def sample(
    plan: StepPlan,
    trainable: Any,
    tokenizer: Tokenizer,
    prompt: np.ndarray,
    length: int,
    row_length: int,
    temperature: float,
) -> str:
    """The prompt and up to `length` tokens that the model gives it, as text.

    Args:
        plan: the run's.
        trainable: its weights.
        tokenizer: of the prompt and the answer.
        prompt: int32 [n], from `encode_prompt`.
        length: tokens to draw; fewer if the model ends the document.
        row_length: T, which holds the prompt and the answer.
        temperature: 0 takes the likeliest token; else logits are divided by it.
    """
    # The rows are copies: one a shard of the batch dim is the fewest that fits any mesh.
    rows = np.zeros((plan.layout.shards("batch"), row_length), np.int32)
    rows[:, : len(prompt)] = prompt
    draw = jax.jit(
        functools.partial(_draw_tokens, plan=plan, start=len(prompt), length=length, temperature=temperature),
        in_shardings=(plan.shardings, plan.layout.sharding(("batch", "length"))),
        out_shardings=plan.layout.sharding(()),
    )
    drawn = np.asarray(draw(trainable, rows))[: len(prompt) + length]
    ends = np.flatnonzero(drawn[len(prompt) :] == tokenizer.eos)
    return tokenizer.decode(drawn[: len(prompt) + ends[0]] if len(ends) else drawn)


def _draw_tokens(
    trainable: Any, tokens_BT: jax.Array, plan: StepPlan, start: int, length: int, temperature: float
) -> jax.Array:
    """One row [T] with `length` tokens drawn from position `start` on."""
    decoder = nnx.merge(plan.graphdef, trainable)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    context = Context(positions_BT, jnp.ones_like(tokens_BT), plan.layout, plan.kernel, packed=False)
    key = jax.random.key(plan.seed)

    def draw(position: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        hidden_BTD, _ = decoder(tokens_BT, context, plan.execution)
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BTD, position - 1, 1, axis=1)
        logits_V = decoder.logits(last_B1D, context)[0, 0]
        if temperature == 0.0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, position), logits_V / temperature)
        return tokens_BT.at[:, position].set(token.astype(tokens_BT.dtype))

    return jax.lax.fori_loop(start, start + length, draw, tokens_BT)[0]
