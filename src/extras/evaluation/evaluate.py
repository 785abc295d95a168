"""Measures the loss on held-out data (`python -m src.evaluate CONFIG.yml ...`), scores texts, computes logits."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from src import installing
from src.checkpoint.restore import find_steps
from src.checkpoint.run_rules import run_rules
from src.config import schema
from src.config.dataset_spec import DatasetSpec, eval_specs, names_eval_data, train_specs
from src.config.load import from_yaml
from src.config.run_configs import CONFIG, HUB, run_folder
from src.config.usage import Usage
from src.config.yaml import dump, file_name
from src.data.open import open_eval_sets
from src.data.readers.find_files import list_files
from src.data.tokenizer import make_tokenizer
from src.data.types import EvalSet, InputSpec, TrainData, missing_template
from src.extras.command_files import check_outputs, write_output
from src.extras.evaluation.answers import Answers
from src.extras.evaluation.scoring import TextBytes, score_texts, write_logits
from src.extras.generation.loaded_model import load_model
from src.run.evaluator import Evaluator, means
from src.run.metrics import eval_key
from src.run.run_setup import configured
from src.run.summary import describe_data
from src.step.eval_step import compile_eval_step
from src.system.errors import TransientError, UserError, say

USAGE = Usage(
    """Measures a model's loss or its task scores, scores texts, computes logits.

python -m src.evaluate RUN [key=value ...]
python -m src.evaluate CONFIG load_parameters_path=PATH eval_dataset_path=TEXTS [key=value ...]
python -m src.evaluate RUN tasks=NAME,NAME [limit=N] [num_fewshot=N] [include_path=FOLDER] [use_chat_template=true]
python -m src.evaluate CONFIG load_parameters_path=PATH texts_path=IN.txt scores_path=OUT.jsonl
python -m src.evaluate CONFIG load_parameters_path=PATH tokens_path=IN.npy logits_path=OUT.npy""",
    ("Evaluation",),
)


def _check_held_out(run: Any, config: schema.Config) -> None:
    """Raises UserError if the run in the folder `run` may have trained on the part of the data held out here."""
    keys = from_yaml((run / CONFIG).read_text())
    of_run = schema.Config.of({key: value for key, value in keys.items() if key in schema.KEYS})
    data, trained, interval = config.data, of_run.data, of_run.evaluation.eval_interval
    (place, *_), places = _places(train_specs(data)), _places(train_specs(trained))
    same = [_overlap(place, each) for each in places]
    if names_eval_data(data) or not any(same):
        return
    if interval == -1 or names_eval_data(trained) or not same[0]:  # runs hold out a part of their first dataset only
        named = "its own evaluation data are named" if names_eval_data(trained) else "except from its first dataset"
        why = "eval_interval=-1" if interval == -1 else named
        raise UserError(
            f"{run} held nothing out ({why}) and trained on these data, or on some of their files: name others to "
            "evaluate on by eval_dataset_path=FILES or dataset_path=FILES"
        )
    if place[3] != places[0][3]:
        raise UserError(
            f"{run} trained on some of these examples: train_split={place[3]} would hold out another part of them than "
            f"train_split={places[0][3]}. Use that, or name others by eval_dataset_name=NAME eval_split=SPLIT"
        )
    if place != places[0] and _listing(place[1]) != _listing(places[0][1]):
        raise UserError(
            f"{run} trained on some of these files: dataset_path={data.dataset_path} would hold out another part of "
            f"them than dataset_path={trained.dataset_path}. Use that, or name others by eval_dataset_path=FILES"
        )
    # The last rows of a folder of tokens are held out, and the last pieces of a single text.
    cut_by = {
        "tokens": ("packing", "max_target_length"),
        "text": ("max_document_bytes",) * (len(_listing(place[1])) == 1),
    }
    for key in ("eval_fraction", *cut_by.get(place[0], ())):
        if config[key] != of_run[key]:
            raise UserError(
                f"{run} held out a part of its data by {key}={dump(of_run[key])}: {key}={dump(config[key])} would "
                "select other data, which it may have trained on"
            )


def _places(specs: Sequence[DatasetSpec]) -> list[tuple[str, ...]]:
    """Identifies the documents of each dataset, however they are cut: by type, path, name, split and factory."""
    paths = [spec.dataset_path for spec in specs]
    full = [
        path.rstrip("/") if not path or "://" in path else os.path.realpath(os.path.expanduser(path)) for path in paths
    ]
    return [
        (spec.dataset_type, path, spec.dataset_name, spec.split, spec.dataset_factory)
        for spec, path in zip(specs, full, strict=True)
    ]


def _overlap(place: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two of `_places` have documents in common: by their paths, or else by the local files that they name."""
    kind, path, name, split, factory = place
    other_kind, other_path, other_name, other_split, other_factory = other
    if (kind, name, factory) != (other_kind, other_name, other_factory):
        return False
    if kind == "tfds":  # train[:10%]+test has a part of train, and all has both
        splits, others = ({part.partition("[")[0] for part in each.split("+")} for each in (split, other_split))
        if not splits & others and "all" not in splits | others:
            return False
    elif split != other_split:
        return False
    return path == other_path or bool({*_listing(path).values()} & {*_listing(other_path).values()})


