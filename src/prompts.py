"""What a model is asked: texts and conversations, from the command line, a file or a terminal, as token ids."""

from pathlib import Path

import numpy as np
from ml_collections import FrozenConfigDict

from src.data.conversations import read_message
from src.data.readers.documents import well_formed
from src.data.types import Message, Tokenizer
from src.errors import UserError
from src.json_text import parse_json

Prompt = str | tuple[Message, ...]
_EXPECTED = 'expected {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'


def read_prompts(config: FrozenConfigDict) -> list[Prompt]:
    """The prompts of `prompt_path`: one per line, or in a .jsonl file `prompt` or `messages`. Empty lines are left out.

    Raises:
        UserError: the file can't be read or has no prompt, or a line of a .jsonl file is neither.
    """
    path = Path(config.prompt_path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # editors on Windows begin files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_path={path} can't be read: {error}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_read_line(line) if path.suffix == ".jsonl" else line)
        except ValueError as error:
            raise UserError(f"prompt_path={path}, line {number}: {error}") from None
    if not prompts:
        raise UserError(f"prompt_path={path} has no prompt: expected one per line, or JSONL, {_EXPECTED[9:]}")
    return prompts


def _read_line(line: str) -> Prompt:
    """The prompt of a line of JSON. Raises ValueError for what is none."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError(_EXPECTED)
    if isinstance(record.get("prompt"), str):
        return record["prompt"]
    if isinstance(record.get("messages"), list) and record["messages"]:
        return tuple(read_message(message, number) for number, message in enumerate(record["messages"], start=1))
    raise ValueError(_EXPECTED)


def encode_prompt(config: FrozenConfigDict, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """The ids that a model is given, int32 [n].

    A conversation, and with `use_chat_template` a text as what its user says, are written by the chat template.

    Raises:
        UserError: they leave no room in `max_target_length`, or the tokenizer has no template.
    """
    if isinstance(prompt, str):
        prompt = well_formed(prompt)
    if isinstance(prompt, str) and not config.use_chat_template:
        ids = tokenizer.encode_prompt(prompt)
    else:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        ids = tokenizer.encode_text(tokenizer.render_chat(messages, add_generation_prompt=True))
    for key, most in (
        ("max_target_length", config.max_target_length - 1),  # one token is drawn, at least
        ("max_prefill_predict_length", config.max_prefill_predict_length),
    ):
        if most != -1 and len(ids) > most:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            raise UserError(
                f"the prompt {text[:40]!r} has {len(ids)} tokens, more than the {most} that {key}={config[key]} has "
                f"room for: raise {key}, or shorten the prompt"
            )
    return ids
