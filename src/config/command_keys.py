"""Declares the keys of what an ordinary run does not do: compiling ahead, products in 8 bits, decoding, diagnosing."""

from src.config import keys
from src.config.keys import FROM_0, FROM_1, FROM_1_OR_UNSET, POSITIVE, SEED, SHARE_OR_UNSET, Range, group, key, path

# What is of runs alone, other commands on a run or its data take too, but not those that use a model.
RUN_COMMANDS = (
    *("src.train", "src.train_compile", "src.train_dpo"),
    *("src.inspect_data", "src.tokenize_dataset", "src.train_tokenizer"),
)
_TRAIN_COMPILE = {"commands": ("src.train_compile",), "ignored": "anywhere"}  # the same line is typed for src.train
_DECODE, _INSPECT, _RUNS = ({"commands": names} for names in (("src.decode",), ("src.inspect_data",), RUN_COMMANDS))


# fmt: off
@group
class Aot:
    """Compilation ahead of time (docs/aot.md)"""
    compile_topology: str = key("", "a TPU slice (v5p-128, v5p:4x4x4), a GPU host (a3) or cpu-8", **_TRAIN_COMPILE)
    compile_topology_num_slices: int = key(1, "how many such slices or hosts", FROM_1, 2**16, **_TRAIN_COMPILE)
    compile_report: str = path("", "where its report goes as JSON", **_TRAIN_COMPILE)
    compiled_trainstep_file: str = path("", "src.train_compile writes the compiled step there; src.train loads it",
        **_RUNS)
    pgle: str = key("", "NVIDIA GPU (docs/profiling.md): collect writes kernels' times to a file; auto uses them",
        ("", "auto", "collect"), **_RUNS)
    pgle_profile: str = path("", "NVIDIA GPU: a file of pgle=collect, by whose times the step is compiled", **_RUNS)
    compile_xla_flags: str = key("", "compiler options, such as --xla_a=true --xla_b=2; auto: those for this hardware",
        **_RUNS)


@group
class Quantization:
    """Products in 8 bits (docs/quantization.md)"""
    quantization: str = key("",
        "of weights' products: empty, int8 (TPU v5e, v5p, v6e), fp8 (H100 and later, TPU7x) or mxfp8 (B200)",
        ("", "int8", "fp8", "mxfp8"))
    quantization_exclude: tuple = key(("output", "router", "embedding", "write_gate", "decay_gate", "shared_gate"),
        "weights whose products stay in dtype, by name; * stands for anything", example="[output, attention.*]")
    weight_quantization_calibration_method: str = key("absmax",
        "range of the codes: absmax, the largest magnitude at hand, or (fp8) fixed,-B,B")
    act_quantization_calibration_method: str = key("absmax", "the same, of activations")
    bwd_quantization_calibration_method: str = key("absmax", "the same, of gradients")


@group
class Conversations:
    """Finetuning: the data"""
    use_sft: bool = key(False, "dataset_path has .jsonl files of prompts and completions, or of chats (docs/data.md)")
    sft_train_on_completion_only: bool = key(True, "the loss counts what the assistant says alone; false: all tokens")


@group
class Preferences:
    """Finetuning: preferences (docs/dpo.md)"""
    dpo_beta: float = key(0.1, "reward of an answer, for each nat likelier than to the reference", POSITIVE,
        commands=("src.train_dpo",), resume_invariant=True)
    dpo_label_smoothing: float = key(0.0, "share of pairs taken to be the wrong way round",
        Range("at least 0 and less than 0.5", lambda x: 0 <= x < 0.5, None), commands=("src.train_dpo",),
        resume_invariant=True)


@group
class Tools:
    """Tools for data"""
    tokenized_path: str = path("", "the folder it writes, for dataset_type=tokens", commands=("src.tokenize_dataset",))
    inspect_first_step: int = key(0, "the first batch it shows", FROM_0, **_INSPECT)
    inspect_num_steps: int = key(1, "how many", FROM_1, **_INSPECT)
    process_count: int = key(1, "as if of so many processes with these devices each", FROM_1, 2**20, **_INSPECT)
    process_index: int = key(0, "the process whose rows it shows", FROM_0, 2**20, **_INSPECT)


_AT_MOST = Range("a whole number, or less than 1: a share", lambda x: 0 <= x < 1 or (x >= 1 and x == int(x)))


