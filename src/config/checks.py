"""Checks the keys of a configuration, each one and against each other.

Checks that depend on the devices or the data are elsewhere, and run once those are known.
"""

import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from src.config import dataset_spec, model_checks
from src.config.command_keys import CALIBRATION_METHODS
from src.config.model_checks import check_value
from src.config.optimizer_keys import OPTIMIZERS, check_schedule, reading
from src.config.schema import KEYS, LOGICAL_AXES, MESH_AXES, Config, size_key
from src.config.step_keys import REMAT_ARRAYS
from src.config.yaml import dump
from src.system.errors import UserError, did_you_mean, first_few

# The setting that a dataset_type requires; `_sources` adds one for text.
_NEEDED = {"tfds": "dataset_name", "custom": "dataset_factory"}
_NEEDED |= dict.fromkeys(("array_record", "parquet", "tokens", "hf"), "dataset_path")


def check_config(config: Mapping[str, Any], failed: set[str], unread: Collection[str] = ()) -> list[str]:
    """Checks each key's value, and values against each other; returns problems as sentences that name the keys.

    `config` has a value for every key, of its type except for the keys in `failed`. Those are not checked, because
    their problems are already reported. The keys in `unread`, which the command does not read, are checked only by
    themselves.
    """
    invalid = {key: problem for key in config if key not in failed and (problem := check_value(key, config[key]))}
    unsound = {*failed, *invalid}
    sound = Config.of({key: value for key, value in config.items() if key not in {*unsound, *unread}})
    for key in unsound:  # a check that reads one raises AttributeError, caught below: its problem is reported already
        object.__delattr__(getattr(sound, KEYS[key].section), key)
    problems = list(invalid.values())
    checks: list[tuple[Callable, Any]] = [(check, sound.model) for check in model_checks.LAYER_CHECKS]
    checks += [(check, sound) for check in CHECKS]
    for name, keys in OPTIONAL.items():
        if any(key in unsound or sound[key] != KEYS[key].default for key in keys):
            checks.append((getattr(importlib.import_module("src.config.optional_checks"), name), sound))
    for check, part in checks:
        try:
            problems.extend(check(part))
        except AttributeError as error:
            if error.name not in unsound:
                raise
    return problems


def _segments(config: Config) -> Iterator[str]:
    if config.model.decoder_segments:
        from src.config.segments import check_segments

        yield from check_segments(config.model)


def _remat(config: Config) -> Iterator[str]:
    step = config.step
    if step.remat_policy == "custom" and not step.remat_custom:
        yield "remat_policy=custom needs remat_custom, such as remat_custom.out_proj=device"
    for array, place in step.remat_custom.items():
        if array not in REMAT_ARRAYS:
            yield f"remat_custom: no array {array}; there are {', '.join(REMAT_ARRAYS)}"
        if place not in ("device", "offload"):
            yield f"remat_custom.{array}={dump(place)} is neither device nor offload"


def _mesh(config: Config) -> Iterator[str]:
    if sorted(map(str, config.mesh.mesh_axes)) != sorted(MESH_AXES):
        yield f"mesh_axes={dump(config.mesh.mesh_axes)} must name {', '.join(MESH_AXES)}, in any order"
    for kind in ("ici", "dcn"):
        unset = [key for key in (size_key(kind, axis) for axis in MESH_AXES) if config[key] == -1]
        if len(unset) > 1:
            by_default = [key for key in unset if KEYS[key].default == -1]
            hint = f": -1 is the default of {by_default[0]}, so add {by_default[0]}=1" if by_default else ""
            yield f"only one {kind} size may be -1 (the rest), not {' and '.join(unset)}{hint}"


def _rules(config: Config) -> Iterator[str]:
    rules = config.mesh.logical_axis_rules
    for name in rules:
        if name not in LOGICAL_AXES:
            hint = did_you_mean(name, LOGICAL_AXES) or f" It has {first_few(LOGICAL_AXES, near=name)}"
            yield f"logical_axis_rules has no {name}.{hint}"
    if missing := [name for name in LOGICAL_AXES if name not in rules]:
        yield (
            f"logical_axis_rules lacks {first_few(missing)}; to change only one rule, "
            f"write it with a dot: logical_axis_rules.{missing[0]}=[]"
        )
    for name, axes in rules.items():
        listed = axes if isinstance(axes, tuple | list) else [axes]
        unknown = [axis for axis in map(str, listed) if axis not in MESH_AXES]
        if listed is not axes or unknown or len(set(axes)) < len(axes):
            hint = did_you_mean(unknown[0], MESH_AXES) if unknown else ""
            yield f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or [].{hint}"


