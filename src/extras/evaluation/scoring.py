"""Scores given tokens with a model: log-probabilities of texts, and full logits; counts the bytes of texts."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from src.config.schema import BatchKeys, Evaluation
from src.data.processes import gather_json
from src.data.types import END, Document, Tokenizer
from src.extras.command_files import read_lines
from src.model.forward_context import ForwardContext
from src.model.params import Weights
from src.model.parts import kernel_for
from src.parallel.sequence import from_zigzag, to_zigzag
from src.step.eval_step import eval_batch_size
from src.step.loss import LogitsOf
from src.step.plan import StepPlan
from src.step.token_scores import token_scores
from src.system.errors import UserError
from src.system.json_text import parse_json

_SHORTEST_ROW = 128  # tokens; kernels need sequence lengths that are multiples of this


class Scorer:
    """Computes log-probabilities of given ids, in rows padded to T, T / 2, ... tokens; each length compiles once.

    T is max_target_length. Raises UserError as `eval_batch_size` does, and calls as `whole_texts` does.
    """

    def __init__(self, evaluation: Evaluation, batch: BatchKeys, plan: StepPlan, weights: Weights) -> None:
        self._plan, self._weights, self._T = plan, weights, batch.max_target_length
        self._B = eval_batch_size(evaluation, batch, plan)
        self._program = functools.cache(lambda T: _compiled(whole_texts(plan, T), _scores))

    def __call__(self, sequences: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields two arrays [n - 1] for each sequence of n ids, n <= T + 1, covering all its ids except the first.

        They are each id's log-probability given the ids before it, in nats, and whether it is the most likely one.
        """
        B = self._B
        for first in range(0, len(sequences), B):
            rows = sequences[first : first + B]
            T = self._row_length(max(map(len, rows)) - 1)
            tokens_BT, targets_BT = (_padded([ids[part] for ids in rows], B, T) for part in (_INPUTS, _TARGETS))
            scores = self._program(T)(self._weights, tokens_BT, targets_BT)
            for ids, log_probs_T, likeliest_T in zip(rows, *scores, strict=False):  # further rows are padding
                yield log_probs_T[: len(ids) - 1], likeliest_T[: len(ids) - 1]

    def _row_length(self, longest: int) -> int:
        """Chooses the shortest of T, T / 2, ... that holds `longest` tokens and is divisible by shards and tiles.

        T if experts have a limited capacity.
        """
        layout, T = self._plan.layout, self._T
        if self._plan.spec.has_capacity:
            return T  # capacity depends on T: with a shorter one, a score would depend on the other texts
        unit = _SHORTEST_ROW * layout.shards("length") * layout.shards("norm_length") * self._plan.step.num_vocab_tiling
        while T % (2 * unit) == 0 and longest <= T // 2:
            T //= 2
        return T


_INPUTS, _TARGETS = slice(None, -1), slice(1, None)
_PADDING = -1  # an invalid id


