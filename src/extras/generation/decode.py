"""Generates text from a model: `python -m src.decode CONFIG.yml load_parameters_path=PATH prompt="..."`."""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from src.config.command_keys import Decoding
from src.config.dataset_spec import eval_specs, names_eval_data, train_specs
from src.config.usage import Usage
from src.data.document_stream import encode
from src.data.open import open_source
from src.data.processes import gather_json
from src.data.tokenizer import make_tokenizer
from src.data.types import Conversation, InputSpec, Message, Tokenizer, is_stream, missing_template
from src.extras.command_files import check_outputs, read_lines, write_output
from src.extras.conversations import ChatFields, read_message
from src.extras.generation.completion import Completion, Prompt, generate, length_note, make_generator, write_now
from src.extras.generation.generate import Generator, in_training
from src.extras.generation.inference_weights import in_activation_dtype, quantize_at_rest, unrolled
from src.extras.generation.loaded_model import load_model, model_fingerprint
from src.model.params import Weights
from src.run.run_setup import configured
from src.step.plan import StepPlan
from src.system.errors import UserError, changed_keys, first_few, printable, say
from src.system.json_text import parse_json, read_object
from src.system.user_code import call, load_function

USAGE = Usage(
    """Generates text from a model.

python -m src.decode RUN prompt=TEXT [key=value ...]
python -m src.decode CONFIG load_parameters_path=PATH prompt=TEXT [key=value ...]
python -m src.decode RUN decode_path=OUT.jsonl decode_prompt_tokens=N dataset_path=DATA [decode_samples=S]""",
    ("Decoding",),
)


def main(argv: Sequence[str] | ConfigDict) -> list[str] | None:
    """Runs the command line `argv`, or a resolved config: prints or writes texts; returns them without their prompts.

    Returns None for --help, and with `decode_path` only the texts of this start. Raises UserError for a mistake in the
    command, the prompts or the weights; TransientError as `configured` and `load_model` do.
    """
    config = configured(argv, USAGE, uses_weights=True)
    if config is None:
        return None
    if config.decoding.interactive and jax.process_count() > 1:
        raise UserError("interactive=true needs a job with one process, but this one has several: use prompt_path")
    tokenizer = make_tokenizer(config.data, config.model.vocab_size, "prompt")
    assert tokenizer
    # Report a mistake in a prompt before reading the weights, which takes minutes.
    if config.decoding.use_chat_template and tokenizer.chat_template is None:
        raise missing_template()
    decoding, length = config.decoding, config.batch.max_target_length
    if not decoding.decode_path:  # then decode_prompt_tokens, in a run's config, is meant for its decode_metrics
        decoding = dataclasses.replace(decoding, decode_prompt_tokens=0)
    elif jax.process_index() == 0:
        check_outputs({"decode_path": (path := decoding.decode_path), "decode_path's settings": f"{path}.settings"})
    prompts = [] if config.decoding.interactive else prompts_of(decoding, InputSpec.of(config, tokenizer))
    looked_at = prompts[:1] if decoding.decode_prompt_tokens else prompts
    completions = [Completion(decoding, length, tokenizer, prompt) for prompt in looked_at]
    say(length_note(decoding, length, max((len(completion.prompt) for completion in completions), default=0)))
    loaded, weights = load_model(config, tokenizer)
    plan, weights = unrolled(loaded, weights)
    before = _bytes(weights)
    if decoding.quantize_weights:
        plan, weights = quantize_at_rest(plan, weights, loaded)
    weights = in_activation_dtype(plan, weights)
    if decoding.quantize_weights:
        say([f"weights: {_bytes(weights) / 1e6:,.1f} MB in memory, {before / 1e6:,.1f} before quantize_weights=int8"])
    generator = make_generator(decoding, length, plan, weights)
    rows = math.ceil(config.batch.per_device_batch_size * plan.layout.mesh.size)
    if config.decoding.interactive:
        texts = converse(decoding, tokenizer, generator)
    elif decoding.decode_path:
        settings = {**model_fingerprint(config), "tokenizer": tokenizer.fingerprint()}
        settings |= {"chat_template": tokenizer.chat_template, "tool_template": tokenizer.tool_template}
        texts = write_completions(decoding, tokenizer, generator, prompts, rows, settings)
    else:
        texts = complete_all(generator, completions, rows)
    say(generator.speed.lines())
    return texts


