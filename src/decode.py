"""Generates text from a model: `python -m src.decode CONFIG.yml load_parameters_path=PATH prompt="..."`."""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from src.cli import run_command
from src.config.base_yml import Usage
from src.config.command_keys import Decoding
from src.console import printable, say
from src.data.conversations import read_message
from src.data.tokenizer import make_tokenizer
from src.data.types import Message, Tokenizer, missing_template
from src.errors import UserError
from src.generate import Generator, in_training, kept_in_int8, sampling, unrolled
from src.json_text import parse_json, read_lines, well_formed
from src.loaded_model import load_model
from src.model.params import Weights
from src.startup import configured
from src.step.plan import StepPlan

USAGE = Usage(
    """Draws text from a model.

python -m src.decode RUN prompt=TEXT [key=value ...]
python -m src.decode CONFIG load_parameters_path=PATH prompt=TEXT [key=value ...]
python -m src.decode --help KEY                   what a key does, and its default""",
    ("Decoding",),
)

Prompt = str | tuple[Message, ...]
_EXPECTED = '{"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'

# Only the last WINDOW tokens or so are decoded again with each new one; the text before them is settled. The window
# moves on by leaving CONTEXT tokens in it, because a tokenizer may spell a token by those around it.
WINDOW, CONTEXT = 128, 16


def main(argv: Sequence[str] | ConfigDict) -> list[str] | None:
    """Runs the command line `argv`; returns the texts without their prompts, None for --help; raises UserError."""
    config = configured(argv, USAGE, uses_weights=True)
    if config is None:
        return None
    if config.interactive and jax.process_count() > 1:
        raise UserError("interactive=true needs a job of one process, and this one has several: use prompt_path")
    tokenizer = make_tokenizer(config.data, config.vocab_size)
    if tokenizer is None:
        raise UserError("a prompt needs a tokenizer, which dataset_type=synthetic does not have: dataset_type=text")
    # A mistake in a prompt is reported before the weights are read, which takes minutes.
    if config.use_chat_template and tokenizer.chat_template is None:
        raise missing_template()
    decoding, length = config.decoding, config.max_target_length
    prompts = [] if config.interactive else read_prompts(decoding) if config.prompt_path else [config.prompt]
    completions = [Completion(decoding, length, tokenizer, prompt) for prompt in prompts]
    wanted = max((len(completion.prompt) for completion in completions), default=0) + decoding.sample_length
    if decoding.sample_length and wanted > length:
        say([f"sample_length={decoding.sample_length}: prompt and text end at max_target_length={length} tokens"])
    loaded = load_model(config, tokenizer)
    plan, weights = unrolled(loaded.plan, loaded.weights)
    if decoding.quantize_weights:
        before = _bytes(weights)
        plan, weights = kept_in_int8(plan, weights, loaded.plan)
        say([f"weights: {_bytes(weights) / 1e6:,.1f} MB in memory, {before / 1e6:,.1f} before quantize_weights=int8"])
    generator = make_generator(decoding, length, plan, weights)
    if config.interactive:
        texts = converse(decoding, tokenizer, generator)
    else:
        rows = math.ceil(config.per_device_batch_size * loaded.plan.layout.mesh.size)
        texts = complete_all(generator, completions, rows)
    say(generator.speed.lines())
    return texts


def _bytes(weights: Weights) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


def sample(decoding: Decoding, max_target_length: int, plan: StepPlan, weights: Weights, tokenizer: Tokenizer) -> str:
    """Returns the prompt and what a model in training generates after it, up to `sample_length` tokens, as text."""
    completion = Completion(decoding, max_target_length, tokenizer, decoding.prompt)
    generate(make_generator(decoding, max_target_length, *in_training(plan, weights)), [completion], 1, 0)
    return completion.prompt_text + completion.text


def make_generator(decoding: Decoding, max_target_length: int, plan: StepPlan, weights: Weights) -> Generator:
    """Returns a generator with these keys."""
    lengths = max_target_length, decoding.max_prefill_predict_length
    return Generator(plan, weights, sampling(decoding), decoding.decode_seed, *lengths)


