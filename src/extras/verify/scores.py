"""Checks how src.evaluate scores texts, and answers to tasks, against log-probabilities in float64."""

from collections.abc import Sequence

import numpy as np

from src.extras.verify.logits import of_ids
from src.extras.verify.rows import Row, largest, not_applicable, verdict
from src.extras.verify.subject import Subject
from src.system.imports import optional

# In nats: rounding changes the log-probability of a token or an answer by up to 3e-6; another token's score gives 1.
BOUND = 1e-4
DELETED = "src/extras/evaluation was deleted"
FIRST = 0x4E00  # code of the character for id 0: it and the next ones are CJK letters, which nothing strips as spaces


class Letters:
    """Replaces a tokenizer: the character with code FIRST + i encodes id i."""

    bos = 0

    def encode_default(self, text: str) -> np.ndarray:
        """Encodes a string as ids, without a BOS."""
        return np.array([ord(letter) - FIRST for letter in text], np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encodes a string as ids, after a BOS."""
        return np.append(np.int32(self.bos), self.encode_default(text))


def of_texts(subject: Subject, sequences: Sequence[np.ndarray], log_probs: Sequence[np.ndarray]) -> Row:
    """Checks src.evaluate's `Scorer` on sequences of unequal lengths: log-probabilities, and whether ids are likeliest.

    The reference `log_probs` has an array [n - 1, V] for each sequence of n ids: row i predicts id i + 1.
    """
    name, scoring = "scores of the tokens of texts", optional("evaluation.scoring")
    if scoring is None:
        return not_applicable(name, DELETED)
    config, plan = subject.config, subject.reference_plan
    found = list(scoring.Scorer(config.evaluation, config.batch, plan, subject.placed(plan))(sequences))
    if len(found) != len(sequences):
        return verdict(name, np.inf, BOUND, f"{len(found)} of {len(sequences)} texts have scores")
    errors = {}
    for number, (ids, (scores, likeliest), of_words) in enumerate(zip(sequences, found, log_probs, strict=True)):
        if scores.shape != (len(ids) - 1,):
            return verdict(name, np.inf, BOUND, f"text {number} has {len(scores)} scores, not {len(ids) - 1}")
        wanted = of_ids(of_words, ids[1:])
        differ = (likeliest != (np.argmax(of_words, axis=-1) == ids[1:])) & is_clear(of_words)
        errors[number] = float(np.max(np.where(differ, np.inf, np.abs(scores - wanted))))
    worst = largest(errors)
    failure = f"text {worst} of {len(errors)}, of {len(sequences[worst])} ids"
    return verdict(name, errors[worst], BOUND, f"{len(errors)} texts", failure)


def of_answers(
    subject: Subject, sequences: Sequence[np.ndarray], log_probs: Sequence[np.ndarray], long_text: np.ndarray
) -> Row:
    """Checks `Answers` on two answers to each sequence's first half: its second half, and the likeliest id.

    Also checks its rolling likelihood of `long_text`, whose windows are the last two sequences. The reference
    `log_probs` is as in `of_texts`.
    """
    name, answers = "likelihoods of answers to tasks", optional("evaluation.answers")
    if answers is None:
        return not_applicable(name, DELETED)
    config, plan = subject.config, subject.reference_plan
    pairs, wanted, certain = [], [], []
    for ids, of_words in zip(sequences, log_probs, strict=True):
        cut = (len(ids) + 1) // 2
        of_second = of_words[cut - 1 :]
        is_likeliest = bool(np.all(np.argmax(of_second, axis=-1) == ids[cut:]))
        best = int(np.argmax(of_second[0]))
        pairs += [(_text(ids[:cut]), _text(ids[cut:])), (_text(ids[:cut]), _text([best]))]
        wanted += [(float(np.sum(of_ids(of_second, ids[cut:]))), is_likeliest), (float(of_second[0, best]), True)]
        certain += [bool(np.all(is_clear(of_second))), bool(is_clear(of_second[0]))]
    sections = config.evaluation, config.batch, config.decoding
    answering = answers.Answers(*sections, plan, subject.placed(plan), Letters())
    # `new`: the number of ids that only the second window has.
    found, new = answering.log_likelihoods(pairs), len(long_text) - subject.length
    rolling = sum(
        np.sum(of_ids(log_probs[at], sequences[at][1:])[of]) for at, of in ((-2, slice(None)), (-1, slice(-new, None)))
    )
    errors, which = {}, ("the second half of text", "the likeliest id after the first half of text")
    errors["a text that is longer than a row"] = abs(answering.rolling_log_likelihoods([_text(long_text)])[0] - rolling)
    for number, (one, other, is_certain) in enumerate(zip(found, wanted, certain, strict=True)):
        differ = is_certain and one[1] != other[1]
        errors[f"{which[number % 2]} {number // 2}"] = np.inf if differ else abs(one[0] - other[0])
    worst = largest(errors)
    return verdict(name, errors[worst], BOUND, f"{len(pairs)} answers", worst)


def is_clear(log_probs: np.ndarray) -> np.ndarray:
    """Tells for each position of [..., V] whether the likeliest id leads by more than BOUND, beyond rounding."""
    return np.ptp(np.sort(log_probs, axis=-1)[..., -2:], axis=-1) > BOUND


def _text(ids: Sequence[int] | np.ndarray) -> str:
    return "".join(chr(FIRST + int(each)) for each in ids)
