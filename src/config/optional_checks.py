"""Checks keys that an ordinary run leaves at their defaults; checks.py lists the keys that cause each check.

A check yields its problems, as sentences.
"""

import os
import re
from collections.abc import Iterator

from src.config import dataset_spec
from src.config.command_keys import CALIBRATION_METHODS, fixed_bound
from src.config.schema import KEYS, Config


def mup(config: Config) -> Iterator[str]:
    """Checks that muP is not combined with a setting for which it has no scaling."""
    model, step = config.model, config.step
    types = {step.opt_type, *(rule.get("opt_type", step.opt_type) for rule in step.optimizer_rules)}
    needed = {
        "opt_type=adamw, in optimizer_rules too": types == {"adamw"},
        "logits_via_embedding=false": not model.logits_via_embedding,
        "scale_embedding=false": not model.scale_embedding,  # the factor grows with the width
        "lora_rank=0": not step.lora_rank,
    }
    for keys, holds in needed.items() if step.mup_base_emb_dim else ():
        if not holds:
            yield f"mup_base_emb_dim={step.mup_base_emb_dim} needs {keys}: its learning rates hold only with it"


def profile(config: Config) -> Iterator[str]:
    """Checks that a run has enough steps to profile, and that `pgle` is not combined with keys that exclude it."""
    diagnostics, steps = config.diagnostics, config.run.steps
    skipped, profiled = diagnostics.skip_first_n_steps_for_profiler, diagnostics.profiler_steps
    if diagnostics.profiler and -1 != steps < skipped + profiled:
        yield (
            f"profiler={diagnostics.profiler} would profile steps {skipped + 1} to {skipped + profiled}, "
            f"but steps={steps}: lower skip_first_n_steps_for_profiler or profiler_steps"
        )
    pgle = config.aot.pgle  # raises AttributeError if it is invalid, and so ends this check: read it after `profiler`
    if pgle == "collect" and -1 != steps < 4:
        yield f"pgle=collect profiles steps 2 to 4, but steps={steps}: raise steps"
    if pgle == "auto" and (runs := int(os.environ.get("JAX_PGLE_PROFILING_RUNS", "3"))) < 1:  # JAX reads it
        yield f"pgle=auto does nothing with JAX_PGLE_PROFILING_RUNS={runs} in the environment: unset it"
    elif pgle == "auto" and -1 != steps <= runs:
        yield f"pgle=auto compiles step {runs + 1} with a profile of earlier steps, but steps={steps}: raise steps"
    excluded = {
        "compiled_trainstep_file": "a saved step is not compiled again; src.train_compile takes a pgle_profile",
        "pgle_profile": "one run measures, another is compiled with its measurements",
        "profiler": "the GPU's counters serve only one profiler",
    }
    for key, why in excluded.items():
        if pgle and config[key]:
            yield f"pgle={pgle} and {key}={config[key]} exclude each other: {why}. Set one of them"


def ramp(config: Config) -> Iterator[str]:
    """Checks that increments lead to the full batch size, and that no profile of a single compiled step is used."""
    batch = config.batch
    if not batch.enable_rampup_batch_size:
        return
    full, start = batch.per_device_batch_size, batch.per_device_batch_size_start
    increment = batch.per_device_batch_size_increment
    increments = (full - start) / increment
    if not 0.5 <= increments <= 2**20 or abs(increments - round(increments)) > 1e-6:
        yield (
            f"enable_rampup_batch_size: per_device_batch_size_start={start:g} does not grow to per_device_batch_size="
            f"{full:g} by per_device_batch_size_increment={increment:g}: start with less, and let the increment divide "
            "the difference"
        )
    for name in ("pgle", "pgle_profile"):
        if config[name]:
            yield f"{name}={config[name]} is for one program, but enable_rampup_batch_size has one for each size"


def finetuning(config: Config) -> Iterator[str]:
    """Checks that conversations are to be read from files."""
    data = config.data
    # Either path is enough to evaluate; training without dataset_path fails once the data are opened.
    has_path = data.dataset_path or data.eval_dataset_path or data.datasets
    is_text = all(spec.dataset_type == "text" for spec in dataset_spec.train_specs(data))
    if data.use_sft and not (is_text and has_path):
        yield "use_sft=true reads .jsonl files of conversations: set dataset_type=text and dataset_path"