@group
class HarnessTasks:
    """Evaluation: tasks (docs/evaluation.md)"""
    tasks: str = key("", "tasks of lm-evaluation-harness: NAME,NAME", any_text=True, commands=("src.evaluate",))
    num_fewshot: int = key(-1, "solved examples before each question; -1: as each task says",
        keys.FROM_0_OR_UNSET, 2**10, commands=("src.evaluate",))
    limit: float = key(0.0, "questions of each task; less than 1: that share of them; 0: all", _AT_MOST,
        commands=("src.evaluate",))
    include_path: str = path("", "a folder with .yaml files of further tasks", is_local=True,
        commands=("src.evaluate",))
    trust_tasks: bool = key(False, "true: include_path and tasks=FILE.yaml may run code, which such files can name",
        commands=("src.evaluate",))


@group
class Decoding:
    """Decoding (src.decode, and the sample at the end of a run)"""
    prompt: str = key("def ", "the first text", any_text=True)
    prompt_path: str = path("", "prompts, one a line, or JSONL with prompt or messages", is_local=True, **_DECODE)
    interactive: bool = key(False, "read prompts from the terminal, one after the other", **_DECODE)
    use_chat_template: bool = key(False, "prompts are a user's messages, in the tokenizer's chat template")
    sample_length: int = key(0, "tokens drawn at most; 0: none at the end, src.decode: fills the row", FROM_0, 2**24)
    max_prefill_predict_length: int = key(-1, "prompts are padded to it; -1: to a power of two", FROM_1_OR_UNSET, 2**24)
    decode_sampling_strategy: str = key("weighted", "greedy, weighted (all tokens), topk, nucleus, composite (both)",
        ("greedy", "weighted", "topk", "nucleus", "composite"))
    decode_sampling_temperature: float = key(0.7, "logits are divided by it; 0: greedy", FROM_0)
    decode_sampling_top_k: int = key(0, "topk, composite: draw from so many tokens, the likeliest", FROM_0, 2**24)
    decode_sampling_nucleus_p: float = key(-1.0,
        "nucleus, composite: draw from the fewest tokens that have this probability together", SHARE_OR_UNSET)
    decode_seed: int = key(0, "of the draws", SEED)
    decode_path: str = path("", "texts go there as JSONL, with ids and log-probabilities", is_local=True, **_DECODE)
    decode_samples: int = key(1, "decode_path, decode_metrics: texts drawn for each prompt", FROM_1, 2**20)
    decode_prompt_tokens: int = key(0, "prompts are so many ids of each document of the data; 0: none", FROM_0)
    decode_num_prompts: int = key(-1, "decode_prompt_tokens: of the first so many documents; -1: all", FROM_1_OR_UNSET)
    decode_metrics: str = key("", "module:function(lines of decode_path) -> {name: number}, of texts at evaluations",
        **_RUNS)
    quantize_weights: str = key("", "int8 keeps the weights of products in 8 bits", ("", "int8"), **_DECODE,
        ignored="nowhere")
    decode_stop: tuple = key((), "texts that end what is drawn, beside the tokenizer's own end",
        example='["Question:"]', any_text=True)


@group
class Diagnostics:
    """Diagnostics"""
    report_to: tuple = key((), "where metrics also go: [wandb] (Weights & Biases), [mlflow], or both (docs/metrics.md)",
        ("wandb", "mlflow"), **_RUNS)
    profiler: str = key("", "xplane: write a profile of some steps to the run's tensorboard folder", ("", "xplane"),
        **_RUNS)
    skip_first_n_steps_for_profiler: int = key(1, "steps before the profile", FROM_0)
    profiler_steps: int = key(5, "steps in it", FROM_1)
    collect_stack_trace: bool = key(False, "write all threads' stacks now and then, and on a fault", **_RUNS)
    stack_trace_to_cloud: bool = key(False, "true: to /tmp/debugging, which a TPU VM uploads; false: the console")
    stack_trace_interval_seconds: int = key(600, "between two of them", FROM_1, 2**24)
    hang_after_steps: float = key(20.0, "no step ends in so many times the median: a hang; 0: not looked for", FROM_0)
    hang_after_seconds: float = key(300.0, "... and in so many seconds; not in evaluations and saves", POSITIVE)
    hang_action: str = key("log", "log: stacks and more go to the run's hang-*.txt; exit: it also ends, with code 75",
        ("log", "exit"))
# fmt: on


CALIBRATION_METHODS = tuple(f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd"))


def fixed_bound(method: str) -> float:
    """Returns B of `fixed,-B,B`, and 0 of `absmax`; raises ValueError for another text."""
    if method == "absmax":
        return 0.0
    word, low, high = method.split(",")
    if word != "fixed" or float(low) != -float(high) or not 1e-30 <= float(high) <= 1e30:
        raise ValueError(method)
    return float(high)
