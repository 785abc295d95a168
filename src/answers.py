"""Texts as they are drawn, token by token, and where each of them ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from ml_collections import FrozenConfigDict

from src.data.types import Tokenizer
from src.generate import Generator

# Tokens that are decoded again with each new one: of more, those are settled that have CONTEXT others after them, and
# as many go on being decoded with what follows, for a tokenizer may write a token by those around it.
WINDOW, CONTEXT = 128, 16


class Answer:
    """What is drawn after one prompt. It ends with a stop token, before a stop text, or where its room does.

    Args:
        config: gives the room, `sample_length` and `max_target_length`, and the stop texts, `decode_stop`.
        tokenizer: its `stop_ids` are the stop tokens.
        prompt: the prompt's ids.
    """

    def __init__(self, config: FrozenConfigDict, tokenizer: Tokenizer, prompt: np.ndarray) -> None:
        self.prompt = prompt
        self.prompt_text = tokenizer.decode(prompt)
        self.text = ""  # without the prompt
        self.done = False
        self._tokenizer = tokenizer
        self._stop_texts = list(config.decode_stop)
        self._room = min(config.sample_length or config.max_target_length, config.max_target_length - len(prompt))
        self._ids: list[int] = []
        self._settled = ""  # text that no later token changes
        self._window = 0  # the first token, prompt and all, that is decoded with what follows
        self._context = self.prompt_text  # the text of the window's tokens up to where `_settled` ends

    def add(self, token: int) -> None:
        """Takes the next token."""
        if token in self._tokenizer.stop_ids:
            self.done = True
        else:
            self._ids.append(token)
            self.done = len(self._ids) == self._room
        if self.done or self._stop_texts:
            self.decode()

    def decode(self) -> None:
        """Brings `text` up to date, which otherwise waits for the end where there are no stop texts."""
        text = self._decode(self._window)
        self.text = self._settled + text[len(self._context) :]
        longest = max(map(len, self._stop_texts), default=0)
        begin = max(0, len(self._settled) - longest)  # a stop text before would have been found before
        ends = [end for stop in self._stop_texts if (end := self.text.find(stop, begin)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.done = True
        elif not self.done:
            self._settle(text)

    def _decode(self, first: int, end: int | None = None) -> str:
        """The text of the tokens [first, end), those of the prompt counted."""
        prompt = self.prompt[first:end]
        drawn = slice(max(first - len(self.prompt), 0), None if end is None else end - len(self.prompt))
        return self._tokenizer.decode(np.concatenate([prompt, np.array(self._ids[drawn], np.int32)]))

    def _settle(self, text: str) -> None:
        """Moves the window of `text` on where it is long, if what follows is then decoded as before."""
        end = len(self.prompt) + len(self._ids) - CONTEXT
        if end < len(self.prompt) or end - self._window < WINDOW:
            return
        head, context = self._decode(self._window, end), self._decode(end - CONTEXT, end)
        if context and head + self._decode(end - CONTEXT)[len(context) :] == text:
            self._settled += head[len(self._context) :]
            self._window, self._context = end - CONTEXT, context

    def certain(self) -> str:
        """What no later token changes of the text so far: whole characters, and no beginning of a stop text."""
        self.decode()
        if self.done:
            return self.text
        text = self.text.rstrip("\ufffd")  # bytes of a character that is not whole yet
        held = [size for stop in self._stop_texts for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return text[: len(text) - max(held, default=0)]


@dataclass
class Speed:
    """How long what took, in seconds, and for how many tokens."""

    compile_seconds: float = 0.0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    drawn_tokens: int = 0  # without each row's first, which the prefill gives
    decode_seconds: float = 0.0

    def lines(self) -> list[str]:
        """For the user; nothing where nothing was asked."""
        if not self.prompt_tokens:
            return []
        rates = [("prefill", self.prompt_tokens, self.prefill_seconds)]
        if self.drawn_tokens:
            rates.append(("decode", self.drawn_tokens, self.decode_seconds))
        return [
            f"compiled in {self.compile_seconds:.1f} s",
            *(f"{name}: {count} tokens in {took:.3f} s, {count / took:,.1f} tokens/s" for name, count, took in rates),
        ]


def draw_answers(
    generator: Generator,
    answers: Sequence[Answer],
    rows: int,
    first_number: int,
    speed: Speed,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Draws until all answers are done.

    Args:
        generator: what draws.
        answers: new ones.
        rows: as many rows are computed, at least: batches of equal size share one compiled program.
        first_number: number of the first answer among all that are drawn by one seed.
        speed: is added to.
        look: called after every token.
    """
    tokens_BT, lengths_B = generator.padded([answer.prompt for answer in answers], rows)
    numbers_B = np.arange(first_number, first_number + len(lengths_B), dtype=np.int32)
    speed.compile_seconds += generator.compile(*tokens_BT.shape)
    start = time.perf_counter()
    first_token = None
    for drawn_B in generator.tokens(tokens_BT, lengths_B, numbers_B):
        if first_token is None:
            first_token = time.perf_counter()
        else:
            speed.drawn_tokens += sum(not answer.done for answer in answers)
        for answer, token in zip(answers, drawn_B.tolist(), strict=False):  # rows without an answer fill up the mesh
            if not answer.done:
                answer.add(token)
        look()
        if all(answer.done for answer in answers):
            break
    speed.prompt_tokens += sum(len(answer.prompt) for answer in answers)
    speed.prefill_seconds += first_token - start
    speed.decode_seconds += time.perf_counter() - first_token
