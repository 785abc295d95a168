"""Checks what the keys of a configuration demand of each other.

What depends on the devices or the data is checked where those are known.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from src.config import data_checks, model_checks
from src.config.schema import KEYS, LOGICAL_AXES, MESH_AXES, size_key
from src.config.step_keys import REMAT_ARRAYS
from src.config.values import Keys, check_value
from src.config.yaml import dump
from src.errors import did_you_mean, first_few


def check_config(config: Mapping[str, Any], failed: set[str]) -> list[str]:
    """Returns what is wrong with every key of base.yml, of its right type: sentences that name the keys to change.

    What depends on a key in `failed`, which was already reported, is not judged.
    """
    invalid = {key: problem for key in config if key not in failed and (problem := check_value(key, config[key]))}
    sound = Keys({key: value for key, value in config.items() if key not in failed and key not in invalid})
    problems = list(invalid.values())
    for check in CHECKS:
        try:
            problems.extend(list(check(sound)))
        except KeyError as error:
            if error.args[0] not in config:
                raise
    return problems


def _remat(config: Keys) -> Iterator[str]:
    if config.remat_policy != "custom":
        if config.remat_custom:
            yield f"remat_custom needs remat_policy=custom, not {config.remat_policy} (or remat_custom={{}})"
        return
    if not config.remat_custom:
        yield "remat_policy=custom needs remat_custom, such as remat_custom.out_proj=device"
    for array, place in config.remat_custom.items():
        if array not in REMAT_ARRAYS:
            yield f"remat_custom: no array {array}; there are {', '.join(REMAT_ARRAYS)}"
        if place not in ("device", "offload"):
            yield f"remat_custom.{array}={dump(place)} is neither device nor offload"


def _mesh(config: Keys) -> Iterator[str]:
    if sorted(map(str, config.mesh_axes)) != sorted(MESH_AXES):
        yield f"mesh_axes={dump(config.mesh_axes)} must name {', '.join(MESH_AXES)}, in any order"
    for kind in ("ici", "dcn"):
        unset = [key for key in (size_key(kind, axis) for axis in MESH_AXES) if config[key] == -1]
        if len(unset) > 1:
            by_default = [key for key in unset if KEYS[key].default == -1]
            hint = f": -1 is the default of {by_default[0]}, so add {by_default[0]}=1" if by_default else ""
            yield f"only one {kind} size may be -1 (what is left), not {' and '.join(unset)}{hint}"


def _rules(config: Keys) -> Iterator[str]:
    for name in config.logical_axis_rules:
        if name not in LOGICAL_AXES:
            hint = did_you_mean(name, LOGICAL_AXES) or f" It has {first_few(LOGICAL_AXES, near=name)}"
            yield f"logical_axis_rules has no {name}.{hint}"
    if missing := [name for name in LOGICAL_AXES if name not in config.logical_axis_rules]:
        yield (
            f"logical_axis_rules lacks {first_few(missing)}; to change one rule alone, "
            f"write it with a dot: logical_axis_rules.{missing[0]}=[]"
        )
    for name, axes in config.logical_axis_rules.items():
        if not isinstance(axes, tuple | list) or set(map(str, axes)) - set(MESH_AXES) or len(set(axes)) < len(axes):
            yield f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or []"


def _schedule(config: Keys) -> Iterator[str]:
    if config.steps == -1 and config.learning_rate_schedule_steps == -1:
        yield "steps=-1 takes its value from learning_rate_schedule_steps, which is -1 too: set one of them"
    warmup, decay = config.warmup_steps_fraction, config.wsd_decay_steps_fraction
    if config.lr_schedule_type == "wsd" and warmup + decay > 1:
        yield f"warmup_steps_fraction={warmup} and wsd_decay_steps_fraction={decay} leave no room: their sum exceeds 1"


def _profile(config: Keys) -> Iterator[str]:
    skipped, profiled, steps = config.skip_first_n_steps_for_profiler, config.profiler_steps, config.steps
    if config.profiler and -1 != steps < skipped + profiled:
        yield (
            f"profiler={config.profiler} would be of steps {skipped + 1} to {skipped + profiled}, and steps={steps}: "
            "set skip_first_n_steps_for_profiler and profiler_steps to fewer"
        )


def _tiles(config: Keys) -> Iterator[str]:
    length, tiles = config.max_target_length, config.num_vocab_tiling
    if length % tiles:
        yield f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"


def _scoring(config: Keys) -> Iterator[str]:
    for source, target in (("texts_path", "scores_path"), ("tokens_path", "logits_path")):
        if bool(config[source]) != bool(config[target]):
            yield f"{source} and {target} go together: give both or none"
        elif config[source] and _same_file(*map(os.path.expanduser, (config[source], config[target]))):
            yield f"{target}={config[target]} is the file that {source} names: it would be written over"


def _same_file(a: str, b: str) -> bool:
    exist = os.path.exists(a) and os.path.exists(b)
    return os.path.realpath(a) == os.path.realpath(b) or (exist and os.path.samefile(a, b))


def _decoding(config: Keys) -> Iterator[str]:
    strategy = config.decode_sampling_strategy
    limits = {"decode_sampling_top_k": ("topk", "composite"), "decode_sampling_nucleus_p": ("nucleus", "composite")}
    for key, strategies in limits.items():
        is_set = config[key] != KEYS[key].default
        if strategy in strategies and not is_set:
            yield f"decode_sampling_strategy={strategy} needs {key}"
        if strategy not in strategies and is_set:
            yield f"{key}={config[key]} needs decode_sampling_strategy={' or '.join(strategies)}"
    if config.interactive and config.prompt_path:
        yield "interactive and prompt_path exclude each other: prompts are typed, or read from a file"
    prefill, length = config.max_prefill_predict_length, config.max_target_length
    if prefill >= length:
        yield f"max_prefill_predict_length={prefill} leaves no room in max_target_length={length}, prompt and all"


def _loading(config: Keys) -> Iterator[str]:
    if config.load_parameters_path and config.load_full_state_path:
        yield "load_parameters_path and load_full_state_path exclude each other: weights alone, or the whole state"


def _adapters(config: Keys) -> Iterator[str]:
    if config.lora_rank and not config.lora_parameters:
        yield "lora_rank needs lora_parameters, such as [attention.query, attention.value]"
    if config.lora_rank and not config.load_parameters_path:
        yield "lora_rank needs load_parameters_path: the weights that its adapters add to"


def _processes(config: Keys) -> Iterator[str]:
    address, count, process = config.coordinator_address, config.num_processes, config.process_id
    host, _, port = address.rpartition(":")
    if len({bool(address), count != -1, process != -1}) > 1:
        yield "coordinator_address, num_processes and process_id go together: give all three or none"
    elif address and process >= count:
        yield f"process_id={process} must be less than num_processes={count}"
    elif address and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
        yield f"coordinator_address={address} must be HOST:PORT, with a port from 1 to 65535, such as 10.0.0.1:1234"


def _accepted(config: Keys) -> Iterator[str]:
    for name in map(str, config.accept_changes):
        if name not in KEYS:
            yield f"accept_changes names {name}, which is no key.{did_you_mean(name, KEYS)}"


CHECKS = (
    *model_checks.CHECKS,
    *(_remat, _mesh, _rules, _schedule, _profile, _tiles),
    *data_checks.CHECKS,
    *(_scoring, _decoding, _loading, _adapters, _processes, _accepted),
)
