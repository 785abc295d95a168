"""Reads .jsonl files of conversations: `use_sft=true`."""

from typing import Any

import numpy as np

from src.data.conversations import read_message
from src.data.readers import files
from src.data.readers.records import parse_json
from src.data.readers.text import DocumentFiles, is_jsonl
from src.data.types import Conversation, Fingerprint, Message, Source
from src.errors import UserError
from src.json_text import well_formed

_EXPECTED = 'expected {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'


class ConversationSource(Source):
    """Reads .jsonl files of conversations, or of prompts with their completions. Opening checks all lines.

    Args:
        path: a file, a folder (its files at any depth, but for hidden ones) or a glob, local or remote.
        key: the config key that gave `path`, for messages.

    Raises:
        UserError: nothing there, or a line that is neither.
    """

    def __init__(self, path: str, key: str) -> None:
        self._files = DocumentFiles(path, key)
        for file in self._files.paths:
            if not is_jsonl(file):
                raise UserError(f"{key}: {file} is no .jsonl file; use_sft=true reads lines of JSON: {_EXPECTED}")
        for file, extent in self._files.extents():
            content = b"".join(files.chunks(file, int(extent[-1, 1])))  # at once: of a remote file a line is a request
            for start, stop in extent.tolist():
                _read_line(content[start:stop], file, start)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> Conversation:
        file, start, stop = self._files.locate(i)
        return _read_line(files.read(file, start, stop), file, start)

    def document_keys(self) -> np.ndarray:
        return self._files.keys()

    def fingerprint(self) -> Fingerprint:
        return {**self._files.fingerprint(), "type": "conversations"}


def _read_line(line: bytes, file: str, start: int) -> Conversation:
    """Parses the line that begins at byte `start` of a file; raises UserError where it is no conversation."""
    try:
        messages, is_pair = _read_record(parse_json(line))
    except ValueError as error:
        raise UserError(f"{files.line_name(file, start)}: {error}") from None
    return Conversation(messages, is_pair, file, start)


def _read_record(record: Any) -> tuple[tuple[Message, ...], bool]:
    """Returns the messages of a line, and whether it was a prompt and its completion; raises ValueError for neither."""
    if not isinstance(record, dict):
        raise ValueError(_EXPECTED)
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list):
            raise ValueError(f'"messages" is no list: {_EXPECTED}')
        messages = tuple(read_message(message, number) for number, message in enumerate(messages, start=1))
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError("no message is the assistant's: there is nothing to learn")
        return messages, False
    completion = "response" if "response" in record else "completion"
    for field in ("prompt", completion):
        if not isinstance(record.get(field), str):
            fault = f'"{field}" is no string' if field in record else f'there is no "{field}"'
            raise ValueError(f"{fault}: {_EXPECTED}")
    if not record[completion].strip():
        raise ValueError(f'"{completion}" is empty: there is nothing to learn')
    prompt, answer = (well_formed(record[field]) for field in ("prompt", completion))
    return ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer}), True
