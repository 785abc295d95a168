"""Checks the keys that describe data, and reads `datasets` and `eval_datasets` as they are typed."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from src.config import source_spec
from src.config.schema import KEYS
from src.config.values import Keys, check_value, read_list
from src.config.yaml import convert, dump
from src.errors import UserError, did_you_mean, first_few

# What a type of data can't do without.
_NEEDED = {"tfds": "dataset_name", "custom": "dataset_factory"}
_NEEDED |= dict.fromkeys(("array_record", "parquet", "tokens"), "dataset_path")


def read_entries(key: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the entries of a parsed `datasets` or `eval_datasets`, each setting of its type.

    Raises ValueError: everything that is wrong with them.
    """
    entries = read_list(value, "entry", functools.partial(_read_entry, source_spec.ENTRY_KEYS[key]))
    names = [entry["name"] for entry in entries]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError("; ".join(f"two entries have the name {name}" for name in twice))
    return entries


def _read_entry(known: Sequence[str], entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected a mapping such as {{name: web, dataset_path: FOLDER}}, got {dump(entry)}")
    typed = {}
    for name, value in entry.items():
        if name not in known:
            hint = did_you_mean(name, known) or f" There are {first_few(known, near=name)}"
            raise ValueError(f"no setting {name}.{hint}")
        typed[name] = convert(value, {"weight": 1.0, "eval_steps": 1}.get(name, ""), name)
        if name in KEYS and (problem := check_value(name, typed[name])):
            raise ValueError(problem)
    if not re.fullmatch(r"[\w.-]+", typed.get("name", "")):
        raise ValueError("it needs a name, of letters, digits, dots, dashes and underscores")
    return typed


def _sources(config: Keys) -> Iterator[str]:
    problems = []
    for spec in source_spec.all_specs(config):
        # Without a path the one source of a run is Python's own; of several each says what it is.
        needed = "dataset_path" if spec.name and spec.type == "text" else _NEEDED.get(spec.type)
        if needed and not spec.settings[needed]:
            problems.append(f"dataset_type={spec.type} needs {spec.key(needed)}")
    yield from dict.fromkeys(problems)
    try:
        source_spec.whole_numbers(source_spec.train_weights(config))
    except UserError as error:
        yield str(error)


def _tokenizer(config: Keys) -> Iterator[str]:
    kind, path = config.tokenizer_type, config.tokenizer_path
    if source_spec.all_synthetic(config):
        return
    if kind == "sentencepiece" and not path:
        yield "tokenizer_type=sentencepiece needs tokenizer_path, the .model file"
    if kind == "huggingface" and not path:
        yield "tokenizer_type=huggingface needs tokenizer_path, a model's folder or a tokenizer.json"
    if kind == "byte" and path:
        yield (
            f"tokenizer_path={path} is not read with tokenizer_type=byte; set tokenizer_type=sentencepiece (a .model "
            "file) or tokenizer_type=huggingface (a model's folder or a tokenizer.json)"
        )


def _finetuning(config: Keys) -> Iterator[str]:
    # One of the two is enough to evaluate on; who trains without the first is told so where the data are opened.
    has_path = config.dataset_path or config.eval_dataset_path or config.datasets
    if config.use_sft and not (all(spec.type == "text" for spec in source_spec.train_specs(config)) and has_path):
        yield "use_sft=true reads .jsonl files of conversations: set dataset_type=text and dataset_path"


def _evaluation(config: Keys) -> Iterator[str]:
    steps = [entry.get("eval_steps", config.eval_steps) for entry in config.eval_datasets]
    if config.eval_mode == "rolling" and -1 in (steps or [config.eval_steps]):
        yield (
            "eval_mode=rolling goes on where the last evaluation ended, and eval_steps=-1 (one epoch) begins anew each "
            "time: set eval_steps to a number of batches, or eval_mode=reset"
        )
    if config.eval_interval == -1 or source_spec.names_eval_data(config):
        return
    if config.datasets:
        yield "eval_interval needs data to evaluate on, for nothing is held out of datasets: eval_datasets"
    elif config.eval_fraction == 0:
        yield "eval_interval needs data to evaluate on: set eval_dataset_path or an eval_fraction above 0"


def _long_documents(config: Keys) -> Iterator[str]:
    if config.packing and config.long_documents == "truncate":
        yield "long_documents=truncate needs packing=false: packed rows leave nothing of a document out"


CHECKS = (_sources, _tokenizer, _finetuning, _evaluation, _long_documents)
