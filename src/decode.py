"""Text from a model: `python -m src.decode CONFIG.yml load_parameters_path=PATH prompt="..."`."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import FrozenConfigDict

from src.answers import Answer, Speed, draw_answers
from src.cli import run_command
from src.config.key_help import Usage
from src.data.chat_template import missing_template
from src.data.tokenizer import make_tokenizer
from src.data.types import Tokenizer
from src.errors import UserError
from src.generate import Generator, Model, in_training, unrolled
from src.loaded_model import open_model
from src.parallel.mesh import Layout
from src.prompts import Prompt, encode_prompt, read_prompts
from src.sampling import sampling
from src.startup import configured, printable, say
from src.step.plan import StepPlan

USAGE = Usage(
    """Draws text from a model.

python -m src.decode RUN prompt=TEXT [key=value ...]
python -m src.decode CONFIG load_parameters_path=PATH prompt=TEXT [key=value ...]
python -m src.decode --help KEY                   what a key does, and its default""",
    ("Decoding",),
)


def main(argv: Sequence[str]) -> list[str] | None:
    """Runs the command line `argv`; returns the texts drawn, without their prompts, None if it only asked for help.

    Raises:
        UserError: a mistake in the command, its prompts or its weights.
    """
    config = configured(argv, USAGE, uses_weights=True)
    if config is None:
        return None
    if config.interactive and jax.process_count() > 1:
        raise UserError("interactive=true needs a job of one process, and this one has several: use prompt_path")
    tokenizer = make_tokenizer(config)
    if tokenizer is None:
        raise UserError("a prompt needs a tokenizer, which dataset_type=synthetic does not have: dataset_type=text")
    # What is wrong with a prompt comes out before the weights are read, which takes minutes.
    if config.use_chat_template and tokenizer.chat_template is None:
        raise missing_template()
    answers = [] if config.interactive else open_answers(config, tokenizer)
    opened = open_model(config, tokenizer)
    say(opened.messages)
    generator, speed = make_generator(config, unrolled(opened.plan, opened.parts)), Speed()
    if config.interactive:
        texts = converse(config, tokenizer, generator, speed)
    else:
        draw_all(generator, answers, rows_at_once(config, opened.plan.layout), speed)
        texts = [answer.text for answer in answers]
    say(speed.lines())
    return texts


def open_answers(config: FrozenConfigDict, tokenizer: Tokenizer) -> list[Answer]:
    """An answer, nothing drawn of it yet, to each prompt that the config gives."""
    prompts = read_prompts(config) if config.prompt_path else [config.prompt]
    return [Answer(config, tokenizer, encode_prompt(config, tokenizer, prompt)) for prompt in prompts]


def make_generator(config: FrozenConfigDict, model: Model) -> Generator:
    """What draws tokens by the config's keys."""
    return Generator(
        model, sampling(config), config.decode_seed, config.max_target_length, config.max_prefill_predict_length
    )


def rows_at_once(config: FrozenConfigDict, layout: Layout) -> int:
    """How many prompts of a file are answered together: per_device_batch_size per device."""
    return math.ceil(config.per_device_batch_size * layout.mesh.size)


def draw_all(generator: Generator, answers: Sequence[Answer], rows: int, speed: Speed) -> None:
    """Draws `rows` answers at a time and prints them; one alone is printed as it grows."""
    if len(answers) == 1:
        _write(answers[0].prompt_text)
        draw_growing(generator, answers[0], 0, speed)
        return
    for first in range(0, len(answers), rows):
        batch = answers[first : first + rows]
        draw_answers(generator, batch, min(rows, len(answers)), first, speed)
        for number, answer in enumerate(batch, start=first + 1):
            say([f"prompt {number}:", *_indented(answer.prompt_text + answer.text)])


def draw_growing(generator: Generator, answer: Answer, number: int, speed: Speed) -> None:
    """Draws one answer and prints each part of it as soon as it is certain."""
    written = 0

    def look() -> None:
        nonlocal written
        text = answer.certain()
        _write(text[written:])
        written = max(written, len(text))

    draw_answers(generator, [answer], 1, number, speed, look)
    _write("\n")


def converse(config: FrozenConfigDict, tokenizer: Tokenizer, generator: Generator, speed: Speed) -> list[str]:
    """Answers each line of the standard input, until it ends.

    With a chat template the lines are one conversation, which begins anew where it no longer fits; else each line is a
    text of its own.
    """
    conversation: tuple[Any, ...] = ()
    texts: list[str] = []
    while True:
        _write("> ")
        line = sys.stdin.readline()
        if not line:
            _write("\n")
            return texts
        if not (said := line.rstrip("\n")).strip():
            continue
        prompt: Prompt = (*conversation, {"role": "user", "content": said}) if config.use_chat_template else said
        try:
            answer = Answer(config, tokenizer, encode_prompt(config, tokenizer, prompt))
        except UserError as error:
            conversation = ()
            say([f"error: {error}" + (" (the conversation begins anew)" if config.use_chat_template else "")])
            continue
        draw_growing(generator, answer, len(texts), speed)
        texts.append(answer.text)
        if config.use_chat_template:
            conversation = (*prompt, {"role": "assistant", "content": answer.text})


def sample(config: FrozenConfigDict, plan: StepPlan, parts: tuple[Any, ...], tokenizer: Tokenizer) -> str:
    """The prompt, and up to `sample_length` tokens that a model in training draws after it, as text."""
    answer = Answer(config, tokenizer, encode_prompt(config, tokenizer, config.prompt))
    draw_answers(make_generator(config, in_training(plan, parts)), [answer], 1, 0, Speed())
    return answer.prompt_text + answer.text


def _write(text: str) -> None:
    if jax.process_index() == 0:
        print(printable(text), end="", flush=True)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in printable(text).splitlines()]


if __name__ == "__main__":
    run_command(main)