def _moments(config: Config) -> Iterator[str]:
    step = config.step
    adapters_alone = step.lora_rank and not step.trainable_parameters
    second = "float32" if adapters_alone else step.weight_dtype  # adapters have float32 second moments
    moments = {"adam_b1": step.mu_dtype or ("float32" if step.lora_rank else second), "adam_b2": second}
    types = {step.opt_type, *(rule.get("opt_type") for rule in step.optimizer_rules)}
    for name, dtype in moments.items() if types.intersection(reading(OPTIMIZERS, "adam_b1")) else ():
        beta = getattr(step, name)
        if dtype == "bfloat16" and 0 < 1 - beta < 2**-8:  # half the relative gap between bfloat16 numbers
            yield (
                f"{name}={beta} needs a moment in float32: rounded to bfloat16 it would never decay. "
                f"Set {name} to 0.996 or less, or {'mu_dtype' if name == 'adam_b1' else 'weight_dtype'}=float32"
            )


def _tiles(config: Config) -> Iterator[str]:
    length, tiles = config.batch.max_target_length, config.step.num_vocab_tiling
    if tiles and length % tiles:
        yield f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"


def _sources(config: Config) -> Iterator[str]:
    for spec in dataset_spec.all_specs(config.data):
        # Without a path, top-level keys mean Python's own source; an entry of `datasets` or `eval_datasets` needs one.
        needed = "dataset_path" if spec.name and spec.dataset_type == "text" else _NEEDED.get(spec.dataset_type)
        if needed and not getattr(spec, needed):
            yield f"dataset_type={spec.dataset_type} needs {spec.key(needed)}"
    try:
        dataset_spec.whole_numbers(dataset_spec.train_weights(config.data))
    except UserError as error:
        yield str(error)


def _tokenizer(config: Config) -> Iterator[str]:
    kind, path = config.data.tokenizer_type, config.data.tokenizer_path
    if dataset_spec.all_synthetic(config.data):
        return
    files = {"sentencepiece": "a .model file", "huggingface": "a model's folder or a tokenizer.json"}
    if kind != "byte" and not path:
        yield f"tokenizer_type={kind} needs tokenizer_path, {files[kind]}"
    if kind == "byte" and path:
        others = " or ".join(f"tokenizer_type={other} ({of})" for other, of in files.items())
        yield f"tokenizer_path={path} is not read with tokenizer_type=byte; set {others}"


def _evaluation(config: Config) -> Iterator[str]:
    data, evaluation = config.data, config.evaluation
    steps = [entry.get("eval_steps", evaluation.eval_steps) for entry in data.eval_datasets]
    if evaluation.eval_mode == "rolling" and -1 in (steps or [evaluation.eval_steps]):
        yield (
            "eval_mode=rolling continues where the last evaluation ended, but eval_steps=-1 (one epoch) restarts each "
            "time: set eval_steps to a number of batches, or eval_mode=reset"
        )
    if evaluation.eval_interval == -1 or dataset_spec.names_eval_data(data):
        return
    if data.datasets:
        yield "eval_interval needs data to evaluate on, because nothing is held out of datasets: set eval_datasets"
    elif data.eval_fraction == 0:
        yield "eval_interval needs data to evaluate on: set eval_dataset_path or an eval_fraction above 0"


def _processes(config: Config) -> Iterator[str]:
    mesh = config.mesh
    address, count, process = mesh.coordinator_address, mesh.num_processes, mesh.process_id
    host, _, port = address.rpartition(":")
    if len({bool(address), count != -1, process != -1}) > 1:
        yield "coordinator_address, num_processes and process_id go together: give all three or none"
    elif address and process >= count:
        yield f"process_id={process} must be less than num_processes={count}"
    elif address and not (host and re.fullmatch(r"\d{1,5}", port) and 1 <= int(port) <= 65535):
        yield f"coordinator_address={address} must be HOST:PORT, with a port from 1 to 65535, such as 10.0.0.1:1234"


def _accepted(config: Config) -> Iterator[str]:
    for name in map(str, config.run.accept_changes):
        if name not in (known := (*KEYS, "data_rules")):
            yield f"accept_changes names {name}, which is not a key.{did_you_mean(name, known)}"


CHECKS = (
    *(model_checks.check_positions, _segments, _remat, _mesh, _rules, check_schedule, _moments, _tiles),
    *(_sources, _tokenizer, _evaluation, _processes, _accepted),
)
# Functions of optional_checks.py; each runs if one of its keys is invalid or not at its default.
OPTIONAL = {
    "mup": ("mup_base_emb_dim",),
    "profile": ("profiler", "pgle"),
    "ramp": ("enable_rampup_batch_size",),
    "finetuning": ("use_sft",),
    "scoring": ("texts_path", "scores_path", "tokens_path", "logits_path", "tasks", "include_path"),
    "decoding": (
        *("decode_sampling_strategy", "interactive", "decode_path", "decode_prompt_tokens"),
        "max_prefill_predict_length",
    ),
    "loading": ("load_parameters_path", "load_full_state_path", "load_weights_rules", "lora_rank"),
    "quantization": ("quantization", *CALIBRATION_METHODS),
}
