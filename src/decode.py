"""Text from a model: each next token is drawn from the whole row computed again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import FrozenConfigDict

from src.data.tokenizer import Tokenizer
from src.errors import UserError
from src.model.context import Context
from src.train_step import StepPlan


def encode_prompt(config: FrozenConfigDict, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the key `prompt`, int32 [n].

    Raises:
        UserError: they and `sample_length` more do not fit in a row.
    """
    ids = tokenizer.encode(config.prompt)[:-1]  # without the document's end
    if len(ids) + config.sample_length > config.max_target_length:
        raise UserError(
            f"the prompt's {len(ids)} tokens and sample_length={config.sample_length} are more than "
            f"max_target_length={config.max_target_length}. Use a shorter prompt or a smaller sample_length."
        )
    return ids


def sample(config: FrozenConfigDict, plan: StepPlan, parts: tuple[Any, ...], tokenizer: Tokenizer) -> str:
    """The prompt and up to `sample_length` tokens that the model gives it, fewer if it ends the document, as text."""
    prompt = encode_prompt(config, tokenizer)
    start, end = len(prompt), len(prompt) + config.sample_length
    row = np.zeros(config.max_target_length, np.int32)
    row[:start] = prompt
    copy = plan.layout.sharding(())
    draw = jax.jit(
        functools.partial(
            _draw_tokens, plan=plan, start=start, end=end, temperature=config.decode_sampling_temperature
        ),
        in_shardings=(tuple(plan.by_part(plan.shardings).values()), copy),
        out_shardings=copy,
    )
    drawn = np.asarray(draw(parts, row))[:end]
    document_ends = np.flatnonzero(drawn[start:] == tokenizer.eos)
    return tokenizer.decode(drawn[: start + document_ends[0]] if len(document_ends) else drawn)


def _draw_tokens(
    parts: tuple[Any, ...], row_T: jax.Array, plan: StepPlan, start: int, end: int, temperature: float
) -> jax.Array:
    """The row [T] with the tokens from position `start` to `end` drawn; temperature 0 takes the likeliest."""
    decoder = plan.decoder(*parts)
    # Copies of the row: one a shard of the batch dim is the fewest that fits any mesh.
    tokens_BT = jnp.broadcast_to(row_T, (plan.layout.shards("batch"), len(row_T)))
    tokens_BT = plan.layout.constrain(tokens_BT, "batch", "length")
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    context = Context(positions_BT, jnp.ones_like(tokens_BT), plan.layout, plan.kernel, packed=False)
    key = jax.random.key(plan.seed)

    def draw(position: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        hidden_BTD, _, _ = decoder(tokens_BT, context, plan.execution)
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BTD, position - 1, 1, axis=1)
        logits_V = decoder.logits(last_B1D, context)[0, 0]
        if temperature == 0.0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, position), logits_V / temperature)
        return tokens_BT.at[:, position].set(token.astype(tokens_BT.dtype))

    return jax.lax.fori_loop(start, end, draw, tokens_BT)[0]
