"""Checks what the keys of a configuration demand of each other.

What depends on the devices or the data is checked where those are known.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from src.config import data_checks, model_checks
from src.config.schema import KEYS, LOGICAL_AXES, MESH_AXES, size_key
from src.config.step_keys import REMAT_ARRAYS
from src.config.values import check_value
from src.config.yaml import dump
from src.errors import did_you_mean, first_few


class Sound(dict[str, Any]):
    """Flat keys without those that are wrong by themselves; a check that reads one of those raises KeyError."""

    __getattr__ = dict.__getitem__


def check_config(config: Mapping[str, Any], failed: set[str]) -> list[str]:
    """Returns what is wrong with the whole: each problem a sentence that names the keys to change.

    Args:
        config: every key of base.yml, of its right type.
        failed: keys that were already reported; what depends on one of them is not judged.
    """
    invalid = {key: problem for key in config if key not in failed and (problem := check_value(key, config[key]))}
    sound = Sound({key: value for key, value in config.items() if key not in failed and key not in invalid})
    problems = list(invalid.values())
    for check in CHECKS:
        try:
            problems.extend(check(sound))
        except KeyError as error:
            if error.args[0] not in config:
                raise
    return problems


def _remat(config: Mapping[str, Any]) -> list[str]:
    policy, custom = config["remat_policy"], config["remat_custom"]
    if policy != "custom":
        return [f"remat_custom needs remat_policy=custom, not {policy} (or remat_custom={{}})"] if custom else []
    problems = [] if custom else ["remat_policy=custom needs remat_custom, such as remat_custom.out_proj=device"]
    for array, place in custom.items():
        if array not in REMAT_ARRAYS:
            problems.append(f"remat_custom: no array {array}; there are {', '.join(REMAT_ARRAYS)}")
        if place not in ("device", "offload"):
            problems.append(f"remat_custom.{array}={dump(place)} is neither device nor offload")
    return problems


def _mesh(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if sorted(map(str, config["mesh_axes"])) != sorted(MESH_AXES):
        problems.append(f"mesh_axes={dump(config['mesh_axes'])} must name {', '.join(MESH_AXES)}, in any order")
    for kind in ("ici", "dcn"):
        open_keys = [key for key in (size_key(kind, axis) for axis in MESH_AXES) if config[key] == -1]
        if len(open_keys) > 1:
            by_default = [key for key in open_keys if KEYS[key].default == -1]
            hint = f": -1 is the default of {by_default[0]}, so add {by_default[0]}=1" if by_default else ""
            problems.append(f"only one {kind} size may be -1 (what is left), not {' and '.join(open_keys)}{hint}")
    return problems


def _rules(config: Mapping[str, Any]) -> list[str]:
    problems, rules = [], config["logical_axis_rules"]
    for name in rules:
        if name not in LOGICAL_AXES:
            hint = did_you_mean(name, LOGICAL_AXES) or f" It has {first_few(LOGICAL_AXES, near=name)}"
            problems.append(f"logical_axis_rules has no {name}.{hint}")
    if missing := [name for name in LOGICAL_AXES if name not in rules]:
        problems.append(
            f"logical_axis_rules lacks {first_few(missing)}; to change one rule alone, "
            f"write it with a dot: logical_axis_rules.{missing[0]}=[]"
        )
    for name, axes in rules.items():
        if not isinstance(axes, tuple | list) or set(map(str, axes)) - set(MESH_AXES) or len(set(axes)) < len(axes):
            problems.append(f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or []")
    return problems


def _schedule(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config["steps"] == -1 and config["learning_rate_schedule_steps"] == -1:
        problems.append("steps=-1 takes its value from learning_rate_schedule_steps, which is -1 too: set one of them")
    warmup, decay = config["warmup_steps_fraction"], config["wsd_decay_steps_fraction"]
    if config["lr_schedule_type"] == "wsd" and warmup + decay > 1:
        problems.append(
            f"warmup_steps_fraction={warmup} and wsd_decay_steps_fraction={decay} leave no room: their sum exceeds 1"
        )
    return problems


def _tiles(config: Mapping[str, Any]) -> list[str]:
    length, tiles = config["max_target_length"], config["num_vocab_tiling"]
    return [f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"] if length % tiles else []


def _scoring(config: Mapping[str, Any]) -> list[str]:
    pairs = (("texts_path", "scores_path"), ("tokens_path", "logits_path"))
    problems = [f"{a} and {b} go together: give both or none" for a, b in pairs if bool(config[a]) != bool(config[b])]
    return problems + [
        f"{b}={config[b]} is the file that {a} names: it would be written over"
        for a, b in pairs
        if config[a] and config[b] and _same_file(config[a], config[b])
    ]


def _same_file(a: str, b: str) -> bool:
    a, b = os.path.expanduser(a), os.path.expanduser(b)
    return os.path.realpath(a) == os.path.realpath(b) or (
        os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)
    )


def _decoding(config: Mapping[str, Any]) -> list[str]:
    problems = []
    strategy = config["decode_sampling_strategy"]
    for key, strategies in (
        ("decode_sampling_top_k", ("topk", "composite")),
        ("decode_sampling_nucleus_p", ("nucleus", "composite")),
    ):
        is_set = config[key] != KEYS[key].default
        if strategy in strategies and not is_set:
            problems.append(f"decode_sampling_strategy={strategy} needs {key}")
        if strategy not in strategies and is_set:
            problems.append(f"{key}={config[key]} needs decode_sampling_strategy={' or '.join(strategies)}")
    if config["interactive"] and config["prompt_path"]:
        problems.append("interactive and prompt_path exclude each other: prompts are typed, or read from a file")
    prefill, length = config["max_prefill_predict_length"], config["max_target_length"]
    if prefill >= length:
        problems.append(
            f"max_prefill_predict_length={prefill} leaves no room in max_target_length={length}, prompt and all"
        )
    return problems


def _loading(config: Mapping[str, Any]) -> list[str]:
    if config["load_parameters_path"] and config["load_full_state_path"]:
        return ["load_parameters_path and load_full_state_path exclude each other: weights alone, or the whole state"]
    return []


def _adapters(config: Mapping[str, Any]) -> list[str]:
    if not config["lora_rank"]:
        return []
    problems = []
    if not config["lora_parameters"]:
        problems.append("lora_rank needs lora_parameters, such as [attention.query, attention.value]")
    if not config["load_parameters_path"]:
        problems.append("lora_rank needs load_parameters_path: the weights that its adapters add to")
    return problems


def _processes(config: Mapping[str, Any]) -> list[str]:
    address, count, this = config["coordinator_address"], config["num_processes"], config["process_id"]
    if bool(address) != (count != -1) or bool(address) != (this != -1):
        return ["coordinator_address, num_processes and process_id go together: give all three or none"]
    if address and this >= count:
        return [f"process_id={this} must be less than num_processes={count}"]
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
        return [f"coordinator_address={address} must be HOST:PORT, with a port from 1 to 65535, such as 10.0.0.1:1234"]
    return []


def _accepted(config: Mapping[str, Any]) -> list[str]:
    return [
        f"accept_changes names {name}, which is no key.{did_you_mean(name, KEYS)}"
        for name in map(str, config["accept_changes"])
        if name not in KEYS
    ]


CHECKS: tuple[Callable[[Mapping[str, Any]], list[str]], ...] = (
    *model_checks.CHECKS,
    *(_remat, _mesh, _rules, _schedule, _tiles),
    *data_checks.CHECKS,
    *(_scoring, _decoding, _loading, _adapters, _processes, _accepted),
)