# ---- Prompts


def read_prompts(decoding: Decoding) -> list[Prompt]:
    """Returns `prompt_path`'s prompts: its lines, or `prompt` or `messages` of each JSON line; raises UserError."""
    path = Path(decoding.prompt_path).expanduser()
    if prompts := read_lines(path, "prompt_path", _prompt_of_json):
        return prompts
    raise UserError(f"prompt_path={path} has no prompt: expected one per line, or JSONL, {_EXPECTED}")


def _prompt_of_json(line: str) -> Prompt:
    record = parse_json(line)
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str):
            return record["prompt"]
        if isinstance(record.get("messages"), list) and record["messages"]:
            return tuple(read_message(message, number) for number, message in enumerate(record["messages"], start=1))
    raise ValueError(f"expected {_EXPECTED}")


def encode_prompt(decoding: Decoding, max_target_length: int, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """Returns the prompt's token ids, int32 [n].

    The chat template renders a conversation and, with `use_chat_template`, also a text, as a user's message. Raises
    UserError: the prompt is too long, or the tokenizer has no template.
    """
    text = well_formed(prompt) if isinstance(prompt, str) else prompt[-1]["content"]
    if isinstance(prompt, str) and not decoding.use_chat_template:
        ids = tokenizer.encode_prompt(text)
    else:
        messages = ({"role": "user", "content": text},) if isinstance(prompt, str) else prompt
        ids = tokenizer.encode_text(tokenizer.render_chat(messages, add_generation_prompt=True))
    prefill = decoding.max_prefill_predict_length
    for key, value, limit in (
        ("max_target_length", max_target_length, max_target_length - 1),  # at least one token is generated
        ("max_prefill_predict_length", prefill, prefill),
    ):
        if limit != -1 and len(ids) > limit:
            raise UserError(
                f"the prompt {text[:40]!r} has {len(ids)} tokens, more than the {limit} that {key}={value} has "
                f"room for: raise {key}, or shorten the prompt"
            )
    return ids


# ---- Completions


class Completion:
    """Collects the text after one prompt until a stop token, a stop text (left out), or the limit of its length.

    There are `max_target_length` tokens at most, including the prompt's. Raises UserError as `encode_prompt` does.
    """

    def __init__(self, decoding: Decoding, max_target_length: int, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.prompt = encode_prompt(decoding, max_target_length, tokenizer, prompt)
        self.prompt_text = tokenizer.decode(self.prompt)
        self.text = ""  # without the prompt
        self.done = False
        self._tokenizer, self._stop_texts = tokenizer, list(decoding.decode_stop)
        self._ids: list[int] = self.prompt.tolist()
        self._max_tokens = min(len(self.prompt) + (decoding.sample_length or max_target_length), max_target_length)
        self._settled = ""  # text that no later token changes
        self._window = 0  # index of the first token that is decoded again with each new one
        self._context = self.prompt_text  # the text of the window's tokens up to where `_settled` ends

    def add(self, token: int) -> None:
        """Appends the next token."""
        self.done = token in self._tokenizer.stop_ids
        if not self.done:
            self._ids.append(token)
            self.done = len(self._ids) == self._max_tokens
        if self.done or self._stop_texts:
            self._update()

    def stable_text(self) -> str:
        """Returns the part of the text that no later token changes: whole characters, and no start of a stop text."""
        self._update()
        if self.done:
            return self.text
        text = self.text.rstrip("\ufffd")  # bytes of a character that is not complete yet
        held = [size for stop in self._stop_texts for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return text[: len(text) - max(held, default=0)]

    def _update(self) -> None:
        """Brings `text` up to date. Without stop texts `add` leaves that to the end."""
        text = self._decode(self._window)
        self.text = self._settled + text[len(self._context) :]
        longest = max(map(len, self._stop_texts), default=0)
        begin = max(0, len(self._settled) - longest)  # an earlier stop text would have been found before
        ends = [end for stop in self._stop_texts if (end := self.text.find(stop, begin)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.done = True
        elif not self.done:
            self._move_window(text)

    def _decode(self, first: int, end: int | None = None) -> str:
        return self._tokenizer.decode(np.array(self._ids[first:end], np.int32))

    def _move_window(self, text: str) -> None:
        """Moves on a long window, whose text is given, if what follows is then decoded as before."""
        end = len(self._ids) - CONTEXT
        if end < len(self.prompt) or end - self._window < WINDOW:
            return
        head, context = self._decode(self._window, end), self._decode(end - CONTEXT, end)
        if context and head + self._decode(end - CONTEXT)[len(context) :] == text:
            self._settled += head[len(self._context) :]
            self._window, self._context = end - CONTEXT, context


def generate(
    generator: Generator, completions: Sequence[Completion], rows: int, first_index: int, stream: bool = False
) -> None:
    """Generates until all of the new completions are done; with `stream`, prints the first one as it grows.

    At least `rows` rows are computed, because batches of equal size share one compiled program. `first_index` is the
    first completion's among all that are sampled with one seed.
    """
    tokens_BT, lengths_B = generator.padded([completion.prompt for completion in completions], rows)
    indices_B = np.arange(first_index, first_index + len(lengths_B), dtype=np.int32)
    generator.compile(*tokens_BT.shape)
    speed, start, first_token, printed = generator.speed, time.perf_counter(), None, 0
    for next_B in generator.tokens(tokens_BT, lengths_B, indices_B):
        if first_token is None:
            first_token = time.perf_counter()
        else:
            speed.decoded_tokens += sum(not completion.done for completion in completions)
        for completion, token in zip(completions, next_B.tolist(), strict=False):  # further rows fill up the mesh
            if not completion.done:
                completion.add(token)
        if stream:
            text = completions[0].stable_text()
            _write(text[printed:])
            printed = max(printed, len(text))
        if all(completion.done for completion in completions):
            break
    speed.prompt_tokens += sum(len(completion.prompt) for completion in completions)
    speed.prefill_seconds += first_token - start
    speed.decode_seconds += time.perf_counter() - first_token
    if stream:
        _write("\n")


def complete_all(generator: Generator, completions: Sequence[Completion], rows: int) -> list[str]:
    """Generates `rows` completions at a time, prints them, a single one as it grows, and returns their texts."""
    if len(completions) == 1:
        _write(completions[0].prompt_text)
        generate(generator, completions, 1, 0, stream=True)
        return [completions[0].text]
    for first in range(0, len(completions), rows):
        batch = completions[first : first + rows]
        generate(generator, batch, min(rows, len(completions)), first)
        for number, completion in enumerate(batch, start=first + 1):
            text = printable(completion.prompt_text + completion.text)
            say([f"prompt {number}:", *(f"  {line}" for line in text.splitlines())])
    return [completion.text for completion in completions]


def converse(decoding: Decoding, tokenizer: Tokenizer, generator: Generator) -> list[str]:
    """Completes each line of the standard input until its end; returns the generated texts.

    With a chat template the lines are one conversation, which begins anew where it no longer fits; without, each line
    is a prompt of its own.
    """
    conversation: tuple[Any, ...] = ()
    texts: list[str] = []
    for line in iter(_read_line, ""):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        prompt: Prompt = (*conversation, {"role": "user", "content": line}) if decoding.use_chat_template else line
        try:
            completion = Completion(decoding, generator.length, tokenizer, prompt)
        except UserError as error:
            conversation = ()
            say([f"error: {error}" + (" (the conversation begins anew)" if decoding.use_chat_template else "")])
            continue
        generate(generator, [completion], 1, len(texts), stream=True)
        texts.append(completion.text)
        if decoding.use_chat_template:
            conversation = (*prompt, {"role": "assistant", "content": completion.text})
    _write("\n")
    return texts


def _read_line() -> str:
    _write("> ")
    return sys.stdin.readline()


def _write(text: str) -> None:
    if jax.process_index() == 0:
        print(printable(text), end="", flush=True)


if __name__ == "__main__":
    run_command(main)
