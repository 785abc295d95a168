"""Declares keys that an ordinary run does not need: for compilation ahead of time, decoding, diagnostics and more."""

from src.config import keys
from src.config.keys import FROM_0, FROM_1, FROM_1_OR_UNSET, POSITIVE, SEED, SHARE_OR_UNSET, Range, group, key, path

# Commands that start a run or prepare for one. They accept keys that commands for a trained model do not.
RUN_COMMANDS = (
    *("src.train", "src.train_compile", "src.train_dpo"),
    *("src.inspect_data", "src.tokenize_dataset", "src.train_tokenizer"),
)
_TRAIN_COMPILE = {"commands": ("src.train_compile",), "ignored": "anywhere"}  # users type these for src.train too
_DECODE, _INSPECT, _RUNS = ({"commands": names} for names in (("src.decode",), ("src.inspect_data",), RUN_COMMANDS))


# fmt: off
@group
class Aot:
    """Compilation ahead of time (docs/aot.md)"""
    compile_topology: str = key("", "a TPU slice (v5p-128, v5p:4x4x4), a GPU host (a3) or cpu-8", **_TRAIN_COMPILE)
    compile_topology_num_slices: int = key(1,
        "number of slices or hosts, each as compile_topology names", FROM_1, 2**16, **_TRAIN_COMPILE)
    compile_report: str = path("", "output file for its report, JSON", **_TRAIN_COMPILE)
    compiled_trainstep_file: str = path("",
        "file to which src.train_compile writes the compiled step; src.train loads it",
        **_RUNS)
    pgle: str = key("", "NVIDIA GPU: collect saves kernel times, auto compiles with them, docs/profiling.md",
        ("", "auto", "collect"), **_RUNS)
    pgle_profile: str = path("",
        "NVIDIA GPU: file of kernel times from pgle=collect, to compile the step with", **_RUNS)
    compile_xla_flags: str = key("", "compiler options, such as --xla_a=true --xla_b=2; auto: chosen for this hardware",
        **_RUNS)


@group
class Quantization:
    """8-bit matmuls (docs/quantization.md)"""
    quantization: str = key("",
        "int8 (TPU v5e, v5p, v6e), fp8 (H100 and later, TPU7x), mxfp8 (B200); empty: off",
        ("", "int8", "fp8", "mxfp8"))
    quantization_exclude: tuple = key(("output", "router", "embedding", "write_gate", "decay_gate", "shared_gate"),
        "weights left in dtype, by name", example="[output, attention.*]",
        above="quantization_exclude: weights whose matmuls stay in dtype; * stands for anything")
    weight_quantization_calibration_method: str = key("absmax",
        "range of codes: absmax, the largest magnitude, or with fp8 fixed,-B,B")
    act_quantization_calibration_method: str = key("absmax",
        "like weight_quantization_calibration_method, for activations")
    bwd_quantization_calibration_method: str = key("absmax",
        "like weight_quantization_calibration_method, for gradients")


@group
class Conversations:
    """Finetuning: the data"""
    use_sft: bool = key(False, "dataset_path: .jsonl files of prompts and completions, or of chats (docs/data.md)")
    sft_train_on_completion_only: bool = key(True, "count only the assistant's tokens in the loss; false: all tokens")


@group
class Preferences:
    """Finetuning: preferences (docs/dpo.md)"""
    dpo_beta: float = key(0.1, "DPO: reward per nat of log-probability above the reference model's", POSITIVE,
        commands=("src.train_dpo", "src.verify"), resume_invariant=True)
    dpo_label_smoothing: float = key(0.0, "DPO: share of pairs assumed to be labelled the wrong way round",
        Range("at least 0 and less than 0.5", lambda x: 0 <= x < 0.5, None), commands=("src.train_dpo", "src.verify"),
        resume_invariant=True)


@group
class Tools:
    """Tools for data"""
    tokenized_path: str = path("", "output folder, for dataset_type=tokens", commands=("src.tokenize_dataset",))
    inspect_first_step: int = key(0, "first batch to show", FROM_0, **_INSPECT)
    inspect_num_steps: int = key(1, "number of batches to show", FROM_1, **_INSPECT)
    process_count: int = key(1, "pretend to be this many processes, each with these devices", FROM_1, 2**20, **_INSPECT)
    process_index: int = key(0, "process whose rows to show", FROM_0, 2**20, **_INSPECT)


_AT_MOST = Range("a whole number, or less than 1: a share", lambda x: 0 <= x < 1 or (x >= 1 and x == int(x)))