def _bytes(weights: Weights) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


# ---- Prompts


_EXPECTED = '{"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}'


def prompts_of(decoding: Decoding, inputs: InputSpec) -> Sequence[Prompt]:
    """Returns the prompts that the keys name: from documents, from a file, or the single one.

    Raises as `DocumentPrompts` and `read_prompts` do.
    """
    if decoding.decode_prompt_tokens:
        return DocumentPrompts(decoding, inputs)
    return read_prompts(decoding, inputs) if decoding.prompt_path else [decoding.prompt]


class DocumentPrompts(Sequence[Prompt]):
    """Takes prompts from data: the first `decode_prompt_tokens` ids of each document, in order.

    A shorter document gives all but its last id, or only bos; a conversation, everything before the last message of the
    assistant. There are at most `decode_num_prompts` (-1: no limit). The documents are evaluation data if the keys name
    any, else training data. Among several datasets, decode_metrics uses the first, but `decode_path` accepts only one.
    Raises UserError for several datasets with `decode_path`, or for a limited number of prompts from a stream in a job
    of several processes; also as `open_source` does, and when a prompt is read, as the source and `encode` do.
    """

    def __init__(self, decoding: Decoding, inputs: InputSpec) -> None:
        self._inputs = inputs._replace(batch=dataclasses.replace(inputs.batch, packing=False))
        specs = (eval_specs if names_eval_data(inputs.data) else train_specs)(inputs.data)
        if len(specs) > 1:
            key, names = "eval_datasets" if specs[0].is_eval else "datasets", ", ".join(spec.name for spec in specs)
            if decoding.decode_path:
                raise UserError(
                    f"decode_prompt_tokens takes prompts from one dataset, but {key} names {names}: name only "
                    f"one, {key}=[{{name: {specs[0].name}, ...}}], and give each its own decode_path"
                )
            say([f"decode_metrics takes prompts only from {specs[0].name}, the first dataset of {key}: {names}"])
        source: Any = open_source(specs[0], self._inputs)
        limit = decoding.decode_num_prompts
        self._tokens, self.fingerprint = decoding.decode_prompt_tokens, source.fingerprint()
        if is_stream(source) and limit != -1:
            if jax.process_count() > 1:
                raise UserError(f"{source.name} is streamed per process: use a job with one process")
            # A stream only reads forward, but each evaluation takes all prompts again: store them.
            from src.extras.readers.streams import StreamReader

            source = list(map(StreamReader(source, inputs.data.data_shuffle_seed, None), range(limit)))
        self._items, self._limit = source, len(source) if limit == -1 else limit

    def __len__(self) -> int:
        return min(len(self._items), self._limit)

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        item = self._items[i]
        if isinstance(item, Conversation):
            last = max(n for n, message in enumerate(item.messages) if message["role"] == "assistant")
            return item._replace(messages=item.messages[:last])
        assert self._inputs.tokenizer
        ids = encode(self._inputs, item)[0].ids
        return ids[: min(self._tokens, len(ids) - 1)] if len(ids) > 1 else np.array([self._inputs.tokenizer.bos])


def read_prompts(decoding: Decoding, inputs: InputSpec) -> list[Prompt]:
    """Reads the prompts in `prompt_path`: its lines, or the `prompt` or `messages` of each line of a .jsonl file.

    Raises UserError if the file cannot be read, is malformed, or has no prompt.
    """
    path, fields = Path(decoding.prompt_path).expanduser(), ChatFields(inputs)
    if prompts := read_lines(path, "prompt_path", functools.partial(_prompt_of_json, fields)):
        fields.report("prompt_path")
        return prompts
    raise UserError(f"prompt_path={path} has no prompt: expected one per line, or JSONL, {_EXPECTED}")


