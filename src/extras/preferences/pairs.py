"""Reads .jsonl files of preference pairs, and builds batch rows from them: `python -m src.train_dpo`."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from src.data.readers import files
from src.data.types import Conversation, Document, Fingerprint, InputSpec, Message, RowArrays, RowSource
from src.extras.conversations import ConversationSource, encode_conversation, is_left_out, read_message
from src.system.errors import UserError
from src.system.json_text import well_formed

_EXPECTED = (
    'expected "prompt", "chosen" and "rejected", all texts or all lists of messages '
    '[{"role": ..., "content": ...}, ...]; lists that begin with the prompt need no "prompt"'
)
Messages = tuple[Message, ...]


class Pair(NamedTuple):
    """A line of a .jsonl file: a prompt and two answers to it."""

    chosen: Conversation  # with the prompt before the answer
    rejected: Conversation
    first: int  # index of the message with which the answers begin


class PairSource(ConversationSource):
    """Reads .jsonl files of preference pairs, in TRL's formats. Opening checks all lines.

    The arguments and errors are as in `ConversationSource`.
    """

    reader, expected = "src.train_dpo", _EXPECTED

    def parse_record(self, record: Any, file: str, start: int) -> Pair:
        """Converts a line's JSON to a pair; raises ValueError if it is not one, or leaves an answer out of the loss."""
        prompt, chosen, rejected, is_text = _read_pair(record)
        names = ("prompt", "chosen", "rejected")
        chats = [self._fields.read(record, prompt + answer, *names) for answer in (chosen, rejected)]
        first = len(chats[0].messages) - len(chosen)  # a system message may precede the prompt
        if any(is_left_out(message) for chat in chats for message in chat.messages[first:]):
            raise ValueError(
                'an answer has "weight": 0 or "train": false, but whole answers are compared: remove these'
            )
        return Pair(
            *(chat._replace(is_pair=is_text and first == 1, file=file, start=start) for chat in chats), first=first
        )

    def fingerprint(self) -> Fingerprint:
        """Identifies the pairs; equal for files with the same lines."""
        return super().fingerprint() | {"type": "pairs"}


def _read_pair(record: Any) -> tuple[Any, ...]:
    """Returns the messages of the prompt, the chosen and the rejected answer, and whether all three were strings.

    Raises ValueError if the record is not a pair, or as `_check` does.
    """
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise ValueError(_EXPECTED)
    texts = prompt, chosen, rejected = [record.get(name) for name in ("prompt", "chosen", "rejected")]
    if is_text := all(isinstance(text, str) for text in texts):
        roles = ("user", "assistant", "assistant")
        messages = tuple(
            ({"role": role, "content": well_formed(str(text))},) for role, text in zip(roles, texts, strict=True)
        )
    elif isinstance(chosen, list) and isinstance(rejected, list):
        messages = _of_lists(prompt, chosen, rejected)
    else:
        raise ValueError(_EXPECTED)
    _check(*messages)
    return *messages, is_text


def _of_lists(prompt: Any, chosen: Any, rejected: Any) -> tuple[Messages, ...]:
    """Returns the messages of the prompt, the chosen and the rejected answer, from lists of messages.

    If `prompt` is not itself a list with messages, the prompt is the messages with which both lists begin. Raises
    ValueError if a message is malformed, or if `prompt` is a string that is not among these messages.
    """
    before, chosen, rejected = (
        tuple(read_message(message, number) for number, message in enumerate(messages, start=1))
        for messages in (prompt if isinstance(prompt, list) else [], chosen, rejected)
    )
    if not before:
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        shared = [*same, False].index(False)
        before, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if isinstance(prompt, str) and well_formed(prompt) not in [message.get("content") for message in before]:
        raise ValueError('"chosen" and "rejected" do not both begin with "prompt"')
    return before, chosen, rejected


