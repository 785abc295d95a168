"""Checks the keys of a configuration against each other.

Checks that depend on the devices or the data run once those are known.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from src.config import dataset_spec, model_checks
from src.config.command_keys import CALIBRATION_METHODS
from src.config.model_checks import FlatKeys, check_value
from src.config.optimizer_keys import OPTIMIZERS, check_schedule, reading
from src.config.schema import KEYS, LOGICAL_AXES, MESH_AXES, size_key
from src.config.step_keys import REMAT_ARRAYS
from src.config.yaml import dump
from src.system.errors import UserError, did_you_mean, first_few

# The setting that each type of data requires.
_NEEDED = {"tfds": "dataset_name", "custom": "dataset_factory"}
_NEEDED |= dict.fromkeys(("array_record", "parquet", "tokens", "hf"), "dataset_path")


def check_config(config: Mapping[str, Any], failed: set[str]) -> list[str]:
    """Checks every key of base.yml, all of the right types; returns problems as sentences that name the keys."""
    invalid = {key: problem for key in config if key not in failed and (problem := check_value(key, config[key]))}
    sound = FlatKeys({key: value for key, value in config.items() if key not in failed and key not in invalid})
    problems = list(invalid.values())
    checks = list(CHECKS)
    for name, keys in OPTIONAL.items():
        if any(sound.get(key) != KEYS[key].default for key in keys):
            module, _, function = name.partition(".")
            checks.append(getattr(importlib.import_module(f"src.config.{module}"), function))
    for check in checks:
        try:
            problems.extend(check(sound))
        except KeyError as error:  # the check reads a key in `failed`, which was already reported
            if error.args[0] not in config:
                raise
    return problems


def _remat(config: FlatKeys) -> Iterator[str]:
    if config.remat_policy == "custom" and not config.remat_custom:
        yield "remat_policy=custom needs remat_custom, such as remat_custom.out_proj=device"
    for array, place in config.remat_custom.items():
        if array not in REMAT_ARRAYS:
            yield f"remat_custom: no array {array}; there are {', '.join(REMAT_ARRAYS)}"
        if place not in ("device", "offload"):
            yield f"remat_custom.{array}={dump(place)} is neither device nor offload"


def _mesh(config: FlatKeys) -> Iterator[str]:
    if sorted(map(str, config.mesh_axes)) != sorted(MESH_AXES):
        yield f"mesh_axes={dump(config.mesh_axes)} must name {', '.join(MESH_AXES)}, in any order"
    for kind in ("ici", "dcn"):
        unset = [key for key in (size_key(kind, axis) for axis in MESH_AXES) if config[key] == -1]
        if len(unset) > 1:
            by_default = [key for key in unset if KEYS[key].default == -1]
            hint = f": -1 is the default of {by_default[0]}, so add {by_default[0]}=1" if by_default else ""
            yield f"only one {kind} size may be -1 (the rest), not {' and '.join(unset)}{hint}"


def _rules(config: FlatKeys) -> Iterator[str]:
    for name in config.logical_axis_rules:
        if name not in LOGICAL_AXES:
            hint = did_you_mean(name, LOGICAL_AXES) or f" It has {first_few(LOGICAL_AXES, near=name)}"
            yield f"logical_axis_rules has no {name}.{hint}"
    if missing := [name for name in LOGICAL_AXES if name not in config.logical_axis_rules]:
        yield (
            f"logical_axis_rules lacks {first_few(missing)}; to change only one rule, "
            f"write it with a dot: logical_axis_rules.{missing[0]}=[]"
        )
    for name, axes in config.logical_axis_rules.items():
        listed = axes if isinstance(axes, tuple | list) else [axes]
        unknown = [axis for axis in map(str, listed) if axis not in MESH_AXES]
        if listed is not axes or unknown or len(set(axes)) < len(axes):
            hint = did_you_mean(unknown[0], MESH_AXES) if unknown else ""
            yield f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or [].{hint}"


def _moments(config: FlatKeys) -> Iterator[str]:
    adapters_alone = config.lora_rank and not config.trainable_parameters  # which have float32 moments
    second = "float32" if adapters_alone else config.weight_dtype
    moments = {"adam_b1": config.mu_dtype or ("float32" if config.lora_rank else second), "adam_b2": second}
    types = {config.opt_type, *(rule.get("opt_type") for rule in config.optimizer_rules)}
    for name, dtype in moments.items() if types.intersection(reading(OPTIMIZERS, "adam_b1")) else ():
        if dtype == "bfloat16" and 0 < 1 - config[name] < 2**-8:  # half the relative gap between bfloat16 numbers
            yield (
                f"{name}={config[name]} needs a moment in float32: rounded to bfloat16 it would never decay. Set "
                f"{name} to 0.996 or less, or {'mu_dtype' if name == 'adam_b1' else 'weight_dtype'}=float32"
            )


def _tiles(config: FlatKeys) -> Iterator[str]:
    length, tiles = config.max_target_length, config.num_vocab_tiling
    if tiles and length % tiles:
        yield f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"


def _sources(config: FlatKeys) -> Iterator[str]:
    for spec in dataset_spec.all_specs(config):
        # The only source of a run may omit its path, and is then Python's own source; each of several needs one.
        needed = "dataset_path" if spec.name and spec.dataset_type == "text" else _NEEDED.get(spec.dataset_type)
        if needed and not getattr(spec, needed):
            yield f"dataset_type={spec.dataset_type} needs {spec.key(needed)}"
    try:
        dataset_spec.whole_numbers(dataset_spec.train_weights(config))
    except UserError as error:
        yield str(error)


def _tokenizer(config: FlatKeys) -> Iterator[str]:
    kind, path = config.tokenizer_type, config.tokenizer_path
    if dataset_spec.all_synthetic(config):
        return
    files = {"sentencepiece": "a .model file", "huggingface": "a model's folder or a tokenizer.json"}
    if kind != "byte" and not path:
        yield f"tokenizer_type={kind} needs tokenizer_path, {files[kind]}"
    if kind == "byte" and path:
        others = " or ".join(f"tokenizer_type={other} ({of})" for other, of in files.items())
        yield f"tokenizer_path={path} is not read with tokenizer_type=byte; set {others}"


def _evaluation(config: FlatKeys) -> Iterator[str]:
    steps = [entry.get("eval_steps", config.eval_steps) for entry in config.eval_datasets]
    if config.eval_mode == "rolling" and -1 in (steps or [config.eval_steps]):
        yield (
            "eval_mode=rolling continues where the last evaluation ended, but eval_steps=-1 (one epoch) restarts each "
            "time: set eval_steps to a number of batches, or eval_mode=reset"
        )
    if config.eval_interval == -1 or dataset_spec.names_eval_data(config):
        return
    if config.datasets:
        yield "eval_interval needs data to evaluate on, because nothing is held out of datasets: set eval_datasets"
    elif config.eval_fraction == 0:
        yield "eval_interval needs data to evaluate on: set eval_dataset_path or an eval_fraction above 0"


def _processes(config: FlatKeys) -> Iterator[str]:
    address, count, process = config.coordinator_address, config.num_processes, config.process_id
    host, _, port = address.rpartition(":")
    if len({bool(address), count != -1, process != -1}) > 1:
        yield "coordinator_address, num_processes and process_id go together: give all three or none"
    elif address and process >= count:
        yield f"process_id={process} must be less than num_processes={count}"
    elif address and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
        yield f"coordinator_address={address} must be HOST:PORT, with a port from 1 to 65535, such as 10.0.0.1:1234"


def _accepted(config: FlatKeys) -> Iterator[str]:
    for name in map(str, config.accept_changes):
        if name not in (known := (*KEYS, "data_rules")):
            yield f"accept_changes names {name}, which is not a key.{did_you_mean(name, known)}"


CHECKS = (
    *model_checks.CHECKS,
    *(_remat, _mesh, _rules, check_schedule, _moments, _tiles),
    *(_sources, _tokenizer, _evaluation, _processes, _accepted),
)
# Functions by module; each is skipped while all of its keys are at their defaults.
OPTIONAL = {
    "segments.check_segments": ("decoder_segments",),
    "optional_checks.mup": ("mup_base_emb_dim",),
    "optional_checks.profile": ("profiler", "pgle"),
    "optional_checks.ramp": ("enable_rampup_batch_size",),
    "optional_checks.finetuning": ("use_sft",),
    "optional_checks.scoring": ("texts_path", "scores_path", "tokens_path", "logits_path", "tasks", "include_path"),
    "optional_checks.decoding": (
        *("decode_sampling_strategy", "interactive", "decode_path", "decode_prompt_tokens"),
        "max_prefill_predict_length",
    ),
    "optional_checks.loading": ("load_parameters_path", "load_full_state_path", "load_weights_rules", "lora_rank"),
    "optional_checks.quantization": ("quantization", *CALIBRATION_METHODS),
}
