"""Checks what the keys of a configuration demand of each other, and reads `datasets` and `eval_datasets` as typed.

What depends on the devices or the data is checked where those are known.
"""

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from src.config import model_checks, source_spec
from src.config.command_keys import CALIBRATION_METHODS, fixed_bound
from src.config.keys import FROM_0
from src.config.model_checks import FlatKeys, check_value, read_list
from src.config.needs import WITH_MOMENTS
from src.config.schema import KEYS, LOGICAL_AXES, MESH_AXES, size_key
from src.config.step_keys import REMAT_ARRAYS
from src.config.yaml import convert, dump
from src.system.errors import UserError, did_you_mean, first_few

# What a type of data can't do without.
_NEEDED = {"tfds": "dataset_name", "custom": "dataset_factory"}
_NEEDED |= dict.fromkeys(("array_record", "parquet", "tokens", "hf"), "dataset_path")


def check_config(config: Mapping[str, Any], failed: set[str]) -> list[str]:
    """Returns what is wrong with every key of base.yml, of its right type: sentences that name the keys to change."""
    invalid = {key: problem for key in config if key not in failed and (problem := check_value(key, config[key]))}
    sound = FlatKeys({key: value for key, value in config.items() if key not in failed and key not in invalid})
    problems = list(invalid.values())
    for check in CHECKS:
        try:
            problems.extend(list(check(sound)))
        except KeyError as error:  # what depends on a key in `failed`, which was already reported, is not judged
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
            yield f"only one {kind} size may be -1 (what is left), not {' and '.join(unset)}{hint}"


def _rules(config: FlatKeys) -> Iterator[str]:
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
        listed = axes if isinstance(axes, tuple | list) else [axes]
        unknown = [axis for axis in map(str, listed) if axis not in MESH_AXES]
        if listed is not axes or unknown or len(set(axes)) < len(axes):
            hint = did_you_mean(unknown[0], MESH_AXES) if unknown else ""
            yield f"logical_axis_rules.{name}={dump(axes)} must be a list of {', '.join(MESH_AXES)}, or [].{hint}"


def _schedule(config: FlatKeys) -> Iterator[str]:
    if config.steps == -1 and config.learning_rate_schedule_steps == -1:
        yield "steps=-1 takes its value from learning_rate_schedule_steps, which is -1 too: set one of them"
    if config.lr_schedule_type == "exponential" and config.learning_rate_final_fraction == 0:
        yield "lr_schedule_type=exponential never comes to 0: set learning_rate_final_fraction above 0, such as 0.1"
    warmup, decay = config.warmup_steps_fraction, config.wsd_decay_steps_fraction
    if config.lr_schedule_type == "wsd" and warmup + decay > 1:
        yield f"warmup_steps_fraction={warmup} and wsd_decay_steps_fraction={decay} leave no room: their sum exceeds 1"


def _profile(config: FlatKeys) -> Iterator[str]:
    skipped, profiled, steps = config.skip_first_n_steps_for_profiler, config.profiler_steps, config.steps
    if config.profiler and -1 != steps < skipped + profiled:
        yield (
            f"profiler={config.profiler} would be of steps {skipped + 1} to {skipped + profiled}, and steps={steps}: "
            "set skip_first_n_steps_for_profiler and profiler_steps to fewer"
        )
    if config.pgle == "collect" and -1 != steps < 4:
        yield f"pgle=collect profiles the steps 2 to 4, and steps={steps}: raise steps"
    if config.pgle == "auto" and (runs := int(os.environ.get("JAX_PGLE_PROFILING_RUNS", "3"))) < 1:  # JAX's name
        yield f"pgle=auto does nothing with JAX_PGLE_PROFILING_RUNS={runs} in the environment: unset it"
    elif config.pgle == "auto" and -1 != steps <= runs:
        yield f"pgle=auto compiles step {runs + 1} by a profile of those before it, and steps={steps}: raise steps"
    excluded = {
        "compiled_trainstep_file": "a saved step is not compiled again; src.train_compile takes a pgle_profile",
        "pgle_profile": "one run measures, another is compiled by what it measured",
        "profiler": "the GPU's counters have room for one profiler",
    }
    for key, why in excluded.items():
        if config.pgle and config[key]:
            yield f"pgle={config.pgle} and {key}={config[key]} exclude each other: {why}. Set one of them"


def _moments(config: FlatKeys) -> Iterator[str]:
    adapters_alone = config.lora_rank and not config.trainable_parameters  # which are float32, and so their moments
    second = "float32" if adapters_alone else config.weight_dtype
    moments = {"adam_b1": config.mu_dtype or ("float32" if config.lora_rank else second), "adam_b2": second}
    types = {config.opt_type, *(rule.get("opt_type") for rule in config.optimizer_rules)}
    for name, dtype in moments.items() if types.intersection(WITH_MOMENTS) else ():
        if dtype == "bfloat16" and 0 < 1 - config[name] < 2**-8:  # half of what a bfloat16 can be less by
            yield (
                f"{name}={config[name]} needs a moment in float32: rounded to bfloat16 it would never decay. Set "
                f"{name} to 0.996 or less, or {'mu_dtype' if name == 'adam_b1' else 'weight_dtype'}=float32"
            )


