"""Writes pages about runs, and compares runs in tables: `python -m src.report RUN_DIR [OTHER_RUN_DIR ...]`.

report.html is written for any run's folder, even while the run continues; comparison.html for several runs, with their
results, differences in their configurations, and losses at the same steps.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from src import as_installed
from src.config.not_found import similar_runs
from src.config.schema import KEYS
from src.config.yaml import dump, literal, parse_keys
from src.extras.command_files import write_output
from src.extras.pages.history import Curve, History, key_figures
from src.extras.pages.page import card, loss_unit, page, table, whole_page
from src.run.environment import read_environment
from src.run.metrics import eval_key, eval_sets
from src.system.disk import any_path
from src.system.errors import UserError, clipped, counted, first_few, show

USAGE = """usage: python -m src.report RUN_DIR [OTHER_RUN_DIR ...]

Writes RUN_DIR/report.html from the metrics.jsonl and config.yml there: curves, throughput, configuration. RUN_DIR is a
run's folder, such as runs/NAME; a running run is shown up to its latest step. For several runs it prints their
results, differences in their configurations, and losses at the same steps, and writes these with their
curves to RUN_DIR/comparison.html, in the first one's folder."""
Table = list[list[str]]  # rows; the first has the runs' names, the first column the rows' names
_ENVIRONMENT = ("MinText", "jax", "Python", "devices", "mesh", "model", "step", "data")  # of environment.json
_MAX_ROWS = 10  # approximate limit for a table of steps
_MAX_COLUMNS = 6  # with more runs, printed tables have a row per run
# Keys that determine an evaluation's tokens: _EVAL_KEYS always, _EVAL_BATCH if it takes a number of batches, _HELD_OUT
# if its data is held out from the training data.
_EVAL_KEYS = ("eval_dataset_path", "eval_dataset_name", "eval_split", "eval_datasets", "eval_steps", "eval_mode")
_EVAL_KEYS += ("max_target_length", "packing", "long_documents", "max_document_bytes", "use_sft")
_EVAL_KEYS += ("data_shuffle_seed", "dataset_column", "sft_train_on_completion_only", "batch_transform")
_EVAL_BATCH = ("eval_per_device_batch_size", "per_device_batch_size", "devices")
_HELD_OUT = ("eval_fraction", "dataset_type", "dataset_path", "dataset_name", "datasets")


class Run(NamedTuple):
    """The data of a run that a comparison shows."""

    history: History
    config: Mapping[str, Any]
    environment: Mapping[str, str]  # from environment.json


def main(argv: Sequence[str]) -> None:
    """Writes a run's page, or the page of several runs, whose tables it also prints; or prints the usage.

    Raises UserError if no folder is named, for a folder without a run, for a malformed file, or if the page cannot be
    written.
    """
    if {"-h", "--help"}.intersection(argv):
        show(USAGE)
        return
    if not argv or any(argument.startswith("-") for argument in argv):
        raise UserError("expected one or more runs' folders: python -m src.report runs/NAME")
    argv = list(dict.fromkeys(str(any_path(path)) for path in argv))
    folder = epath.Path(argv[0])
    page_file = folder / ("report.html" if len(argv) == 1 else "comparison.html")
    try:
        runs = read_runs(argv)
        if len(argv) == 1:
            write_output("report", str(page_file), page(folder, runs[folder.name].history).encode())
        else:
            write_output("report", str(page_file), comparison_page(runs).encode())
            show(comparison_text(runs))
    except (OSError, ValueError, ArithmeticError) as error:  # such as a folder in a file's place, or absurd numbers
        raise UserError(f"cannot write {page_file}: {type(error).__name__}: {error}") from None
    show(f"wrote {page_file}")


def read_runs(paths: Sequence[str]) -> dict[str, Run]:
    """Reads runs' folders, by name, or by path if names repeat.

    Raises UserError for a missing or malformed file, OSError for an unreadable one.
    """
    runs = {}
    names = [epath.Path(path).name for path in paths]  # may repeat
    for name, path in zip(names, paths, strict=True):
        folder, history = epath.Path(path), History()
        for file in ("metrics.jsonl", "config.yml"):
            if not (folder / file).exists():
                hint = "" if folder.exists() else similar_runs(Path(path))
                raise UserError(f"{folder} has no {file}: expected the folder of a run, such as runs/NAME.{hint}")
        history.read(folder / "metrics.jsonl")
        config = literal(parse_keys((folder / "config.yml").read_text(), f"{folder}/config.yml"))
        environment = read_environment(folder)
        runs[name if names.count(name) == 1 else path] = Run(history, config, environment)
    return runs


