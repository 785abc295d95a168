"""Answers the requests of an evaluation harness: how likely texts are, and how a model continues them.

Requests and answers are as in EleutherAI's lm-evaluation-harness with `--model hf`; its package is not needed here.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.progress import track

from src.config.schema import BatchKeys, Decoding, Evaluation
from src.data.types import Message, Tokenizer
from src.extras.evaluation.scoring import Scorer
from src.extras.generation.completion import Completion, generate
from src.extras.generation.generate import Generator, Sampling, in_training
from src.model.params import Weights
from src.step.eval_step import eval_batch_size
from src.step.plan import StepPlan
from src.system.errors import UserError, clipped

# Aliases of the maximum number of generated tokens; the first one present counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_LENGTH = 256
# Keywords of transformers' generate with values that change nothing.
_IDLE = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0.0, "return_full_text": False}


class Answers:
    """Answers requests with a model; T, the maximum sequence length, is max_target_length.

    Raises UserError as `eval_batch_size` does.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        batch: BatchKeys,
        decoding: Decoding,
        plan: StepPlan,
        weights: Weights,
        tokenizer: Tokenizer,
    ) -> None:
        self.tokenizer, self.truncated = tokenizer, 0  # `truncated`: the number of requests that lost their beginning
        self._T, self._B = batch.max_target_length, eval_batch_size(evaluation, batch, plan)
        self._score, self._decoding = Scorer(evaluation, batch, plan, weights), decoding
        self._plan, self._weights = in_training(plan, weights)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability in nats, given its context, and whether it is greedy.

        It is greedy if each of its tokens is the most likely one. A context and continuation of more than T + 1 tokens
        together lose their beginning. Raises UserError if a continuation has no token, or more than T.
        """
        parts = [split_ids(self.tokenizer, *pair) for pair in pairs]
        for (_, continuation), (_, counted) in zip(pairs, parts, strict=True):
            if not 0 < counted <= self._T:
                raise UserError(
                    f"the continuation {continuation[:40]!r} has {counted} tokens after its context: expected 1 to "
                    f"max_target_length={self._T}"
                )
        return self._sums(parts)

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-probability of each text, in nats, by windows of T tokens; no token counts twice."""
        windows = [list(rolling_windows(self.tokenizer, text, self._T)) for text in texts]
        sums = iter(self._sums(list(itertools.chain.from_iterable(windows))))
        return [sum(next(sums)[0] for _ in each) for each in windows]

    def _sums(self, parts: Sequence[tuple[np.ndarray, int]]) -> list[tuple[float, bool]]:
        """Sums the log-probabilities of each sequence's last ids, and tells if each of them is the most likely.

        `parts` gives each sequence's ids and how many of them count.
        """
        self.truncated += sum(len(ids) > self._T + 1 for ids, _ in parts)
        # Sort by length: a batch is padded to its longest sequence.
        order = sorted(range(len(parts)), key=lambda index: -len(parts[index][0]))
        scores = self._score([parts[index][0][-(self._T + 1) :] for index in order])
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(parts)
        for index, (log_probs, likeliest) in zip(order, _shown(scores, len(parts), "texts scored"), strict=True):
            counted = parts[index][1]
            answers[index] = float(log_probs[-counted:].sum(dtype=np.float64)), bool(likeliest[-counted:].all())
        return answers

    def completions(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Returns each context's continuation up to the first `until` string, which is left out, or to an end token.

        Each request has its own keywords. A continuation has at most `max_gen_toks` tokens, and contexts lose their
        beginning to leave room for these. Raises UserError as `read_keywords` does, and if no room is left for a
        context.
        """
        answers = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for index, (_, keywords) in enumerate(requests):
            kinds.setdefault(json.dumps(dict(keywords), sort_keys=True), []).append(index)
        for indices in kinds.values():
            sampling, length, until = read_keywords(requests[indices[0]][1])
            if length >= self._T:
                raise UserError(
                    f"a task's max_gen_toks={length} leaves no room for a context in max_target_length={self._T}: "
                    "raise it"
                )
            generator = Generator(self._plan, self._weights, sampling, self._decoding.decode_seed, self._T)
            # Contexts are cut to fit, and so may be longer than the prompts of src.decode.
            limits = {"sample_length": length, "max_prefill_predict_length": -1}
            decoding = dataclasses.replace(self._decoding, decode_stop=until, **limits)
            bos = np.array([self.tokenizer.bos], np.int32)
            encoded = {index: self.tokenizer.encode_default(requests[index][0]) for index in indices}
            contexts = {index: ids if len(ids) else bos for index, ids in encoded.items()}
            self.truncated += sum(len(ids) > self._T - length for ids in contexts.values())
            order = sorted(indices, key=lambda index: -len(contexts[index]))
            for first in _shown(range(0, len(order), self._B), -(-len(order) // self._B), "batches of texts generated"):
                rows = order[first : first + self._B]
                prompts = [contexts[index][-(self._T - length) :] for index in rows]
                batch = [Completion(decoding, self._T, self.tokenizer, prompt) for prompt in prompts]
                generate(generator, batch, self._B, first)
                for index, completion in zip(rows, batch, strict=True):
                    answers[index] = self._text(completion, until)
        return answers

    def _text(self, completion: Completion, until: Sequence[str]) -> str:
        """Decodes only the generated tokens, as transformers does, and cuts the text at each string of `until`."""
        text = self.tokenizer.decode(np.array([token for token, _ in completion.sampled], np.int32))
        for stop in until:  # the harness splits by one after the other, regardless of which comes first in the text
            text = text.split(stop)[0]
        return text

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Formats a conversation with the chat template, up to where the assistant's next turn begins.

        Without a generation prompt, it ends with the text of the last message, which the model is to continue. Raises
        UserError if the template does not contain that text as it is.
        """
        text = self.tokenizer.render_chat(messages, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"]
        if (at := text.rfind(last.strip())) < 0:
            raise UserError(f"the chat template changes the text that the model is to continue: {clipped(last)}")
        return text[: at + len(last if text.startswith(last.lstrip(), at) else last.strip())]


def split_ids(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[np.ndarray, int]:
    """Tokenizes a context and its continuation as the harness does; also returns the continuation's number of ids.

    Spaces at the context's end count as part of the continuation. A context without ids is replaced by bos, unless the
    continuation begins with bos.
    """
    if not (before := len(tokenizer.encode_default(context.rstrip()))):
        ids = tokenizer.encode_prompt(context + continuation)
        return ids, len(ids) - 1
    ids = tokenizer.encode_default(context + continuation)
    return ids, max(len(ids) - before, 0)


def rolling_windows(tokenizer: Tokenizer, text: str, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields windows of at most `length` + 1 ids of a text, and how many ids at each window's end are new.

    The first window begins with bos; all others are full, to give their tokens as much context as possible.
    """
    ids = tokenizer.encode_default(text)
    end = min(length, len(ids))
    if end:
        yield np.concatenate([[tokenizer.bos], ids[:end]]).astype(np.int32), end
    while end < len(ids):
        counted = min(len(ids) - end, length)
        end += counted
        yield ids[end - length - 1 : end], counted


def read_keywords(keywords: Mapping[str, Any]) -> tuple[Sampling, int, tuple[str, ...]]:
    """Reads a task's generation_kwargs: how to sample, the maximum number of tokens, and the stop strings.

    Raises UserError for a keyword that is unknown, or whose value is not supported, such as num_beams above 1.
    """
    rest = {name: value for name, value in keywords.items() if _IDLE.get(name, ...) != value}
    lengths = [value for name in _LENGTHS if (value := rest.pop(name, None)) is not None]
    until, temperature = rest.pop("until", None) or (), float(rest.pop("temperature", None) or 0.0)
    sample, top_k, top_p = rest.pop("do_sample", None), rest.pop("top_k", None) or 0, rest.pop("top_p", None)
    top_p = 1.0 if top_p is None else top_p
    if rest:
        raise UserError(
            f"a task's generation_kwargs: {', '.join(map(str, rest))} is not one of do_sample, temperature, top_k, "
            f"top_p, until, {', '.join(_LENGTHS)}"
        )
    if sample is False:
        temperature = 0.0
    elif sample and "temperature" not in keywords:
        temperature = 1.0
    until = (until,) if isinstance(until, str) else tuple(until)
    length = int(lengths[0]) if lengths else _DEFAULT_LENGTH
    if length < 1 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            f"a task's generation_kwargs: max_gen_toks={length}, temperature={temperature:g}, top_k={top_k}, top_p="
            f"{top_p}: expected 1 or more, 0 or more, 0 or more, and more than 0 up to 1"
        )
    return Sampling(temperature, int(top_k), float(top_p)), length, tuple(filter(None, until))


def _shown(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    return track(items, what, total, disable=jax.process_index() > 0 or not sys.stdout.isatty())
