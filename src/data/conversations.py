"""Turns conversations into ids for supervised finetuning, and marks the tokens that count in the loss."""

import json
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from src.data.readers.files import line_name
from src.data.types import Conversation, Document, Message, Tokenizer
from src.errors import UserError
from src.json_text import well_formed

if TYPE_CHECKING:
    from src.data.huggingface_tokenizer import HuggingFaceTokenizer

# What chat templates are told of the time: training data must be the same on the day a run is resumed. It is the date
# that Llama 3.1's template falls back on.
NOW = datetime(2024, 7, 26)

ROLES = ("system", "user", "assistant", "tool")


def read_message(message: Any, number: int) -> Message:
    """Checks that a message has a role and a text; other fields go to the chat template as they are.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(message, dict):
        raise ValueError(f'message {number} is no object: expected {{"role": ..., "content": ...}}')
    for field in ("role", "content"):
        if field not in message:
            raise ValueError(f'message {number} has no "{field}"')
    if message["role"] not in ROLES:
        raise ValueError(f"message {number} has the role {message['role']!r}: expected one of {', '.join(ROLES)}")
    if not isinstance(message["content"], str):
        found = textwrap.shorten(json.dumps(message["content"], ensure_ascii=False), 40, placeholder="...")
        raise ValueError(
            f'message {number} has "content": {found}, expected a string. '
            "Calls of tools and parts that are no text are not read: write them out as text, or leave the line out"
        )
    if message["role"] == "assistant" and not message["content"].strip():
        raise ValueError(f"message {number}, of the assistant, is empty: there is nothing to learn")
    return {**message, "content": well_formed(message["content"])}


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation, completion_only: bool) -> list[Document]:
    """Tokenizes a conversation, and marks which ids count in the loss.

    The tokenizer's chat template writes it. Without one, a prompt and its completion are bos, prompt, completion, eos.
    With `completion_only` a template that rewrites earlier turns gives a document for each turn of the assistant.

    Args:
        tokenizer: any.
        conversation: any.
        completion_only: count the assistant's tokens alone, with the token after each turn that ends it.

    Raises:
        UserError: messages without a template, or a template that does not show what the assistant says.
    """
    if conversation.is_pair and tokenizer.chat_template is None:
        prompt, completion = (message["content"] for message in conversation.messages)
        prompt_ids, completion_ids = tokenizer.encode_prompt(prompt), tokenizer.encode_text(completion)
        ids = np.concatenate([prompt_ids, completion_ids, [tokenizer.eos]]).astype(np.int32)
        return [Document(ids, np.arange(len(ids)) >= len(prompt_ids) if completion_only else None)]
    try:
        if completion_only:
            return _encode_turns(tokenizer, conversation.messages)
        return [Document(tokenizer.encode_text(tokenizer.render_chat(conversation.messages, False, NOW)))]
    except UserError as error:
        raise UserError(f"{line_name(conversation.file, conversation.start)}: {error}") from None


def _encode_turns(tokenizer: "HuggingFaceTokenizer", messages: tuple[Message, ...]) -> list[Document]:
    """Tokenizes a conversation as the template writes it; the ids of the assistant's turns count in the loss.

    Where the template only appends, that is one document; a turn is the text by which the conversation up to it is
    longer than the prompt for it. A template that rewrites earlier turns gives a document for each turn: the prompt for
    it, as the model will be shown it, and the turn.
    """
    if tokenizer.chat_template is None:
        from src.data.chat_template import missing_template  # which imports Jinja2

        raise missing_template()
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    parts = [(len(messages), False), *((turn, True) for turn in turns), *((turn + 1, False) for turn in turns)]
    text, *rendered = tokenizer.render_parts(messages, parts, NOW)
    prompts, through = rendered[: len(turns)], rendered[len(turns) :]
    extends = [up_to.startswith(prompt) and up_to != prompt for prompt, up_to in zip(prompts, through, strict=True)]
    if all(extends) and all(map(text.startswith, through)):
        return [_document(tokenizer, text, list(zip(map(len, prompts), map(len, through), strict=True)))]
    documents = []
    for turn, prompt, up_to, is_longer in zip(turns, prompts, through, extends, strict=True):
        begin = len(prompt) if is_longer else _turn_begin(tokenizer, messages[: turn + 1], prompt, up_to)
        written = prompt + up_to[begin:]
        documents.append(_document(tokenizer, written, [(len(prompt), len(written))]))
    return documents


def _turn_begin(tokenizer: "HuggingFaceTokenizer", messages: tuple[Message, ...], prompt: str, text: str) -> int:
    """Finds where the last message, the assistant's, begins in the template's `text` of a conversation.

    Some templates write earlier messages differently once the answer is there: Mistral's leaves out the system message.
    Then the message before the answer, and what follows that in the prompt, show where the answer begins.

    Raises:
        UserError: the text and the prompt do not share these.
    """

    def content_begin(messages: Sequence[Message], add_generation_prompt: bool) -> int:
        """Finds where the template writes the content of the last message."""
        others = ([*messages[:-1], {**messages[-1], "content": content}] for content in ("x", "y"))
        one, other = (tokenizer.render_chat(each, add_generation_prompt, NOW) for each in others)
        return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))

    if len(messages) > 1:
        before = prompt[content_begin(messages[:-1], True) :]
        found = text.rfind(before, 0, content_begin(messages, False))
        if before and found >= 0:
            return found + len(before)
    raise UserError(
        f"the tokenizer's chat template does not show where message {len(messages)}, the assistant's, begins: with it "
        "the conversation is written in another way than the prompt for it. Give the tokenizer a template that only "
        "appends, or set sft_train_on_completion_only=false"
    )


def _document(tokenizer: "HuggingFaceTokenizer", text: str, turns: list[tuple[int, int]]) -> Document:
    """Tokenizes a text; the ids of characters in a turn count in the loss, and each turn is [begin, end) in the text.

    Raises:
        UserError: a turn has more text after the token that ends it.
    """
    ids, spans = tokenizer.encode_with_spans(text)
    stops = np.isin(ids, list(tokenizer.stop_ids))
    loss_mask = np.zeros(len(ids), bool)
    for begin, end in turns:
        in_turn = (spans[:, 0] < end) & (spans[:, 1] > begin)
        ends = np.flatnonzero(in_turn & stops)
        # A template may write a line end after the token that ends the turn: a model that stops there never says it.
        if len(ends):
            if rest := text[spans[ends[-1], 1] : end].strip():
                raise UserError(
                    f"the tokenizer's chat template writes {rest[:40]!r} after the token that ends the assistant's "
                    "turn. Give it a template that ends a turn there, or set sft_train_on_completion_only=false"
                )
            in_turn[ends[-1] + 1 :] = False
        loss_mask |= in_turn
    return Document(ids, loss_mask)