def _prompt_of_json(fields: ChatFields, line: str) -> Prompt:
    record = parse_json(line)
    if isinstance(record, dict):
        if isinstance(prompt := record.get("prompt"), str):
            chat = fields.read(record, [{"role": "user", "content": prompt}], "prompt")
            return prompt if len(chat.messages) == 1 and chat.shown == {"tools": None} else chat
        if isinstance(messages := record.get("messages"), list) and messages:
            messages = [read_message(message, number) for number, message in enumerate(messages, start=1)]
            return fields.read(record, messages, "messages")
    raise ValueError(f"expected {_EXPECTED}")


def complete_batch(
    decoding: Decoding, tokenizer: Tokenizer, generator: Generator, prompts: Sequence[Prompt], first: int, rows: int
) -> list[dict[str, Any]]:
    """Generates up to `rows` texts, from number `first` on: `decode_samples` for each prompt, in turn.

    Returns the fields of each line of `decode_path`: the prompt's number, the sample's number for this prompt, both
    texts, the generated ids, their log-probabilities in nats (before temperature and limits), and the sum of these.
    Raises UserError as `Completion` does.
    """
    count = decoding.decode_samples
    numbers = range(first, min(first + rows, count * len(prompts)))
    batch = [Completion(decoding, generator.length, tokenizer, prompts[number // count]) for number in numbers]
    generate(generator, batch, rows, first)
    return [
        {"id": number // count, "sample": number % count, "prompt": each.prompt_text, "text": each.text}
        | {"ids": [token for token, _ in each.sampled], "log_probs": [log_prob for _, log_prob in each.sampled]}
        | {"log_prob": sum(log_prob for _, log_prob in each.sampled)}
        for number, each in zip(numbers, batch, strict=True)
    ]


def write_completions(
    decoding: Decoding,
    tokenizer: Tokenizer,
    generator: Generator,
    prompts: Sequence[Prompt],
    rows: int,
    settings: Mapping[str, Any],
) -> list[str]:
    """Writes `complete_batch`'s lines for all prompts to `decode_path`; returns the texts that this start generated.

    Continues after the complete batches in the file, so that its texts are the same as without an interruption.
    `settings` describes the model and tokenizer, and is saved with the decoding keys in `decode_path`.settings. Raises
    UserError if the file has texts from other settings, or can't be written, and as `complete_batch` does.
    """
    path, total, texts = Path(decoding.decode_path).expanduser(), decoding.decode_samples * len(prompts), []
    of_prompts = prompts.fingerprint if isinstance(prompts, DocumentPrompts) else list(map(str, prompts))
    keys = {key: value for key, value in vars(decoding).items() if key not in ("decode_path", "decode_metrics")}
    settings = {**settings, **keys, "prompts": of_prompts, "rows": rows, "max_target_length": generator.length}
    try:
        is_writer = jax.process_index() == 0
        done = gather_json(_written(path, json.loads(json.dumps(settings)), rows, total) if is_writer else 0)[0]
        for first in range(done, total, rows):
            lines = complete_batch(decoding, tokenizer, generator, prompts, first, rows)
            texts += [line["text"] for line in lines]
            if is_writer:
                with open(path, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"decode_path={path} can't be written: {error.strerror}") from error
    say([f"{total:,} texts, {total - done:,} of them generated now: {path}"])
    return texts


def _written(path: Path, settings: Mapping[str, Any], rows: int, total: int) -> int:
    """Returns the number of texts in the file's complete batches, and removes any others.

    For a new file, writes `settings` to `path`.settings. Raises UserError if existing texts are from other settings.
    """
    settings_file, data = path.with_name(f"{path.name}.settings"), path.read_bytes() if path.exists() else b""
    if data and (changed := changed_keys(read_object(settings_file) if settings_file.exists() else {}, settings)):
        raise UserError(
            f"decode_path={path} has texts from other settings ({first_few(changed)}): name a new file, or delete it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not data:  # otherwise `path`.settings has these settings already
        write_output("decode_path's settings", str(settings_file), json.dumps(settings).encode())
    whole = data.count(b"\n")
    done = whole if whole == total else whole // rows * rows
    with open(path, "ab") as file:
        file.truncate(sum(map(len, data.splitlines(keepends=True)[:done])))
    return done


class DecodeMetrics:
    """Measures texts that a model in training generates, by the user's function `decode_metrics` (module:function).

    The function takes the lines of `complete_batch` for all prompts, and returns {name: number}. Raises as
    `load_function` and `prompts_of` do.
    """

    def __init__(self, decoding: Decoding, inputs: InputSpec, rows: int) -> None:
        self._function = load_function(decoding.decode_metrics, "decode_metrics")
        self._decoding, self._inputs, self._rows = decoding, inputs, rows
        self._prompts = prompts_of(dataclasses.replace(decoding, prompt_path="", decode_path=""), inputs)
        self._generator: Generator | None = None

    def run(self, plan: StepPlan, weights: Weights) -> dict[str, float]:
        """Generates the texts with these weights; returns the function's numbers as `decode_NAME`.

        Raises as `call` does if the function raises, and UserError if it returns something else.
        """
        plan, weights = in_training(plan, weights)
        lengths = self._decoding, self._inputs.batch.max_target_length
        generator = dataclasses.replace(self._generator or make_generator(*lengths, plan, weights), weights=weights)
        self._generator = dataclasses.replace(generator, weights=Weights({}))  # keep only the programs
        assert self._inputs.tokenizer
        batch = self._decoding, self._inputs.tokenizer, generator
        starts = range(0, self._decoding.decode_samples * len(self._prompts), self._rows)
        lines = [line for first in starts for line in complete_batch(*batch, self._prompts, first, self._rows)]
        numbers = call("decode_metrics", self._function, lines)
        try:
            metrics = {f"decode_{name}": float(number) for name, number in numbers.items()}
        except (AttributeError, TypeError, ValueError):
            metrics = None
        if metrics is None or any("/" in name for name in metrics):  # a / precedes the name of a dataset
            expected = "a mapping of names, without /, to numbers"
            raise UserError(f"decode_metrics must return {expected}: it returned {numbers!r:.200}")
        return metrics


# ---- Completions


def complete_all(generator: Generator, completions: Sequence[Completion], rows: int) -> list[str]:
    """Generates and prints completions, `rows` at a time, or a single one as it grows; returns their texts."""
    if len(completions) == 1:
        write_now(completions[0].heading)
        generate(generator, completions, 1, 0, stream=True)
        return [completions[0].text]
    for first in range(0, len(completions), rows):
        batch = completions[first : first + rows]
        generate(generator, batch, min(rows, len(completions)), first)
        for number, completion in enumerate(batch, start=first + 1):
            text = printable(completion.heading + completion.text)
            say([f"prompt {number}:", *(f"  {line}" for line in text.splitlines())])
    return [completion.text for completion in completions]


def converse(decoding: Decoding, tokenizer: Tokenizer, generator: Generator) -> list[str]:
    """Completes each line of standard input until its end; returns the generated texts.

    With a chat template, the lines form one conversation, which restarts when it no longer fits; otherwise each line is
    a separate prompt. Raises UserError for a line that is not text.
    """
    conversation: tuple[Message, ...] = ()
    texts: list[str] = []
    for line in iter(_read_line, ""):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        messages = (*conversation, {"role": "user", "content": line})
        prompt: Prompt = Conversation(messages) if decoding.use_chat_template else line
        try:
            completion = Completion(decoding, generator.length, tokenizer, prompt)
        except UserError as error:
            conversation = ()
            say([f"error: {error}" + (" (the conversation starts over)" if decoding.use_chat_template else "")])
            continue
        generate(generator, [completion], 1, len(texts), stream=True)
        texts.append(completion.text)
        if decoding.use_chat_template:
            conversation = (*messages, {"role": "assistant", "content": completion.text})
    write_now("\n")
    return texts


def _read_line() -> str:
    write_now("> ")
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input has a line that is not text in {error.encoding}: {error.reason}") from None
