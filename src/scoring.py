"""Scores given tokens with a model: the log-probabilities of texts, and whole logits."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from src.config.schema import BatchKeys, Evaluation
from src.errors import UserError
from src.json_text import parse_json, read_lines
from src.loaded_model import LoadedModel
from src.model.forward_context import ForwardContext
from src.model.params import Weights
from src.model.parts import kernel_for
from src.model.pipeline import check_rows
from src.parallel.mesh import global_batch_size
from src.parallel.sequence import from_zigzag, to_zigzag
from src.step.loss import LogitsOf, in_tiles
from src.step.plan import StepPlan


def score_texts(evaluation: Evaluation, batch: BatchKeys, loaded: LoadedModel) -> int:
    """Writes a line of `scores_path` for each text of `texts_path`, in their order; returns how many.

    A line is a JSON object: `text`, `ids` (including the tokenizer's beginning of a text), `log_probs` of each id given
    those before it, in nats (null for the first), and `log_prob`, their sum. Raises UserError: a text is malformed, or
    has more tokens than a row; there is no text or no tokenizer.
    """
    if loaded.tokenizer is None:
        raise UserError("texts_path needs a tokenizer, which dataset_type=synthetic does not have: dataset_type=text")
    path, T = Path(evaluation.texts_path).expanduser(), batch.max_target_length
    texts = read_lines(path, "texts_path", _text_of_json)
    if not texts:
        raise UserError(f"texts_path={path} has no text")
    encoded = [loaded.tokenizer.encode_prompt(text) for text in texts]
    longest = max(map(len, encoded))
    if longest > T:
        text = texts[[len(ids) for ids in encoded].index(longest)]
        raise UserError(
            f"texts_path: the text that begins {text[:40]!r} has {longest} tokens, and max_target_length={T} is a "
            "row's: raise it, or shorten the text"
        )
    compute, B = _compiled(loaded.plan, _log_probs), eval_batch_size(evaluation, batch, loaded.plan)
    # Every process computes, process 0 writes.
    scores_path = Path(evaluation.scores_path).expanduser() if jax.process_index() == 0 else os.devnull
    with open(scores_path, "w", encoding="utf-8") as file:
        for first in range(0, len(texts), B):
            rows = encoded[first : first + B]
            log_probs_BT = compute(loaded.weights, _padded(rows, B, T))
            for text, ids, log_probs_T in zip(texts[first:], rows, log_probs_BT, strict=False):
                log_probs = [None, *map(float, log_probs_T[: len(ids) - 1])]
                line = {"text": text, "ids": ids.tolist(), "log_probs": log_probs, "log_prob": sum(log_probs[1:])}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(texts)


def _text_of_json(line: str) -> str:
    record = parse_json(line)
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    raise ValueError('expected {"text": "..."}')


def write_logits(evaluation: Evaluation, batch: BatchKeys, loaded: LoadedModel) -> tuple[int, int, int]:
    """Writes `logits_path`, float32 [B, T, V], for the ids of `tokens_path`, int32 [B, T]; returns that shape.

    Each row is one whole text; there is no mask but the model's own. Raises UserError: the file is no such array, or an
    id is not in the vocabulary.
    """
    path = Path(evaluation.tokens_path).expanduser()
    try:
        tokens = np.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"tokens_path={path} cannot be read as a .npy file: {error}") from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
        raise UserError(f"tokens_path={path}: expected int32 [B, T], got {tokens.dtype} {list(tokens.shape)}")
    vocab_size = loaded.plan.spec.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(f"tokens_path={path}: ids reach from {tokens.min()} to {tokens.max()}, vocab_size={vocab_size}")
    shape = (*tokens.shape, vocab_size)
    plan = whole_texts(loaded.plan, tokens.shape[1])
    compute, B = _compiled(plan, _logits), eval_batch_size(evaluation, batch, plan)
    file = None
    if jax.process_index() == 0:
        file = np.lib.format.open_memmap(Path(evaluation.logits_path).expanduser(), "w+", np.float32, shape)
    for first in range(0, len(tokens), B):
        rows = tokens[first : first + B]
        logits_BTV = compute(loaded.weights, _padded(rows, B, tokens.shape[1]))
        if file is not None:
            file[first : first + B] = logits_BTV[: len(rows)]
    return shape


def compute_logits(plan: StepPlan, weights: Weights, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns logits, float32 [B, T, V], of rows that each are one text; B divides over the mesh."""
    return _compiled(whole_texts(plan, tokens_BT.shape[1]), _logits)(weights, tokens_BT)


def whole_texts(plan: StepPlan, length: int) -> StepPlan:
    """Returns the plan for rows of `length` tokens, a text each; raises UserError if kernel or positions don't fit."""
    if 0 < (positions := plan.spec.trainable_position_size) < length:
        raise UserError(f"rows of {length} tokens are longer than the model's {positions} positions")
    kernel = kernel_for(plan.step.attention, plan.spec, length, plan.layout)
    return dataclasses.replace(plan, kernel=kernel, packed=False)


def eval_batch_size(evaluation: Evaluation, batch: BatchKeys, plan: StepPlan) -> int:
    """Returns the global batch size of evaluation; raises UserError where it does not divide over the mesh."""
    key = "eval_per_device_batch_size" if evaluation.eval_per_device_batch_size else "per_device_batch_size"
    rows = evaluation.eval_per_device_batch_size or batch.per_device_batch_size
    size = global_batch_size(plan.layout, rows, 1, key)
    check_rows(size, plan.layout, plan.execution.schedule, key)
    return size


def _padded(rows: Sequence[np.ndarray], B: int, T: int) -> np.ndarray:
    """Returns the rows padded with zeros, [B, T], so that all batches have one shape."""
    tokens_BT = np.zeros((B, T), np.int32)
    for row, ids in enumerate(rows):
        tokens_BT[row, : len(ids)] = ids
    return tokens_BT


def _compiled(plan: StepPlan, function: Callable[..., jax.Array]) -> Callable[[Any, np.ndarray], np.ndarray]:
    """Compiles `function(weights, tokens_BT, plan)`; every process passes and gets whole host arrays."""
    row_sharding = plan.layout.sharding(("batch", None))
    in_shardings = (plan.split(plan.shardings), row_sharding)
    compiled = jax.jit(functools.partial(function, plan=plan), in_shardings=in_shardings)

    def compute(weights: Weights, tokens_BT: np.ndarray) -> np.ndarray:
        placed = jax.make_array_from_callback(tokens_BT.shape, row_sharding, lambda index: tokens_BT[index])
        return multihost_utils.process_allgather(compiled(weights, placed), tiled=True)

    return compute


def _logits(weights: Weights, tokens_BT: jax.Array, plan: StepPlan) -> jax.Array:
    """Returns logits [B, T, V] of rows that each are one text."""
    hidden_BTD, logits_of = _hidden_states(weights, tokens_BT, plan)
    hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
    return logits_of(from_zigzag(hidden_BTD, plan.layout.shards("length")))


def _log_probs(weights: Weights, tokens_BT: jax.Array, plan: StepPlan) -> jax.Array:
    """Returns the log-probability [B, T - 1] of each token but the first, given those before it."""
    hidden_BTD, logits_of = _hidden_states(weights, tokens_BT, plan)
    # The last position has an arbitrary target, so that all T positions divide into tiles.
    targets_BT = to_zigzag(jnp.roll(tokens_BT, -1, axis=1), plan.layout)
    shards = plan.layout.shards("norm_length")
    log_probs_BT = token_log_probs(logits_of, hidden_BTD, targets_BT, plan.step.num_vocab_tiling, shards)
    log_probs_BT = plan.layout.constrain(log_probs_BT, "batch", None)
    return from_zigzag(log_probs_BT, plan.layout.shards("length"))[:, :-1]


def token_log_probs(
    logits_of: LogitsOf, hidden_BTD: jax.Array, targets_BT: jax.Array, tiles: int, shards: int = 1
) -> jax.Array:
    """Returns the log-probability [B, T] of each target, in nats; the arguments are those of `cross_entropy`."""

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_BtD, targets_Bt = tile
        log_probs_BtV = jax.nn.log_softmax(logits_of(hidden_BtD))
        return jnp.take_along_axis(log_probs_BtV, targets_Bt[..., None], axis=-1)[..., 0]

    tiled = jax.lax.map(of_tile, in_tiles((hidden_BTD, targets_BT), tiles, shards))
    return jnp.moveaxis(tiled.reshape(tiles, -1, shards, tiled.shape[2] // shards), 0, 2).reshape(targets_BT.shape)


def _hidden_states(weights: Weights, tokens_BT: jax.Array, plan: StepPlan) -> tuple[jax.Array, LogitsOf]:
    """Returns hidden states [B, T, D], in `zigzag_order`, and a function from some of them to logits [B, t, V]."""
    decoder = plan.decoder(weights)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    tokens_BT, positions_BT = (to_zigzag(x, plan.layout) for x in (tokens_BT, positions_BT))
    context = ForwardContext(positions_BT, jnp.ones_like(tokens_BT), plan.layout, plan.kernel, packed=False)
    hidden_BTD, _, _ = decoder(tokens_BT, context, plan.execution)
    return hidden_BTD, lambda hidden_BtD: decoder.logits(hidden_BtD, context)[..., : plan.spec.vocab_size]
