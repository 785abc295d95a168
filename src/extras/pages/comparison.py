"""Compares runs in tables: what they reached, what differs in their configurations, their losses at the same steps."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from src import as_installed
from src.config.run_configs import similar_runs
from src.config.schema import KEYS
from src.config.yaml import dump, literal, parse_keys
from src.extras.pages.figures import key_figures
from src.extras.pages.history import Curve, History
from src.run.environment import read_environment
from src.run.metrics import eval_key, eval_sets
from src.system.errors import UserError, clipped

Table = list[list[str]]  # rows; the first has the runs' names, the first column says what the others are
_FACTS = ("MinText", "jax", "Python", "devices", "mesh", "model", "step", "data")  # of environment.json
_MAX_ROWS = 10  # of a table of steps, about
# On what the tokens of an evaluation depend; then those that count as well if it takes a number of batches, and if its
# data are a part of the training data.
_EVAL_KEYS = ("eval_dataset_path", "eval_dataset_name", "eval_split", "eval_datasets", "eval_steps", "eval_mode")
_EVAL_KEYS += ("max_target_length", "packing", "long_documents", "max_document_bytes", "use_sft")
_EVAL_KEYS += ("data_shuffle_seed", "dataset_column", "sft_train_on_completion_only", "batch_transform")
_EVAL_BATCH = ("eval_per_device_batch_size", "per_device_batch_size", "devices")
_HELD_OUT = ("eval_fraction", "dataset_type", "dataset_path", "dataset_name", "datasets")


class Run(NamedTuple):
    """Holds what a comparison shows of a run."""

    history: History
    config: Mapping[str, Any]
    facts: Mapping[str, str]  # environment.json


def read_runs(paths: Sequence[str]) -> dict[str, Run]:
    """Reads runs' folders, by name; raises UserError for what is none or malformed, OSError for what is unreadable."""
    runs = {}
    names = [epath.Path(path).name for path in paths]  # or as typed, where two have the same
    for name, path in zip(names, paths, strict=True):
        folder, history = epath.Path(path), History()
        for file in ("metrics.jsonl", "config.yml"):
            if not (folder / file).exists():
                hint = "" if folder.exists() else similar_runs(Path(path))
                raise UserError(f"{folder} has no {file}: expected the folder of a run, such as runs/NAME.{hint}")
        history.read(folder / "metrics.jsonl")
        config = literal(parse_keys((folder / "config.yml").read_text(), f"{folder}/config.yml"))
        facts = read_environment(folder)
        runs[name if names.count(name) == 1 else path] = Run(history, config, facts)
    return runs


def tables(runs: Mapping[str, Run]) -> dict[str, Table]:
    """Returns the tables, by title; the first two are of what runs reached, and of how they differ."""
    histories = [run.history for run in runs.values()]
    ends = [history.last_train.get("step", 0) for history in histories]
    results = [
        {"Steps": f"{end} of {run.config.get('steps')}"} | dict(key_figures(run.history))
        for end, run in zip(ends, runs.values(), strict=True)
    ]
    losses = [history.train["loss"] for history in histories]
    result = {
        "Results": _rows(results),
        "What differs": [row for row in _rows([_settings(run) for run in runs.values()]) if len(set(row[1:])) > 1],
        "Training loss, mean since the step before": _at_steps(losses, ends),
    }
    for name in dict.fromkeys(name for history in histories for name in eval_sets(history.evals)):
        curves = [history.evals[eval_key("eval_loss", name)] for history in histories]
        result["Eval loss" + f", {name}" * bool(name)] = _at_evaluations(curves)
    return {title: [["", *runs], *rows] for title, rows in result.items() if rows}


def loss_note(runs: Mapping[str, Run]) -> str:
    """Returns sentences if the runs' losses, or those of their evaluations, cannot be compared; or ""."""
    settings = [_settings(run) for run in runs.values()]

    def differing(keys: Sequence[str]) -> str:
        return ", ".join(key for key in keys if len({each.get(key) for each in settings}) > 1)

    if differing(["loss"]):
        return "These runs differ in loss: their losses and perplexities measure other things and can't be compared."
    notes = []
    if keys := differing(("tokenizer_type", "tokenizer_path")):
        notes.append(
            f"These runs differ in {keys}: losses per token of different tokenizers can't be compared. "
            "Compare eval_bits_per_byte, which python -m src.evaluate RUN prints."
        )
    counted = _EVAL_BATCH if any(each["eval_steps"] != "-1" for each in settings) else ()
    held_out = _HELD_OUT if any(each["eval_dataset_path"] == '""' for each in settings) else ()
    evaluated = sum(bool(run.history.evals) for run in runs.values()) > 1
    if evaluated and (keys := differing((*_EVAL_KEYS, *counted, *held_out))):
        notes.append(
            f"These runs differ in {keys}: their evaluations are of other tokens, or of tokens with other text before "
            "them. To compare models, evaluate each with the same keys: python -m src.evaluate RUN."
        )
    return as_installed(" ".join(notes))


def _rows(columns: Sequence[Mapping[str, str]]) -> Table:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "-") for column in columns)] for name in names]


def _settings(run: Run) -> dict[str, str]:
    """Returns keys and facts; a key that config.yml, of an older version, lacks has its default of today."""
    keys = {name: key.default for name, key in KEYS.items()} | dict(run.config)
    keys |= {"run_name": "", "base_output_directory": ""}  # which always differ
    facts = {name: str(run.facts[name]) for name in _FACTS if name in run.facts}
    return {name: clipped(dump(value), 200) for name, value in keys.items()} | facts


def _at_steps(curves: Sequence[Curve], ends: Sequence[int]) -> Table:
    """Returns each curve's mean since the step before, at round steps.

    `ends` are the runs' last steps; the value of a run that ended before its row's step names its own.
    """
    columns = [[block for block in curve.blocks() if block.count] for curve in curves]
    rough = max(ends) / _MAX_ROWS
    power = 10 ** math.floor(math.log10(max(rough, 1)))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    rows = []
    for begin in range(0, max(ends), gap):
        step = min(begin + gap, max(ends))
        row = [f"step {step:,}"]
        for column, end in zip(columns, ends, strict=True):
            within = [block for block in column if begin < block.median[0] <= step]
            total, count = sum(block.total for block in within), sum(block.count for block in within)
            value = f"{total / count:.4f}" if within else "-"
            row.append(value + f" (to {end:,})" * bool(within and end < step))
        rows.append(row)
    return [row for row in rows if set(row[1:]) != {"-"}]


def _at_evaluations(curves: Sequence[Curve]) -> Table:
    """Returns each curve's values at the steps of its evaluations; of many, at those that the curves share."""
    columns = [{step: value for step, value in curve.points() if value is not None} for curve in curves]
    steps = sorted(set().union(*columns))
    if len(steps) > _MAX_ROWS:
        steps = [step for step in steps if all(step in column for column in columns if column)] or steps
    gap = -(-len(steps) // _MAX_ROWS) if steps else 1
    return [
        [f"step {step:,}", *(f"{column[step]:.4f}" if step in column else "-" for column in columns)]
        for step in steps[::-1][::gap][::-1]
    ]