def _listing(path: str) -> dict[str, str]:
    """Maps the names of a dataset's local files, by which a part is held out, to full paths with links resolved.

    Returns {} for a path on a store, or one that can't be read.
    """
    if not path or "://" in path:
        return {}
    with contextlib.suppress(UserError, TransientError):
        found = list_files(path, "dataset_path")
        return dict(zip(found.sizes, map(os.path.realpath, found.paths), strict=True))
    return {}


def _run_of(weights: str) -> Any:
    """Finds the folder of the run that `load_parameters_path` names, perhaps by a checkpoint in it; None for others."""
    if not weights or weights.startswith(HUB):
        return None
    try:
        checkpoints, _ = find_steps(file_name(weights))
    except UserError:  # a Hugging Face folder, or none that `load_model` accepts
        return None
    folder = str(checkpoints)
    return run_folder(os.path.dirname(folder if "://" in folder else os.path.realpath(folder)))


def main(argv: Sequence[str] | ConfigDict) -> dict[str, float] | None:
    """Runs the command line `argv`, or a resolved config: prints results, and writes the files that its keys name.

    Returns the metrics of an evaluation or of tasks; None for scores of texts, logits, and --help. Raises UserError for
    a mistake in the command, the data or the weights; TransientError as `configured` and `load_model` do.
    """
    config = configured(argv, USAGE, uses_weights=True)
    if config is None:
        return None
    if config.harness.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"tasks needs lm-evaluation-harness, which is not installed: {installing('eval')}")
    scores = config.evaluation.texts_path or config.evaluation.tokens_path or config.harness.tasks
    run = run_folder(file_name(argv[0])) if not isinstance(argv, ConfigDict) else None
    if jax.process_index() == 0:  # fail before an evaluation, not after it
        outputs = {key: config[key] for key in ("results_path", "scores_path", "logits_path") if config[key]}
        check_outputs(outputs)
        for path in outputs.values():
            Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
    if not scores:
        for trained in filter(None, (run, _run_of(config.checkpoint.load_parameters_path))):
            _check_held_out(trained, config)
    needed_by = "tasks" if config.harness.tasks else "texts_path" * bool(config.evaluation.texts_path)
    tokenizer = make_tokenizer(config.data, config.model.vocab_size, needed_by)
    if config.harness.tasks:
        from src.extras.evaluation.tasks import find_tasks, run_tasks  # only tasks need the harness installed

        assert tokenizer
        if config.decoding.use_chat_template and tokenizer.chat_template is None:
            raise missing_template()
        tasks = find_tasks(config.harness)  # reports a mistake in them before reading the weights
        sections = config.evaluation, config.batch, config.decoding
        answers = Answers(*sections, *load_model(config, tokenizer), tokenizer)
        model_args = {name: config[name] for name in ("load_parameters_path", "max_target_length", "dtype")}
        results, lines = run_tasks(
            tasks, config.decoding.use_chat_template, answers, {"model": "mintext", "model_args": model_args}
        )
        say(lines)
        write_results(config.evaluation.results_path, results)
        numbers = {f"{task}/{name}": x for task, each in results["results"].items() for name, x in each.items()}
        return {name: x for name, x in numbers.items() if type(x) in (int, float)}
    plan, weights = load_model(config, tokenizer)
    if scores:
        sections = config.evaluation, config.batch, plan, weights
        if config.evaluation.texts_path:
            say([f"{score_texts(*sections, tokenizer)} texts scored: {config.evaluation.scores_path}"])
        if config.evaluation.tokens_path:
            say([f"logits of shape {list(write_logits(*sections))}: {config.evaluation.logits_path}"])
        return None
    text, inputs = None, InputSpec.of(config, tokenizer, run_rules(config.run, config.checkpoint))
    if config.data.use_sft or config.batch.batch_transform:
        say(["eval_bits_per_byte is left out: with use_sft or batch_transform, the loss does not cover the whole text"])
    elif tokenizer:
        text = TextBytes(tokenizer)
        row = jax.ShapeDtypeStruct((config.batch.max_target_length,), np.int32)
        plan, inputs = dataclasses.replace(plan, fields={"text_bytes": row}), inputs._replace(count_bytes=text.document)
    step, metrics, counted = compile_eval_step(plan), {}, {}
    specs = {spec.name: spec for spec in (eval_specs if names_eval_data(config.data) else train_specs)(config.data)}
    # Each set is evaluated only once, so eval_mode=rolling has nothing to continue.
    once = dataclasses.replace(config.evaluation, eval_mode="reset")
    for data in open_eval_sets(inputs, config.evaluation):
        say([f"evaluating on {_described(specs[data.name], data)}"])
        evaluator = Evaluator(once, inputs, plan, step, data)
        (sums,) = evaluator.sums(weights)
        set_metrics = {eval_key(metric, data.name): value for metric, value in means(sums).items()}
        say(f"{metric} {value:.5f}" for metric, value in set_metrics.items())
        if data.steps != -1 and (epochs := evaluator.batches.epochs()) > 1.05:
            of = f" of {data.name}" if data.name else ""
            say([f"eval_steps={data.steps}: the data{of} was read {epochs:.1f} times (eval_steps=-1: once)"])
        tokens = round(sum(float(batch["tokens"]) for batch in sums))
        counts = {"eval_tokens": tokens, "eval_batches": len(sums)}
        if eval_key("eval_bits_per_byte", data.name) in set_metrics:
            counts["eval_text_bytes"] = sum(int(batch["text_bytes"]) for batch in sums)
        counts = {eval_key(name, data.name): count for name, count in counts.items()}
        say(f"{name} {count}" for name, count in counts.items())
        metrics, counted = metrics | set_metrics, counted | counts
    say(text.notes() if text else [])
    numbers = (metrics | counted).items()
    results = {name: value if math.isfinite(value) else None for name, value in numbers}
    write_results(config.evaluation.results_path, results)
    return metrics


def _described(spec: DatasetSpec, data: EvalSet) -> str:
    """Describes evaluation data: their name, type, place and size, and the part that is held out."""
    unnamed = dataclasses.replace(spec, name="")
    (line,) = describe_data([unnamed], TrainData(("",), (data.source,), (1.0,)))
    part = getattr(data.source, "part", "")  # not from its fingerprint, which reads files
    return f"{data.name}: " * bool(data.name) + line + f" ({part})" * bool(part)


def write_results(path: str, results: Mapping[str, Any]) -> None:
    """Writes results as JSON on process 0, unless `path` is empty; raises UserError if that fails."""
    if path and jax.process_index() == 0:
        write_output("results_path", path, (json.dumps(results, indent=2) + "\n").encode())