def scoring(config: Config) -> Iterator[str]:
    """Checks src.evaluate's keys: scored files have outputs of their own, and tasks' .yaml files are trusted.

    Neither texts nor tokens may be scored together with `results_path` or `tasks`.
    """
    harness = config.harness
    for source, target in (("texts_path", "scores_path"), ("tokens_path", "logits_path")):
        read, written = (os.path.realpath(os.path.expanduser(config[key])) for key in (source, target))
        if bool(config[source]) != bool(config[target]):
            yield f"{source} and {target} go together: give both or none"
        elif config[source] and read == written:
            yield f"{target}={config[target]} is the file that {source} names: it would be overwritten"
        for key in ("results_path", "tasks"):
            if config[source] and config[key]:
                yield f"{key} and {source} ask for different things: leave one out"
    files = [name for name in harness.tasks.split(",") if name.strip().endswith((".yaml", ".yml"))]
    if (files or harness.include_path) and not harness.trust_tasks:
        yield "a task's .yaml file can run any code (!function, templates): read it, and set trust_tasks=true"


def decoding(config: Config) -> Iterator[str]:
    """Checks that a sampling strategy has its setting, and that prompts have one source and texts one destination.

    Also that `max_prefill_predict_length` leaves room to generate.
    """
    decoding = config.decoding
    strategy = decoding.decode_sampling_strategy
    limits = {"decode_sampling_top_k": ("topk", "composite"), "decode_sampling_nucleus_p": ("nucleus", "composite")}
    for key, strategies in limits.items():
        if strategy in strategies and config[key] == KEYS[key].default:
            yield f"decode_sampling_strategy={strategy} needs {key}"
    if decoding.interactive and decoding.prompt_path:
        yield "interactive and prompt_path exclude each other: prompts are typed, or read from a file"
    if decoding.interactive and decoding.decode_path:
        yield "interactive and decode_path exclude each other: texts are shown, or written to a file"
    if decoding.decode_path and decoding.decode_prompt_tokens and decoding.prompt_path:
        yield "decode_prompt_tokens and prompt_path exclude each other: prompts come from documents, or from a file"
    prefill, length = decoding.max_prefill_predict_length, config.batch.max_target_length
    if prefill >= length:
        yield f"max_prefill_predict_length={prefill} leaves no room to generate in max_target_length={length}"


def loading(config: Config) -> Iterator[str]:
    """Checks that keys of initial weights do not exclude each other, and that rules and adapters are complete."""
    checkpoint, step = config.checkpoint, config.step
    if checkpoint.load_parameters_path and checkpoint.load_full_state_path:
        yield "load_parameters_path and load_full_state_path exclude each other: only the weights, or the whole state"
    if checkpoint.load_weights_rules and (checkpoint.load_full_state_path or step.lora_rank):
        yield "load_weights_rules gives weights to train from step 0: set neither load_full_state_path nor lora_rank"
    for rule in checkpoint.load_weights_rules:
        try:
            re.compile(rule["match"])
        except re.error as error:
            yield f"load_weights_rules: {rule['match']} is not a regular expression: {error}"
        if not rule.get("path"):
            yield f"load_weights_rules: {rule['match']} needs a path: a run, checkpoint or Hugging Face folder"
    if step.lora_rank and not step.lora_parameters:
        yield "lora_rank needs lora_parameters, such as [attention.query, attention.value]"
    if step.lora_rank and not checkpoint.load_parameters_path:
        yield "lora_rank needs load_parameters_path: the weights that its adapters add to"


def quantization(config: Config) -> Iterator[str]:
    """Checks the calibration methods, and that quantization=fp8 is not combined with XLA's Triton matmuls."""
    for name in CALIBRATION_METHODS:
        try:
            bound = fixed_bound(config[name])
        except ValueError:
            yield f"{name}={config[name]}: expected absmax, or a range such as fixed,-224,224"
        else:
            if bound and config.step.quantization != "fp8":  # in a fixed range, int8 makes NaN finite
                yield f"{name}={config[name]} needs quantization=fp8: other 8-bit matmuls find the range themselves"
    triton = "xla_gpu_enable_triton_gemm"
    is_on = re.search(rf"--{triton}(?!=(false|0))", config.aot.compile_xla_flags, re.IGNORECASE)
    if config.step.quantization == "fp8" and is_on:
        yield f"compile_xla_flags: with {triton}, XLA computes no matmul of quantization=fp8 in 8 bits: leave it off"
