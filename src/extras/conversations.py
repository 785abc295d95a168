"""Reads .jsonl files of conversations, and tokenizes them with a mask of the tokens in the loss: `use_sft=true`."""

import contextlib
import hashlib
import itertools
import json
import operator
import re
import textwrap
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from src.data.readers import files
from src.data.readers.files import is_jsonl
from src.data.readers.text import DocumentFiles
from src.data.types import Conversation, Document, Fingerprint, InputSpec, Message, Shown, Source, Tokenizer
from src.system.errors import UserError, printable, say
from src.system.json_text import parse_json, well_formed

# The date that chat templates see: fixed, because training data must be the same on the day a run is resumed. Llama
# 3.1's template defaults to this date.
_NOW = "2024-07-26"

ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = (
    'expected {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}, which are '
    'ShareGPT\'s "conversations" with "from" (human: user, gpt: assistant) and "value"'
)
_OF_RECORD = ("system", "tools", "chat_template_kwargs")
_OF_LOSS = ("weight", "train")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # alternative names of one message field, by precedence
# Fields by which other trainers change what the model sees or learns, and what to write instead here.
_INSTEAD = {
    **dict.fromkeys(("conversations", "history"), 'all turns in "messages"'),
    **dict.fromkeys(("functions", "function_call"), '"tools", and "tool_calls" in messages'),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "conversations of text only"),
    **dict.fromkeys((*_OF_LOSS, "training", "loss", "train_detail"), '"train": false in messages not to be learned'),
    "documents": '"chat_template_kwargs": {"documents": ...}',
}


class ChatFields:
    """Extracts a record's fields for the chat template and the loss; `unused` collects the names of other fields.

    `shown`: variables that every conversation's template gets.
    """

    def __init__(self, inputs: InputSpec, **shown: Any) -> None:
        of = inputs.tokenizer
        words = {*re.findall(r"\w+", f"{of.chat_template} {of.tool_template}")} if of else set()
        self._words = words | {*_REASONING} if words & {*_REASONING} else words
        self._of_message = {"role", "content", *_OF_LOSS, *self._words}
        self._rules, self._shown, self.unused = inputs.rules, shown, set[str]()

    def read(self, record: Mapping[str, Any], messages: Sequence[Message], *names: str) -> Conversation:
        """Builds a conversation from messages, read from the record's fields `names`, and the other template variables.

        A template gets the same variables as in transformers; by version 1 of the data rules, it gets only messages.
        Raises ValueError for an invalid field, or one that other trainers read and MinText does not.
        """
        if self._rules == 1:
            kept = ({key: each[key] for key in each if key not in _OF_LOSS} for each in messages)
            return Conversation(tuple(kept), shown=self._shown)
        system, tools, variables = map(record.get, _OF_RECORD)
        if isinstance(tools, str):  # Parquet files have them as strings
            with contextlib.suppress(ValueError):
                tools = parse_json(tools)
        if any(not isinstance(each, kind) for each, kind in ((system, str), (tools, list), (variables, dict)) if each):
            raise ValueError('expected "system" as a string, "tools" as a list, "chat_template_kwargs" as an object')
        shown = {"tools": tools, **(variables or {})}
        self._check(record, {*names, *_OF_RECORD})
        self._check(shown, self._words)
        for message in messages:
            self._check(message, self._of_message)
        before = [{"role": "system", "content": system}] if system else []
        return Conversation(tuple(map(_as_shown, [*before, *messages])), shown={**self._shown, **shown})

    def _check(self, fields: Mapping[str, Any], read: Set[str]) -> None:
        for name in (name for name in fields.keys() - read if fields[name] not in (None, "", [], {})):
            if name in _INSTEAD:
                raise ValueError(f'"{name}" is not read here: write {_INSTEAD[name]}')
            self.unused.add(name)

    def report(self, key: str) -> None:
        """Prints which fields of the data in `key` have no effect."""
        if self.unused:
            say([f"{key}: these fields have no effect: {printable(', '.join(sorted(self.unused)))}"])