@group
class HarnessTasks:
    """Evaluation: tasks (docs/evaluation.md)"""
    tasks: str = key("", "NAME,NAME: tasks of lm-evaluation-harness", any_text=True, commands=("src.evaluate",))
    num_fewshot: int = key(-1, "solved examples before each question; -1: the task's own number",
        keys.FROM_0_OR_UNSET, 2**10, commands=("src.evaluate",))
    limit: float = key(0.0, "questions per task; less than 1: that share of them; 0: all", _AT_MOST,
        commands=("src.evaluate",))
    include_path: str = path("", "folder with .yaml files of further tasks", is_local=True,
        commands=("src.evaluate",))
    trust_tasks: bool = key(False, "allow code named in .yaml files of include_path or tasks=FILE.yaml",
        commands=("src.evaluate",))


@group
class Decoding:
    """Decoding (src.decode, and the sample at the end of a run)"""
    prompt: str = key("def ", "text to continue", any_text=True)
    prompt_path: str = path("", "prompts, one per line, or JSONL with prompt or messages", is_local=True, **_DECODE)
    interactive: bool = key(False, "read prompts from the terminal, one after the other", **_DECODE)
    use_chat_template: bool = key(False, "format prompts as user messages with the tokenizer's chat template")
    sample_length: int = key(0,
        "maximum tokens to generate; 0: no final sample, and src.decode fills the context", FROM_0, 2**24)
    max_prefill_predict_length: int = key(-1,
        "length that prompts are padded to; -1: a power of two", FROM_1_OR_UNSET, 2**24)
    decode_sampling_strategy: str = key("weighted", "greedy, weighted (all tokens), topk, nucleus or composite (both)",
        ("greedy", "weighted", "topk", "nucleus", "composite"))
    decode_sampling_temperature: float = key(0.7, "logits are divided by this; 0: greedy", FROM_0)
    decode_sampling_top_k: int = key(0,
        "topk, composite: sample from this many of the most likely tokens", FROM_0, 2**24)
    decode_sampling_nucleus_p: float = key(-1.0,
        "nucleus, composite: sample from the fewest tokens with this total probability", SHARE_OR_UNSET)
    decode_seed: int = key(0, "seed of the sampling", SEED)
    decode_path: str = path("", "output file for texts, ids and log-probabilities, JSONL", is_local=True, **_DECODE)
    decode_samples: int = key(1, "decode_path, decode_metrics: texts to sample for each prompt", FROM_1, 2**20)
    decode_prompt_tokens: int = key(0,
        "length in tokens of prompts from the start of each document; 0: no such prompts", FROM_0)
    decode_num_prompts: int = key(-1,
        "decode_prompt_tokens: number of documents, from the first; -1: all", FROM_1_OR_UNSET)
    decode_metrics: str = key("", "module:function(lines of decode_path) -> {name: number}, called at evaluations",
        **_RUNS)
    quantize_weights: str = key("", "int8 stores the weights of matmuls in 8 bits", ("", "int8"), **_DECODE,
        ignored="nowhere")
    decode_stop: tuple = key((), "texts that end generation, in addition to the tokenizer's end token",
        example='["Question:"]', any_text=True)


@group
class Diagnostics:
    """Diagnostics"""
    report_to: tuple = key((), "send metrics to [wandb] (Weights & Biases), [mlflow] or both too (docs/metrics.md)",
        ("wandb", "mlflow"), **_RUNS)
    profiler: str = key("", "xplane: profile some steps, into the run's tensorboard folder", ("", "xplane"),
        **_RUNS)
    skip_first_n_steps_for_profiler: int = key(1, "steps before the profile", FROM_0)
    profiler_steps: int = key(5, "steps in the profile", FROM_1)
    collect_stack_trace: bool = key(False, "write all threads' stacks periodically, and on a fault", **_RUNS)
    stack_trace_to_cloud: bool = key(False, "true: to /tmp/debugging, which a TPU VM uploads; false: to the console")
    stack_trace_interval_seconds: int = key(600, "seconds between stack traces", FROM_1, 2**24)
    hang_after_steps: float = key(20.0, "report a hang after this many median step times; 0: off", FROM_0)
    hang_after_seconds: float = key(300.0,
        "hang_after_steps: least seconds before a report, evaluations and saves not counted", POSITIVE)
    hang_action: str = key("log", "log: write stacks and more to the run's hang-*.txt; exit: also end with code 75",
        ("log", "exit"))
# fmt: on


CALIBRATION_METHODS = tuple(f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd"))


def fixed_bound(method: str) -> float:
    """Returns the bound B of the calibration method `fixed,-B,B`, or 0 for `absmax`, which measures the range.

    Raises ValueError for any other text, or if B is not from 1e-30 to 1e30.
    """
    if method == "absmax":
        return 0.0
    word, low, high = method.split(",")
    if word != "fixed" or float(low) != -float(high) or not 1e-30 <= float(high) <= 1e30:
        raise ValueError(method)
    return float(high)