def score_texts(
    evaluation: Evaluation, batch: BatchKeys, plan: StepPlan, weights: Weights, tokenizer: Tokenizer | None
) -> int:
    """Writes a line to `scores_path` for each text of `texts_path`, in order; returns the number of texts.

    A line is a JSON object: `text`, `ids` (with bos), `log_probs` of each id given the ids before it, in nats (null for
    the first), and `log_prob`, their sum. Raises UserError if the file cannot be read or is empty, if a text is
    malformed or has more than max_target_length tokens, and as `Scorer` does.
    """
    path, T = Path(evaluation.texts_path).expanduser(), batch.max_target_length
    texts = read_lines(path, "texts_path", _text_of_json)
    if not texts:
        raise UserError(f"texts_path={path} has no text")
    assert tokenizer
    encoded = [tokenizer.encode_prompt(text) for text in texts]
    longest = max(map(len, encoded))
    if longest > T:
        text = texts[[len(ids) for ids in encoded].index(longest)]
        raise UserError(
            f"texts_path: the text that begins {text[:40]!r} has {longest} tokens, more than "
            f"max_target_length={T}: raise it, or shorten the text"
        )
    scores = Scorer(evaluation, batch, plan, weights)(encoded)
    # Every process computes; process 0 writes.
    scores_path = Path(evaluation.scores_path).expanduser() if jax.process_index() == 0 else os.devnull
    with open(scores_path, "w", encoding="utf-8") as file:
        for text, ids, (of_ids, _) in zip(texts, encoded, scores, strict=True):
            log_probs = list(map(float, of_ids))
            line = {"text": text, "ids": ids.tolist(), "log_probs": [None, *log_probs], "log_prob": sum(log_probs)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(texts)


def _text_of_json(line: str) -> str:
    record = parse_json(line)
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    raise ValueError('expected {"text": "..."}')


def write_logits(evaluation: Evaluation, batch: BatchKeys, plan: StepPlan, weights: Weights) -> tuple[int, int, int]:
    """Writes logits for `tokens_path` (integers [B, T]) to `logits_path` (float32 [B, T, V]); returns their shape.

    Each row is one text, without segments: only the model's own mask applies. Raises UserError if the file has no such
    array, or if an id is not in the vocabulary, and as `whole_texts` does.
    """
    path = Path(evaluation.tokens_path).expanduser()
    try:
        with path.open("rb") as opened:
            tokens = np.lib.format.read_array(opened)
    except Exception as error:  # a damaged header may raise more than ValueError, such as MemoryError
        raise UserError(f"tokens_path={path} cannot be read as a .npy file: {error}") from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
        raise UserError(f"tokens_path={path}: expected int32 [B, T], got {tokens.dtype} {list(tokens.shape)}")
    vocab_size = plan.spec.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(f"tokens_path={path}: ids reach from {tokens.min()} to {tokens.max()}, vocab_size={vocab_size}")
    shape = (*tokens.shape, vocab_size)
    plan = whole_texts(plan, tokens.shape[1])
    compute, B = _compiled(plan, _logits), eval_batch_size(evaluation, batch, plan)
    file = None
    if jax.process_index() == 0:
        out = Path(evaluation.logits_path).expanduser()
        # NumPy itself writes version 1.0; version 2.0 lets `command_files.is_own` recognize ours.
        file = np.lib.format.open_memmap(out, "w+", np.float32, shape, version=(2, 0))
    for first in range(0, len(tokens), B):
        rows = tokens[first : first + B]
        logits_BTV = compute(weights, _padded(rows, B, tokens.shape[1]))
        if file is not None:
            file[first : first + B] = logits_BTV[: len(rows)]
    return shape


def compute_logits(plan: StepPlan, weights: Weights, tokens_BT: np.ndarray) -> np.ndarray:
    """Computes logits, float32 [B, T, V], of a text per row; raises UserError as `whole_texts` does.

    B must be divisible by the number of batch shards.
    """
    return _compiled(whole_texts(plan, tokens_BT.shape[1]), _logits)(weights, tokens_BT)


def whole_texts(plan: StepPlan, length: int) -> StepPlan:
    """Adapts the plan to one text per sequence of `length`; raises UserError if the model or kernel can't take it."""
    if 0 < (positions := plan.spec.trainable_position_size) < length:
        raise UserError(f"sequences of {length} tokens are longer than the model's {positions} positions")
    kernel = kernel_for(plan.step.attention, plan.spec, length, plan.layout).name
    return dataclasses.replace(plan, kernel=kernel, packed=False)


def _padded(rows: Iterable[np.ndarray], B: int, T: int) -> np.ndarray:
    tokens_BT = np.full((B, T), _PADDING, np.int32)
    for row, ids in enumerate(rows):
        tokens_BT[row, : len(ids)] = ids
    return tokens_BT


def _compiled(plan: StepPlan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jits `function(weights, *arrays, plan)` for arrays [B, T]; every process passes and gets global arrays."""
    row_sharding = plan.layout.sharding(("batch", None))
    in_shardings = (plan.split(plan.shardings), row_sharding)
    compiled = jax.jit(lambda weights, arrays: function(weights, *arrays, plan=plan), in_shardings=in_shardings)

    def compute(weights: Weights, *arrays: np.ndarray) -> Any:
        placed = tuple(jax.make_array_from_callback(x.shape, row_sharding, x.__getitem__) for x in arrays)
        return multihost_utils.process_allgather(compiled(weights, placed), tiled=True)

    return compute


def _logits(weights: Weights, tokens_BT: jax.Array, plan: StepPlan) -> jax.Array:
    hidden_BTD, logits_of = _hidden_states(weights, tokens_BT, plan)
    hidden_BTD = plan.layout.constrain(hidden_BTD, "batch", None, None)
    return logits_of(from_zigzag(hidden_BTD, plan.layout.shards("length")))


def _scores(weights: Weights, tokens_BT: jax.Array, targets_BT: jax.Array, plan: StepPlan) -> tuple[jax.Array, ...]:
    """Computes the targets' `token_scores`, each given its token and the tokens before it in the sequence."""
    hidden_BTD, logits_of = _hidden_states(weights, tokens_BT, plan)
    targets_BT, shards = to_zigzag(targets_BT, plan.layout), plan.layout.shards("norm_length")
    scores = token_scores(logits_of, hidden_BTD, targets_BT, plan.step.num_vocab_tiling, shards)
    whole_BT = (plan.layout.constrain(x_BT, "batch", None) for x_BT in scores)
    return tuple(from_zigzag(x_BT, plan.layout.shards("length")) for x_BT in whole_BT)


def _hidden_states(weights: Weights, tokens_BT: jax.Array, plan: StepPlan) -> tuple[jax.Array, LogitsOf]:
    """Returns hidden states [B, T, D], and a function from some of them to logits [B, t, V]."""
    decoder = plan.decoder(weights)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    tokens_BT, positions_BT = (to_zigzag(x, plan.layout) for x in (tokens_BT, positions_BT))
    segment_ids_BT = jnp.int32(tokens_BT != _PADDING)  # padding must not use the experts' capacity
    context = ForwardContext(positions_BT, segment_ids_BT, plan.layout, plan.kernel, packed=False)
    hidden_BTD, _, _ = decoder(jnp.maximum(tokens_BT, 0), context, plan.execution)
    return hidden_BTD, lambda hidden_BtD: decoder.logits(hidden_BtD, context)[..., : plan.spec.vocab_size]


# ---- Bytes of texts, for bits per byte


class TextBytes:
    """Tokenizes texts, counting the bytes of each id, and remembers texts that the tokenizer decodes to other texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._example = tokenizer, ""
        self._changed: set[str] = set()  # by digest: a text may be read again, and by several processes

    def document(self, text: str) -> Document:
        """Returns the text's ids with their `text_bytes`, which add up to those of the whole text.

        If several tokens make up a character, the first one has its bytes. Text that the tokenizer leaves out belongs
        to the token after it, or to the last one. A text that it leaves out entirely (SentencePiece: spaces) has no
        bytes.
        """
        ids, ends = self._tokenizer.encode(text), np.maximum.accumulate(self._tokenizer.byte_ends(text))
        begin = 1 if len(ends) == len(ids) - 2 else len(self._tokenizer.encode_prompt(text)) - len(ends)
        of_text = slice(begin, begin + len(ends))
        ends[-1:] = len(text.encode())
        if self._tokenizer.decode_spelled(ids[of_text]) != text:
            self._changed.add(hashlib.sha256(text.encode()).hexdigest()[:16])
            self._example = text
        parts = [END] * begin, np.diff(ends, prepend=0), [END] * (len(ids) - of_text.stop)
        return Document(ids, text_bytes=np.concatenate(parts).astype(np.int32))

    def notes(self) -> list[str]:
        """Returns a line for the user if the tokenizer changes texts, so that their bytes are not all predicted.

        Every process calls this: the line covers the texts of all processes.
        """
        text, decoded = self._example, self._tokenizer.decode_spelled(self._tokenizer.encode_text(self._example))
        at = len(os.path.commonprefix([text, decoded]))  # noqa: RUF071  # characters are to be compared
        excerpts = [each[max(at - 10, 0) : at + 10] for each in (text, decoded)]
        changed = [each for each in gather_json([sorted(self._changed), excerpts]) if each[0]]
        if not changed:
            return []
        before, after = changed[0][1]
        count = len(set().union(*(texts for texts, _ in changed)))
        return [
            f"the tokenizer changes {count} of the texts, such as {before!r} to {after!r}: bits per byte count the "
            "bytes as they were, though nothing predicts what is lost"
        ]
