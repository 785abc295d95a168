"""Every key of data changes batches, or is refused, or a line says that it has no effect."""

import contextlib
import itertools
import json

import numpy as np
import pytest

from src.config.schema import KEYS
from src.data.eval_batches import EvalBatches
from src.data.loader import train_batches
from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from src.run import resolve_config
from src.system.errors import UserError
from tests import runs

ROWS = np.arange(8)
OTHER = {  # a value for each key of the section that may change batches
    "dataset_type": "synthetic",
    "dataset_path": "{folder}/other",
    "dataset_name": "other",
    "train_split": "other",
    "array_record_format": "json",
    "dataset_factory": "a:b",
    "datasets": "[{{name: a, dataset_path: {folder}/other}}]",
    "eval_dataset_path": "{folder}/other",
    "eval_dataset_name": "other",
    "eval_split": "other",
    "eval_datasets": "[{{name: a, dataset_path: {folder}/other}}]",
    "max_document_bytes": 64,
    "eval_fraction": 0.5,
    "tokenizer_type": "sentencepiece",
    "tokenizer_path": "{folder}/none",
    "data_shuffle_seed": 1,
    "use_sft": "true",
    "sft_train_on_completion_only": "false",
    "eval_steps": 1,
}
SETUPS = {
    "texts": {"dataset_path": "{folder}/texts"},
    "named evaluation data": {"dataset_path": "{folder}/texts", "eval_dataset_path": "{folder}/more"},
    "conversations": {"dataset_path": "{folder}/pairs.jsonl", "use_sft": "true"},
    "synthetic": {"dataset_type": "synthetic"},
    "a mixture": {
        "datasets": "[{{name: a, dataset_path: {folder}/texts}}, {{name: b, dataset_path: {folder}/more}}]",
        "eval_datasets": "[{{name: a, dataset_path: {folder}/more, eval_steps: 2}}]",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("texts", "more", "other")):
        runs.write_corpus(folder / name, seed=seed)
    pairs = [{"prompt": f"{n}?", "completion": f"{n * n}."} for n in range(200)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return folder


def open_all(words):
    config = resolve_config.load([runs.BASE, *words])
    open_sources(InputSpec.of(config, make_tokenizer(config.data, config.model.vocab_size)), config.evaluation)


def batches(config):
    """The first batches of training and of each evaluation set."""
    inputs = InputSpec.of(config, make_tokenizer(config.data, config.model.vocab_size))
    data, eval_sets = open_sources(inputs, config.evaluation)
    with contextlib.closing(train_batches(inputs, data, ROWS, len(ROWS))) as made:
        found = [batch.arrays for batch in itertools.islice(made, 3)]
    for each in eval_sets:
        found += [None, *itertools.islice(EvalBatches(inputs, each, ROWS, len(ROWS)), 4)]
    return [batch and {name: array.tolist() for name, array in batch.items()} for batch in found]


@pytest.mark.parametrize("setup", SETUPS)
def test_no_key_of_data_is_ignored_in_silence(setup, folder):
    keys = {"vocab_size": 258, "max_target_length": 32, "eval_interval": 1, "eval_steps": 2, **SETUPS[setup]}
    argv = [runs.BASE, *(f"{key}={value}".format(folder=folder) for key, value in keys.items())]
    expected, silent, effects = batches(resolve_config.load(argv)), [], {"refused": 0, "listed": 0, "changed": 0}
    for key, value in OTHER.items():
        typed, notes = f"{key}={value}".format(folder=folder), []
        try:
            config = resolve_config.load([*argv, typed], notes, command="src.train")
            found = batches(config) if not any(" no effect: " in note for note in notes) else None
        except (UserError, ValueError):
            effects["refused"] += 1
            continue
        if config[key] == resolve_config.load(argv)[key]:
            continue
        effects["listed" if found is None else "changed"] += 1
        silent += [typed] * (found == expected)
    assert not silent
    assert min(effects["refused"], effects["changed"]) > 0


def test_all_keys_of_data_are_tried():
    known = {name for name, key in KEYS.items() if key.section == "data"}
    assert known - OTHER.keys() == {
        "dataset_column",  # only records have columns: see below
        "data_threads",  # makes the same batches, faster
    }


@pytest.mark.parametrize("key", ["dataset_path", "eval_dataset_path"])
def test_a_column_of_files_without_columns_is_listed(key, folder, capsys):
    """Only a listing of the files tells: the same key matters beside one .jsonl file."""
    keys = {"vocab_size": 258, "eval_interval": 1, "eval_steps": 1, "dataset_column": "body", key: folder / "texts"}
    open_all([f"{name}={value}" for name, value in keys.items()])
    line = f"dataset_column=body has no effect on {key}={folder / 'texts'}: none of its files is .jsonl\n"
    assert capsys.readouterr().out.count(line) == 1
    entries = f"[{{name: a, dataset_path: {folder / 'texts'}, dataset_column: body}}]"
    open_all([f"datasets={entries}"])
    assert "datasets, a: dataset_column=body has no effect on datasets, a: dataset_path=" in capsys.readouterr().out
    (folder / "lines").mkdir(exist_ok=True)
    (folder / "lines" / "a.jsonl").write_text('{"body": "text"}\n' * 9)
    open_all([f"dataset_path={folder / 'lines'}", "dataset_column=body"])
    open_all([f"dataset_path={folder / 'texts'}"])
    assert "no effect" not in capsys.readouterr().out


def test_a_column_of_pythons_own_source_is_listed(capsys):
    open_all(["dataset_column=body"])
    said = "dataset_column=body has no effect on Python's own source: none of its files is .jsonl\n"
    assert capsys.readouterr().out == said
