"""Checks keys that are at their defaults in an ordinary run; checks.py says which of them call for which check."""

import os
import re
from collections.abc import Iterator

from src.config import dataset_spec
from src.config.command_keys import CALIBRATION_METHODS, fixed_bound
from src.config.model_checks import FlatKeys
from src.config.schema import KEYS


def mup(config: FlatKeys) -> Iterator[str]:
    """Checks what muP does not scale."""
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


def profile(config: FlatKeys) -> Iterator[str]:
    """Checks that a run has the steps that it is to profile."""
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


def ramp(config: FlatKeys) -> Iterator[str]:
    """Checks that the ramp comes to the full batch."""
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


def finetuning(config: FlatKeys) -> Iterator[str]:
    """Checks that conversations are read from files."""
    # One of the two is enough to evaluate on; who trains without the first is told so where the data are opened.
    has_path = config.dataset_path or config.eval_dataset_path or config.datasets
    is_text = all(spec.dataset_type == "text" for spec in dataset_spec.train_specs(config))
    if config.use_sft and not (is_text and has_path):
        yield "use_sft=true reads .jsonl files of conversations: set dataset_type=text and dataset_path"


def scoring(config: FlatKeys) -> Iterator[str]:
    """Checks which files are scored, and which tasks."""
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


def decoding(config: FlatKeys) -> Iterator[str]:
    """Checks how texts are sampled, and from which prompts."""
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


def loading(config: FlatKeys) -> Iterator[str]:
    """Checks which weights a run begins with."""
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


def quantization(config: FlatKeys) -> Iterator[str]:
    """Checks the ranges of 8-bit matmuls."""
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