def _mup(config: FlatKeys) -> Iterator[str]:
    types = {config.opt_type, *(rule.get("opt_type", config.opt_type) for rule in config.optimizer_rules)}
    needed = {
        "opt_type=adamw, in optimizer_rules too": types == {"adamw"},
        "logits_via_embedding=false": not config.logits_via_embedding,
        "scale_embedding=false": not config.scale_embedding,  # it would grow with the width
        "lora_rank=0": not config.lora_rank,
    }
    for keys, holds in needed.items() if config.mup_base_emb_dim else ():
        if not holds:
            yield f"mup_base_emb_dim={config.mup_base_emb_dim} needs {keys}: its learning rates are of no other"


def _tiles(config: FlatKeys) -> Iterator[str]:
    length, tiles = config.max_target_length, config.num_vocab_tiling
    if tiles and length % tiles:
        yield f"max_target_length={length} does not divide into num_vocab_tiling={tiles} tiles"


def _ramp(config: FlatKeys) -> Iterator[str]:
    if not config.enable_rampup_batch_size:
        return
    full, start = config.per_device_batch_size, config.per_device_batch_size_start
    increment = config.per_device_batch_size_increment
    increments = (full - start) / increment
    if increments < 0.5 or abs(increments - round(increments)) > 1e-6:
        yield (
            f"enable_rampup_batch_size: per_device_batch_size_start={start:g} does not grow to per_device_batch_size="
            f"{full:g} by per_device_batch_size_increment={increment:g}: start with less, and let the increment divide "
            "the difference"
        )
    for name in ("pgle", "pgle_profile"):
        if config[name]:
            yield f"{name}={config[name]} is of one program, and enable_rampup_batch_size has one for each size"


def _sources(config: FlatKeys) -> Iterator[str]:
    for spec in source_spec.all_specs(config):
        # Without a path the one source of a run is Python's own; of several each says what it is.
        needed = "dataset_path" if spec.name and spec.dataset_type == "text" else _NEEDED.get(spec.dataset_type)
        if needed and not getattr(spec, needed):
            yield f"dataset_type={spec.dataset_type} needs {spec.key(needed)}"
    try:
        source_spec.whole_numbers(source_spec.train_weights(config))
    except UserError as error:
        yield str(error)


def _tokenizer(config: FlatKeys) -> Iterator[str]:
    kind, path = config.tokenizer_type, config.tokenizer_path
    if source_spec.all_synthetic(config):
        return
    files = {"sentencepiece": "a .model file", "huggingface": "a model's folder or a tokenizer.json"}
    if kind != "byte" and not path:
        yield f"tokenizer_type={kind} needs tokenizer_path, {files[kind]}"
    if kind == "byte" and path:
        others = " or ".join(f"tokenizer_type={other} ({of})" for other, of in files.items())
        yield f"tokenizer_path={path} is not read with tokenizer_type=byte; set {others}"


def _finetuning(config: FlatKeys) -> Iterator[str]:
    # One of the two is enough to evaluate on; who trains without the first is told so where the data are opened.
    has_path = config.dataset_path or config.eval_dataset_path or config.datasets
    is_text = all(spec.dataset_type == "text" for spec in source_spec.train_specs(config))
    if config.use_sft and not (is_text and has_path):
        yield "use_sft=true reads .jsonl files of conversations: set dataset_type=text and dataset_path"


def _evaluation(config: FlatKeys) -> Iterator[str]:
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


def _scoring(config: FlatKeys) -> Iterator[str]:
    for source, target in (("texts_path", "scores_path"), ("tokens_path", "logits_path")):
        read, written = (os.path.realpath(os.path.expanduser(config[key])) for key in (source, target))
        if bool(config[source]) != bool(config[target]):
            yield f"{source} and {target} go together: give both or none"
        elif config[source] and read == written:
            yield f"{target}={config[target]} is the file that {source} names: it would be written over"
        for key in ("results_path", "tasks"):
            if config[source] and config[key]:
                yield f"{key} and {source} ask for different things: leave one out"
    files = [name for name in config.tasks.split(",") if name.strip().endswith((".yaml", ".yml"))]
    if (files or config.include_path) and not config.trust_tasks:
        yield "a task's .yaml file can run any code (!function, templates): read it, and set trust_tasks=true"


def _decoding(config: FlatKeys) -> Iterator[str]:
    strategy = config.decode_sampling_strategy
    limits = {"decode_sampling_top_k": ("topk", "composite"), "decode_sampling_nucleus_p": ("nucleus", "composite")}
    for key, strategies in limits.items():
        if strategy in strategies and config[key] == KEYS[key].default:
            yield f"decode_sampling_strategy={strategy} needs {key}"
    if config.interactive and config.prompt_path:
        yield "interactive and prompt_path exclude each other: prompts are typed, or read from a file"
    if config.interactive and config.decode_path:
        yield "interactive and decode_path exclude each other: texts are shown, or written to a file"
    if config.decode_path and config.decode_prompt_tokens and config.prompt_path:
        yield "decode_prompt_tokens and prompt_path exclude each other: prompts are of documents, or of a file"
    prefill, length = config.max_prefill_predict_length, config.max_target_length
    if prefill >= length:
        yield f"max_prefill_predict_length={prefill} leaves no room in max_target_length={length}, prompt and all"


