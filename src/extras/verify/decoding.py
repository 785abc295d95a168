"""Check g: decoding with caches gives each new token the same log-probability as the forward pass without caches."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from src.extras.verify.logits import (
    NO_PATTERNS,
    adapters_merged,
    evaluated,
    log_softmax,
    of_ids,
    single_layers,
    unlimited,
)
from src.extras.verify.rows import FAIL, PASS, Row, attempted, not_applicable, verdict
from src.extras.verify.subject import Context, Subject
from src.model.params import Weights
from src.step.plan import StepPlan
from src.system.imports import optional

# Relative to the largest logit: rounding gives 1e-6 over three seeds, 1.1e-5 in Gemma 4, whose scores are large. A
# cache that is one slot late gives 0.7, padding of prompts that enters a recurrent state 0.4.
BOUND = 1e-4
Prepare = Callable[[StepPlan, Weights], tuple[StepPlan, Weights]]
Text = tuple[np.ndarray, np.ndarray]  # ids of prompt and new tokens [t]; log-probabilities of the new tokens


def rows(context: Context) -> Iterator[Row]:
    """Compares the decoding of src.decode and of a run's samples with the forward pass, and checks merged adapters.

    Prompts of unequal lengths are continued in one batch, and the first of them by itself.
    """
    if not optional("generation"):
        yield not_applicable("decoding", "src/extras/generation is missing")
        return
    from src.extras.generation.generate import in_training
    from src.extras.generation.inference_weights import unrolled

    subject = context.subject
    yield adapters_merged(subject, BOUND)  # src.decode merges adapters like this
    subject, limited = unlimited(Subject(subject.config.replace(**NO_PATTERNS), subject.seed))
    yield from limited
    # src.decode samples here: greedy texts repeat themselves, so a wrong slot of the cache could hold the right values.
    for name, prepare, temperature in (("src.decode", unrolled, 1.0), ("a run's sample", in_training, 0.0)):
        row = _compared(f"decoding of {name}", subject, prepare, temperature)
        alone = functools.partial(_alone, subject, prepare, temperature)
        yield row if row.status == PASS else row._replace(note=row.note + attempted(alone))


def _alone(subject: Subject, prepare: Prepare, temperature: float) -> str:
    """Says which kinds of layers also decode wrongly as one-layer models."""
    wrong = [
        f"layer {number} ({alone.reference_plan.spec.layers[0].attention_type} attention)"
        for number, alone in single_layers(subject)
        if _compared("", alone, prepare, temperature).status == FAIL
    ]
    return f"; so does a model of only {' or '.join(wrong)}" if wrong else "; each layer alone decodes as it should"


def _compared(name: str, subject: Subject, prepare: Prepare, temperature: float) -> Row:
    """Compares the log-probabilities of new tokens as a generator and as the whole forward pass compute them.

    At temperature 0, each new token must also be the likeliest one. `prepare` makes the generator's plan and weights
    from the reference plan and its weights.
    """
    from src.extras.generation.generate import Generator, Sampling

    plan, T = subject.reference_plan, np.arange(subject.length)
    weights = subject.placed(plan)
    generator = Generator(*prepare(plan, weights), Sampling(temperature, 0, 1.0), seed=0, length=len(T))
    # Prompts shorter and longer than windows, chunks, and the length from which RoPE is stretched.
    prompts = [subject.batch["tokens"][row, :length] for row, length in enumerate((3, len(T) - 10, 11, 17))]
    texts: list[Text] = [*_continued(generator, prompts), *_continued(generator, prompts[:1])]
    tokens = np.stack([np.pad(text, (0, len(T) - len(text))) for text, _ in texts])
    real = np.array([[len(text)] for text, _ in texts]) > T
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": np.int32(real), "loss_mask": np.float32(real)}
    logits, _ = evaluated(subject, plan, [{**batch, "positions": np.int32(T * real)}])
    figure, note = 0.0, ""
    for row, (text, found) in enumerate(texts):
        start = len(text) - len(found)
        of_vocabulary = log_softmax(logits[0, 0, row, start - 1 : len(text) - 1])
        expected = of_ids(of_vocabulary, text[start:])
        likeliest = expected if temperature else np.max(of_vocabulary, axis=-1)
        sizes = np.maximum(np.abs(found - expected), likeliest - expected) / np.max(np.abs(logits))
        figure = max(figure, float(np.nan_to_num(np.max(sizes), nan=np.inf)))
        for at in np.flatnonzero(~(sizes <= BOUND))[: 1 - bool(note)]:
            beside = "alone" if row == len(prompts) else "beside others"
            note = f"prompt of {start} tokens, {beside}: {found[at]:.5f} nats at {start + at}, not {expected[at]:.5f}"
    return verdict(name, figure, BOUND, note)


def _continued(generator: Any, prompts: list[np.ndarray]) -> list[Text]:
    """Continues prompts in one batch, all by the same number of tokens: until the longest text fills the caches."""
    tokens_BT, lengths_B = generator.padded(prompts, 4)
    steps = generator.tokens(tokens_BT, lengths_B, np.arange(len(lengths_B), dtype=np.int32))
    count = generator.length - max(map(len, prompts))
    new = [(token_B, np.asarray(generator.log_probs_B)) for token_B in itertools.islice(steps, count)]
    tokens, log_probs = (np.stack(each, axis=1) for each in zip(*new, strict=True))
    return [(np.concatenate([prompt, tokens[row]]), log_probs[row]) for row, prompt in enumerate(prompts)]