def _check(before: Messages, chosen: Messages, rejected: Messages) -> None:
    if chosen == rejected:
        raise ValueError('"chosen" and "rejected" are the same: there is nothing to prefer. Remove the line')
    if not before:
        raise ValueError(f'the prompts of "chosen" and "rejected" differ or are missing: {_EXPECTED}')
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or not any(value and str(value).strip() for key, value in answer[0].items() if key != "role"):
            raise ValueError(f'"{name}" has no answer to the prompt, or an empty one')
        if (role := answer[0]["role"]) != "assistant":
            raise ValueError(
                f'the answer of "{name}" begins with a message of the {role}, not of the assistant: the prompts of the '
                f'pair differ, or the list repeats "prompt". {_EXPECTED}'
            )


class PairRows(RowSource):
    """Makes a row of each pair: the prompt with the chosen answer, then with the rejected one.

    Only answers count in the loss.
    """

    def __init__(self, inputs: InputSpec, source: Any) -> None:
        self._inputs, self._source, self.row_count, self.listings = inputs, source, len(source), source.listings

    def row(self, i: int) -> list[Document]:
        """Returns both documents; raises UserError if they exceed a row, or if the template splits an answer."""
        (chosen, rejected, first), T = self._source[i], self._inputs.batch.max_target_length
        assert self._inputs.tokenizer
        examples = [encode_conversation(self._inputs.tokenizer, each, True, first) for each in (chosen, rejected)]
        documents = [document for example in examples for document in example]
        tokens, line = sum(len(document.ids) - 1 for document in documents), files.line_name(chosen.file, chosen.start)
        if len(documents) > 2:
            raise UserError(
                f"{line}: an answer has several turns of the assistant, and the "
                "tokenizer's chat template rewrites earlier ones: remove the line"
            )
        if tokens > T:
            raise UserError(
                f"{line}: the pair has {tokens:,} tokens (each answer with the "
                f"prompt), more than max_target_length={T:,}: raise it, or remove the line. Pairs are not truncated"
            )
        return documents

    def fingerprint(self) -> Fingerprint:
        """Returns the source's fingerprint."""
        return self._source.fingerprint()


def pair_fields(length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Declares the arrays of `pair_batch` for rows of `length` tokens, in addition to `BATCH_ARRAYS`."""
    shapes = {"answer_mask": (length,), "reference": (2,)}
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def pair_batch(rows: RowArrays, reference: Mapping[str, Sequence[float]] | None) -> RowArrays:
    """Adds the loss's inputs to rows of pairs: `answer_mask`, `loss_mask` and `reference`.

    `answer_mask` is 1 for targets in an answer. `loss_mask`, whose sum divides the step's loss, is 1 at the first token
    of each pair, so that a pair counts once. The array `reference` has both answers' log-probabilities, in nats: the
    argument's, by `pair_keys`, or zeros if it is None. Raises UserError for a pair that the argument lacks.
    """
    keys = pair_keys(rows)
    if reference is not None and (unknown := {*keys} - {"", *reference}):
        raise UserError(
            f"{len(unknown)} pairs of a batch were not in the data that this run began with: use another run_name"
        )
    log_probs = [reference[key] if reference and key else (0, 0) for key in keys]
    first_BT = (np.arange(rows["tokens"].shape[1]) == 0) * (rows["segment_ids"] > 0)
    masks = {"answer_mask": rows["loss_mask"], "loss_mask": first_BT.astype(np.float32)}
    return {**rows, **masks, "reference": np.array(log_probs, np.float32)}


def pair_keys(rows: RowArrays) -> list[str]:
    """Returns a digest of each row's pair, covering its log-probabilities' inputs except the model; "" for padding."""
    filled = [segment_ids > 0 for segment_ids in rows["segment_ids"]]
    texts = np.stack([np.int32(rows[name]) for name in ("tokens", "targets", "segment_ids", "loss_mask")], axis=1)
    pairs = (text[:, at].tobytes() for text, at in zip(texts, filled, strict=True))
    return [hashlib.blake2b(pair, digest_size=16).hexdigest() if pair else "" for pair in pairs]