def _loading(config: FlatKeys) -> Iterator[str]:
    if config.load_parameters_path and config.load_full_state_path:
        yield "load_parameters_path and load_full_state_path exclude each other: weights alone, or the whole state"
    if config.load_weights_rules and (config.load_full_state_path or config.lora_rank):
        yield "load_weights_rules gives weights to train from step 0: set neither load_full_state_path nor lora_rank"
    for rule in config.load_weights_rules:
        try:
            re.compile(rule["match"])
        except re.error as error:
            yield f"load_weights_rules: {rule['match']} is no regular expression: {error}"
        if not rule.get("path"):
            yield f"load_weights_rules: {rule['match']} needs a path: a run, checkpoint or Hugging Face folder"
    if config.lora_rank and not config.lora_parameters:
        yield "lora_rank needs lora_parameters, such as [attention.query, attention.value]"
    if config.lora_rank and not config.load_parameters_path:
        yield "lora_rank needs load_parameters_path: the weights that its adapters add to"


def _quantization(config: FlatKeys) -> Iterator[str]:
    for name in CALIBRATION_METHODS:
        try:
            bound = fixed_bound(config[name])
        except ValueError:
            yield f"{name}={config[name]}: expected absmax, or a range such as fixed,-224,224"
        else:
            if bound and config.quantization != "fp8":  # an int8 has no code for what is not a number
                yield f"{name}={config[name]} needs quantization=fp8: other products find the range themselves"
    triton = "xla_gpu_enable_triton_gemm"
    is_on = re.search(rf"--{triton}(?!=(false|0))", config.compile_xla_flags, re.IGNORECASE)
    if config.quantization == "fp8" and is_on:
        yield f"compile_xla_flags: with {triton} XLA makes no product of quantization=fp8 in 8 bits: leave it off"


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
            yield f"accept_changes names {name}, which is no key.{did_you_mean(name, known)}"


CHECKS = (
    *model_checks.CHECKS,
    *(_remat, _mesh, _rules, _schedule, _moments, _mup, _profile, _tiles, _ramp),
    *(_sources, _tokenizer, _finetuning, _evaluation),
    *(_scoring, _decoding, _loading, _quantization, _processes, _accepted),
)


# ---- Entries of datasets, eval_datasets and of rules

# The settings that an entry of a key may have, each with a value of its type; the first of them it must.
RULES: dict[str, dict[str, Any]] = {
    "optimizer_rules": {"match": "", "learning_rate_scale": 1.0, "opt_type": "", "weight_decay": 0.0},
    "load_weights_rules": {"match": "", "path": "", "name": ""},
}
ENTRIES = RULES | {
    key: {name: {"weight": 1.0, "eval_steps": 1}.get(name, "") for name in names}
    for key, names in source_spec.ENTRY_KEYS.items()
}
_RANGES = {"learning_rate_scale": FROM_0, "weight_decay": FROM_0}


def read_entries(key: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns a parsed list of mappings, each setting typed; raises ValueError with all that is wrong."""
    entries = read_list(value, "entry", functools.partial(_read_entry, ENTRIES[key]))
    if key in RULES:
        return entries
    names = [entry["name"] for entry in entries]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError("; ".join(f"two entries have the name {name}" for name in twice))
    return entries


def _read_entry(known: Mapping[str, Any], entry: Any) -> dict[str, Any]:
    first = next(iter(known))
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected a mapping such as {{{first}: web, {list(known)[-1]}: ...}}, got {dump(entry)}")
    typed, problems = {}, []
    for name, value in entry.items():
        try:
            typed[name] = _read_setting(known, name, value)
        except ValueError as error:
            problems.append(str(error))
    if first == "match" and not entry.get("match"):
        problems.append(f"it needs match, a pattern of weights' names, got {dump(entry)}")
    if first == "name" and not re.fullmatch(r"[\w.-]+", str(entry.get("name", ""))):
        problems.append("it needs a name, of letters, digits, dots, dashes and underscores")
    if problems:
        raise ValueError("; ".join(problems))
    return typed


def _read_setting(known: Mapping[str, Any], name: str, value: Any) -> Any:
    if name not in known:
        hint = did_you_mean(name, known) or f" There are {first_few(known, near=name)}"
        if name.partition(":")[0] in known:
            hint = " YAML needs a blank after the colon"
        raise ValueError(f"no setting {name}.{hint}")
    typed = convert(value, known[name], name)
    if name in _RANGES and not _RANGES[name].holds(typed):
        raise ValueError(f"{name}={dump(typed)} must be {_RANGES[name].words}")
    if name in KEYS and (problem := check_value(name, typed)):
        raise ValueError(problem)
    return typed
