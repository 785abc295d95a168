"""Completes prompts with a model: encodes prompts, and decodes generated ids up to the end of each text."""

import time
from collections.abc import Sequence

import jax
import numpy as np

from src.config.command_keys import Decoding
from src.data.types import Conversation, Tokenizer
from src.extras.generation.generate import Generator, in_training, sampling
from src.model.params import Weights
from src.step.plan import StepPlan
from src.system.errors import UserError, printable
from src.system.json_text import well_formed

Prompt = str | Conversation | np.ndarray  # an array has ids, used unchanged
_CONTEXT = 16  # preceding ids that a token's text may depend on


def make_generator(decoding: Decoding, max_target_length: int, plan: StepPlan, weights: Weights) -> Generator:
    """Creates a generator with the sampling and length settings of `decoding`."""
    lengths = max_target_length, decoding.max_prefill_predict_length
    return Generator(plan, weights, sampling(decoding), decoding.decode_seed, *lengths)


def encode_prompt(decoding: Decoding, max_target_length: int, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """Returns the prompt's token ids, int32 [n].

    The chat template formats a conversation and, with `use_chat_template`, also a string, as a user's message. Raises
    UserError if the prompt is too long, or if it needs a template and the tokenizer has none, or one that rejects it.
    """
    if isinstance(prompt, np.ndarray):
        text, ids = tokenizer.decode(prompt), prompt
    elif isinstance(prompt, str) and not decoding.use_chat_template:
        ids = tokenizer.encode_prompt(text := well_formed(prompt))
    else:
        chat = Conversation(({"role": "user", "content": prompt},)) if isinstance(prompt, str) else prompt
        text = tokenizer.render_chat(chat.messages, add_generation_prompt=True, shown=chat.shown)
        ids = tokenizer.encode_text(text)
    prefill = decoding.max_prefill_predict_length
    for key, value, limit in (
        ("max_target_length", max_target_length, max_target_length - 1),  # leaves room to generate one token
        ("max_prefill_predict_length", prefill, prefill),
    ):
        if limit != -1 and len(ids) > limit:
            raise UserError(
                f"the prompt {text[:40]!r} has {len(ids)} tokens, more than the {limit} that {key}={value} "
                f"allows: raise {key}, or shorten the prompt"
            )
    return ids


def length_note(decoding: Decoding, max_target_length: int, prompt_tokens: int) -> list[str]:
    """Returns a line for the user if max_target_length leaves less than `sample_length` after the prompt; else []."""
    if not decoding.sample_length or prompt_tokens + decoding.sample_length <= max_target_length:
        return []
    limit = f"prompt and text are limited to max_target_length={max_target_length} tokens"
    return [f"sample_length={decoding.sample_length}: {limit}"]


class Completion:
    """Collects the text after one prompt until a stop token, a stop text (left out), or the length limit.

    Prompt and text have at most `max_target_length` tokens. Raises UserError as `encode_prompt` does.
    """

    def __init__(self, decoding: Decoding, max_target_length: int, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.prompt = encode_prompt(decoding, max_target_length, tokenizer, prompt)
        self.prompt_text = tokenizer.decode(self.prompt)
        is_chat = isinstance(prompt, Conversation) or (isinstance(prompt, str) and decoding.use_chat_template)
        # Printed before the text. A chat's heading includes special tokens, which separate its turns.
        self.heading = tokenizer.decode_spelled(self.prompt).rstrip("\n") + "\n" if is_chat else self.prompt_text
        self.text = ""  # without the prompt
        # Generated ids and their log-probabilities, including the id that ended the text.
        self.sampled: list[tuple[int, float]] = []
        self.done = False
        self._tokenizer, self._stop_texts = tokenizer, list(decoding.decode_stop)
        # A stop text is within this many ids at the end: each character takes at most four.
        self._tail = _CONTEXT + 4 * max(map(len, self._stop_texts), default=0)
        self._ids: list[int] = self.prompt.tolist()
        self._stable = ""  # the text so far, up to its last complete character
        # Numbers of ids after which the text ended in a whole character. `stable_text` decodes from the first of them,
        # which is 0 or at least _CONTEXT ids before the end.
        self._whole = [0, len(self._ids)]
        self._max_tokens = min(len(self.prompt) + (decoding.sample_length or max_target_length), max_target_length)

    def add(self, token: int, log_prob: float = 0.0) -> None:
        """Appends the next token, with the log-probability the model gave it."""
        self.sampled.append((token, log_prob))
        self.done = token in self._tokenizer.stop_ids
        if not self.done:
            self._ids.append(token)
            self.done = len(self._ids) == self._max_tokens
        tail = self._decode(self._ids[-self._tail :]) if self._stop_texts else ""
        if self.done or any(stop in tail for stop in self._stop_texts):
            self.text = _after(self.prompt_text, self._decode(self._ids))
            if ends := [end for stop in self._stop_texts if (end := self.text.find(stop)) >= 0]:
                self.text, self.done = self.text[: min(ends)], True

    def stable_text(self) -> str:
        """Returns the text that later tokens can't change: complete characters, and no start of a stop text."""
        if self.done:
            return self.text
        first, last = self._whole[0], self._whole[-1]
        text = _after(self._decode(self._ids[first:last]), self._decode(self._ids[first:]))
        if not text.endswith("\ufffd"):  # bytes of an incomplete character
            self._stable, text = self._stable + text, ""
            self._whole.append(len(self._ids))
            while self._whole[1] <= len(self._ids) - _CONTEXT:
                self._whole.pop(0)
        text = self._stable + text.rstrip("\ufffd")
        held = [size for stop in self._stop_texts for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return text[: len(text) - max(held, default=0)]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.array(ids, np.int32))


def _after(before: str, text: str) -> str:
    """Returns the rest of `text` after `before`, including a character of which `before` has only the first bytes."""
    return text[len(before if text.startswith(before) else before.rstrip("\ufffd")) :]


def generate(
    generator: Generator, completions: Sequence[Completion], rows: int, first_index: int, stream: bool = False
) -> None:
    """Generates until all of the given completions are done; with `stream`, prints the first one as it grows.

    At least `rows` rows are computed, because batches of equal size share one compiled program. `first_index` is the
    first completion's index among all that are sampled with one seed. Adds tokens and seconds to `generator.speed`.
    """
    tokens_BT, lengths_B = generator.padded([completion.prompt for completion in completions], rows)
    indices_B = np.arange(first_index, first_index + len(lengths_B), dtype=np.int32)
    generator.compile(*tokens_BT.shape)
    speed, start, first_token, printed = generator.speed, time.perf_counter(), 0.0, 0
    for next_B in generator.tokens(tokens_BT, lengths_B, indices_B):
        if not first_token:
            first_token = time.perf_counter()
        else:
            speed.decoded_tokens += sum(not completion.done for completion in completions)
        sampled_B = zip(next_B.tolist(), np.asarray(generator.log_probs_B).tolist(), strict=True)
        for completion, sampled in zip(completions, sampled_B, strict=False):  # further rows only pad the batch
            if not completion.done:
                completion.add(*sampled)
        if stream:
            text = completions[0].stable_text()
            write_now(text[printed:])
            printed = max(printed, len(text))
        if all(completion.done for completion in completions):
            break
    speed.prompt_tokens += sum(len(completion.prompt) for completion in completions)
    speed.prefill_seconds += first_token - start
    speed.decode_seconds += time.perf_counter() - first_token
    if stream:
        write_now("\n")


def write_now(text: str) -> None:
    """Prints part of a line on process 0, without control characters."""
    if jax.process_index() == 0:
        print(printable(text), end="", flush=True)


def check_sample(decoding: Decoding, max_target_length: int, tokenizer: Tokenizer) -> list[str]:
    """Returns a line for the user if a run's sample, or its texts for decode_metrics, will be cut short.

    Raises UserError as `encode_prompt` does for the sample's prompt.
    """
    prompt = encode_prompt(decoding, max_target_length, tokenizer, decoding.prompt)
    return length_note(decoding, max_target_length, max(len(prompt), decoding.decode_prompt_tokens))


def sample(decoding: Decoding, max_target_length: int, plan: StepPlan, weights: Weights, tokenizer: Tokenizer) -> str:
    """Returns the prompt and the text that a model in training generates after it, up to `sample_length` tokens.

    Raises UserError as `encode_prompt` does.
    """
    completion = Completion(decoding, max_target_length, tokenizer, decoding.prompt)
    generate(make_generator(decoding, max_target_length, *in_training(plan, weights)), [completion], 1, 0)
    return completion.prompt_text + completion.text