def _as_shown(message: Message) -> Message:
    """Drops nulls, and copies reasoning to the field names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ConversationSource(Source):
    """Reads .jsonl files of conversations, or of prompts with completions. Opening checks all lines.

    `path` and `key` are as in `DocumentFiles`. Raises UserError for a file that is not .jsonl, or a malformed line, and
    as `DocumentFiles` does.
    """

    reader, expected = "use_sft=true", _EXPECTED

    def __init__(self, path: str, key: str, inputs: InputSpec) -> None:
        self._files, self._inputs = DocumentFiles(path, key, self.expected, inputs.rules), inputs
        self.listings = [self._files.listing]
        self._fields = ChatFields(inputs, strftime_now=_NOW)
        for file in self._files.paths:
            if not is_jsonl(file):
                raise UserError(
                    f"{key}: {file} is not a .jsonl file; {self.reader} reads lines of JSON: {self.expected}"
                )
        digest = hashlib.sha256()
        for file, lines in itertools.groupby(map(self._files.locate, range(len(self))), operator.itemgetter(0)):
            extents = [extent for _, *extent in lines]
            # In one read: for a remote file, each line would be a request.
            content = b"".join(files.chunks(file, extents[-1][1]))
            digest.update(content)
            for start, stop in extents:
                self.parse(content[start:stop], file, start)
        self.digest = digest.hexdigest()[:16]
        self._fields.report(key)

    def parse(self, line: bytes, file: str, start: int) -> Conversation:
        """Parses the line that begins at byte `start` of a file; raises UserError if it is malformed."""
        try:
            return self.parse_record(parse_json(line), file, start)
        except ValueError as error:
            raise UserError(f"{files.line_name(file, start)}: {error}") from None

    def parse_record(self, record: Any, file: str, start: int) -> Any:
        """Converts a line's JSON to a conversation.

        Raises ValueError if it is not one, if no message counts in the loss, or if only some of the assistant's do and
        `sft_train_on_completion_only` is false.
        """
        messages, *names = _messages(record)
        chat = self._fields.read(record, messages, *names)
        left_out = list(map(is_left_out, chat.messages))
        if all(out or message["role"] != "assistant" for message, out in zip(chat.messages, left_out, strict=True)):
            raise ValueError("no message of the assistant counts in the loss: there is nothing to learn")
        if any(left_out) and not self._inputs.data.sft_train_on_completion_only:
            raise ValueError('"weight": 0 and "train": false need sft_train_on_completion_only=true')
        return chat._replace(is_pair=len(names) == len(chat.messages) == 2, file=file, start=start)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> Conversation:
        file, start, stop = self._files.locate(i)
        return self.parse(files.read(file, start, stop), file, start)

    def document_keys(self) -> np.ndarray:
        return self._files.document_keys()

    def fingerprint(self) -> Fingerprint:
        return {**self._files.fingerprint(), "type": "conversations", "lines": self.digest}


def _messages(record: Any) -> tuple[Any, ...]:
    """Returns a record's list of messages, then the names of the fields read.

    A prompt and a completion become a message of the user and one of the assistant. Raises ValueError for any other
    record.
    """
    if not isinstance(record, dict):
        raise ValueError(_EXPECTED)
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list):
            raise ValueError(f'"messages" is not a list: {_EXPECTED}')
        return [read_message(message, number) for number, message in enumerate(messages, start=1)], "messages"
    completion = "response" if "response" in record else "completion"
    for field in ("prompt", completion):
        if not isinstance(record.get(field), str):
            fault = f'"{field}" is not a string' if field in record else f'there is no "{field}"'
            raise ValueError(f"{fault}: {_EXPECTED}")
    if not record[completion].strip():
        raise ValueError(f'"{completion}" is empty: there is nothing to learn')
    prompt, answer = well_formed(record["prompt"]), well_formed(record[completion])
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], "prompt", completion


def read_message(message: Any, number: int) -> Message:
    """Returns a message unchanged, after checking its role and content; `number` is its number in error messages.

    Raises ValueError if it is malformed, or if the assistant says nothing: neither content, reasoning nor tool calls.
    """
    if not isinstance(message, dict):
        raise ValueError(f'message {number} is not an object: expected {{"role": ..., "content": ...}}')
    role, content = message.get("role"), message.get("content")
    says = role == "assistant" and any(message.get(name) for name in ("tool_calls", *_REASONING))
    for field, value in (("role", role), ("content", content)):
        if value is None and not (says and field == "content"):
            raise ValueError(f'message {number} has no "{field}"')
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}: expected one of {', '.join(ROLES)}")
    if not isinstance(content, str | None):
        excerpt = textwrap.shorten(json.dumps(content, ensure_ascii=False), 40, placeholder="...")
        raise ValueError(
            f'message {number} has "content": {excerpt}, expected a string. '
            "Lists of parts are not supported: join them into one text, or remove the line"
        )
    if role == "assistant" and not (says or (content or "").strip()):
        raise ValueError(f"message {number}, of the assistant, is empty: there is nothing to learn")
    return message


def is_left_out(message: Message) -> bool:
    """Tells whether a message has `weight: 0` or `train: false`; raises ValueError for other unsupported values."""
    role, values = message["role"], [message.get(name) for name in _OF_LOSS]
    if any(value not in (None, 0, role == "assistant") for value in values):  # other roles are never trained on
        said = '"weight" and "train" may be 0 and false, in messages of the assistant also 1 and true'
        raise ValueError(f"{said}: one of the {role} has {values!r:.60}")
    return 0 in values


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation, completion_only: bool, first: int = 0
) -> list[Document]:
    """Tokenizes a conversation, and marks the ids that count in the loss.

    The tokenizer's chat template formats it. Without a template, a prompt and its completion become bos, prompt,
    completion, eos. With `completion_only`, only the assistant's messages from index `first` on count, including the
    token that ends each turn; a template that rewrites earlier turns then gives a document for each turn of the
    assistant. Raises UserError for messages without a template, or if the template does not show the bounds of the
    assistant's turns.
    """
    if conversation.is_pair and tokenizer.chat_template is None:
        prompt, completion = (message["content"] for message in conversation.messages)
        prompt_ids, completion_ids = tokenizer.encode_prompt(prompt), tokenizer.encode_text(completion)
        ends = tokenizer.rules > 1 and completion_ids[-1:].tolist() == [tokenizer.eos]
        ids = np.concatenate([prompt_ids, completion_ids, [tokenizer.eos] * (not ends)]).astype(np.int32)
        return [Document(ids, np.arange(len(ids)) >= len(prompt_ids) if completion_only else None)]
    try:
        if completion_only:
            return _encode_turns(tokenizer, conversation, first)
        text = tokenizer.render_chat(conversation.messages, False, conversation.shown)
        return [Document(tokenizer.encode_text(text))]
    except UserError as error:
        raise UserError(f"{files.line_name(conversation.file, conversation.start)}: {error}") from None


def _encode_turns(tokenizer: Tokenizer, conversation: Conversation, first: int) -> list[Document]:
    """Tokenizes a conversation as the template formats it; the assistant's turns from message `first` on have a loss.

    If the template only appends, the result is one document, and a turn is the text added to its prompt. A template
    that rewrites earlier turns gives a document for each turn: its prompt, as the model will see it, and the turn.
    """
    messages, shown = conversation.messages, conversation.shown
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn >= first]
    turns = [turn for turn in turns if not is_left_out(messages[turn])]
    parts = [(len(messages), False), *((turn, True) for turn in turns), *((turn + 1, False) for turn in turns)]
    text, *rendered = tokenizer.render_parts(messages, parts, shown)
    prompts, through = rendered[: len(turns)], rendered[len(turns) :]
    extends = [up_to.startswith(prompt) and up_to != prompt for prompt, up_to in zip(prompts, through, strict=True)]
    if all(extends) and all(map(text.startswith, through)):
        return [_document(tokenizer, text, list(zip(map(len, prompts), map(len, through), strict=True)))]
    documents = []
    for turn, prompt, up_to, is_longer in zip(turns, prompts, through, extends, strict=True):
        begin = len(prompt) if is_longer else _turn_begin(tokenizer, messages[: turn + 1], shown, prompt, up_to)
        written = prompt + up_to[begin:]
        documents.append(_document(tokenizer, written, [(len(prompt), len(written))]))
    return documents


def _turn_begin(tokenizer: Tokenizer, messages: tuple[Message, ...], shown: Shown, prompt: str, text: str) -> int:
    """Returns the index in `text`, the rendered conversation, at which its last message, the assistant's, begins.

    Some templates format earlier messages differently once the answer follows: Mistral's leaves out the system
    message. In that case, search for the message before the answer, with the text that follows it in the prompt. Raises
    UserError if it is not found.
    """

    def content_begin(messages: Sequence[Message], add_generation_prompt: bool) -> int:
        """Finds where the template inserts the content of the last message."""
        variants = ([*messages[:-1], {**messages[-1], "content": content}] for content in ("x", "y"))
        one, other = (tokenizer.render_chat(each, add_generation_prompt, shown) for each in variants)
        return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))

    if len(messages) > 1:
        before = prompt[content_begin(messages[:-1], True) :]
        begin = text.rfind(before, 0, content_begin(messages, False))
        if before and begin >= 0:
            return begin + len(before)
    raise UserError(
        f"the tokenizer's chat template does not show where message {len(messages)}, the assistant's, begins: it "
        "formats the conversation differently from the prompt for it. Give the tokenizer a template that only "
        "appends, or set sft_train_on_completion_only=false"
    )


def _document(tokenizer: Any, text: str, turns: list[tuple[int, int]]) -> Document:
    """Tokenizes a text; only ids that overlap a turn count in the loss, up to and including its last stop token.

    `turns` are ranges of characters, [begin, end). Raises UserError if a turn has words after its last stop token.
    """
    ids, spans = tokenizer.encode_with_spans(text)
    stops = np.isin(ids, list(tokenizer.stop_ids))
    loss_mask = np.zeros(len(ids), bool)
    for begin, end in turns:
        in_turn = (spans[:, 0] < end) & (spans[:, 1] > begin)
        ends = np.flatnonzero(in_turn & stops)
        # A template may write a newline after the stop token: don't train on it, since generation stops before it.
        if len(ends):
            if rest := text[spans[ends[-1], 1] : end].strip():
                raise UserError(
                    f"the tokenizer's chat template writes {rest[:40]!r} after the token that ends the assistant's "
                    "turn. Give it a template that ends a turn there, or set sft_train_on_completion_only=false"
                )
            in_turn[ends[-1] + 1 :] = False
        loss_mask |= in_turn
    return Document(ids, loss_mask)