def tables(runs: Mapping[str, Run]) -> dict[str, Table]:
    """Builds the tables, by title, without empty ones: results, differences in configuration, and losses by step."""
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
        "Training loss, mean since the previous row": _at_steps(losses, ends),
    }
    for name in dict.fromkeys(name for history in histories for name in eval_sets(history.evals)):
        curves = [history.evals[eval_key("eval_loss", name)] for history in histories]
        result["Eval loss" + f", {name}" * bool(name)] = _at_evaluations(curves)
    return {title: [["", *runs], *rows] for title, rows in result.items() if rows}


def loss_note(runs: Mapping[str, Run]) -> str:
    """Explains, in sentences, why the runs' training or evaluation losses can't be compared; "" if they can."""
    settings = [_settings(run) for run in runs.values()]

    def differing(keys: Sequence[str]) -> str:
        return ", ".join(key for key in keys if len({each.get(key) for each in settings}) > 1)

    if differing(["loss"]):
        return (
            "These runs differ in loss: their losses and perplexities measure different things and can't be compared."
        )
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
            f"These runs differ in {keys}: their evaluations use different tokens, or different text before "
            "them. To compare models, evaluate each with the same keys: python -m src.evaluate RUN."
        )
    return as_installed(" ".join(notes))


def comparison_text(runs: Mapping[str, Run]) -> str:
    """Formats the tables of several runs as lines."""
    lines = []
    for title, rows in tables(runs).items():
        rows = list(zip(*rows, strict=True)) if len(runs) > _MAX_COLUMNS else rows
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [title, *("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows), ""]
    return "\n".join([*lines, *filter(None, [loss_note(runs)])])


def comparison_page(runs: Mapping[str, Run]) -> str:
    """Renders the page of several runs: results, differences in their configurations, and curves."""
    # Each run's column is headed by the color of its curves.
    head = "".join(f'<th><i data-run="{run}"></i>{html.escape(name)}</th>' for run, name in enumerate(runs))
    cards = [
        card(html.escape(title), f'<div class="runs">{table(rows, f"<tr><th></th>{head}</tr>")}</div>')
        for title, (_, *rows) in tables(runs).items()
    ]
    histories = {name: run.history for name, run in runs.items()}
    note = f'<p class="card">{html.escape(text)}</p>' if (text := loss_note(runs)) else ""
    units = {loss_unit(run.config) for run in runs.values()}
    unit = units.pop() if len(units) == 1 else ""
    return whole_page(
        histories, first_few(runs), counted(len(runs), "run"), "".join([note, *cards[:2]]), cards[2:], unit
    )


def _rows(columns: Sequence[Mapping[str, str]]) -> Table:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "-") for column in columns)] for name in names]


def _settings(run: Run) -> dict[str, str]:
    """Returns keys and environment entries; a key missing in an older version's config.yml has today's default."""
    keys = {name: key.default for name, key in KEYS.items()} | dict(run.config)
    # Blank, so that they are not listed under "What differs": they only name the place of a run.
    keys |= {"run_name": "", "base_output_directory": ""}
    environment = {name: str(run.environment[name]) for name in _ENVIRONMENT if name in run.environment}
    return {name: clipped(dump(value), 200) for name, value in keys.items()} | environment


def _at_steps(curves: Sequence[Curve], ends: Sequence[int]) -> Table:
    """Builds rows at round steps, with the mean of each curve since the previous row.

    `ends` are the runs' last steps. If a run ended before a row's step, its value is followed by its last step.
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
    """Builds rows with the curves' values at evaluations; if there are many, at some steps that all curves share."""
    columns = [{step: value for step, value in curve.points() if value is not None} for curve in curves]
    steps = sorted(set().union(*columns))
    if len(steps) > _MAX_ROWS:
        steps = [step for step in steps if all(step in column for column in columns if column)] or steps
    gap = -(-len(steps) // _MAX_ROWS) if steps else 1
    return [
        [f"step {step:,}", *(f"{column[step]:.4f}" if step in column else "-" for column in columns)]
        for step in steps[::-1][::gap][::-1]
    ]
