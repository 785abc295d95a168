"""Declares the keys of what an ordinary training run does not do: compiling ahead of time, decoding, diagnosing."""

from src.config.keys import FROM_0, FROM_1, FROM_1_OR_UNSET, SEED, SHARE_OR_UNSET, group, key, path


# fmt: off
@group
class Aot:
    """Compilation ahead of time (docs/aot.md)"""
    compile_topology: str = key("", "src.train_compile: a TPU slice (v5p-128, v5p:4x4x4), a GPU host (a3) or cpu-8")
    compile_topology_num_slices: int = key(1, "src.train_compile: how many such slices or hosts", FROM_1, 2**16)
    compile_report: str = path("", "src.train_compile: where its report goes as JSON")
    compiled_trainstep_file: str = path("", "src.train_compile writes the compiled step there; src.train loads it")
    pgle: str = key("", "NVIDIA GPU (docs/profiling.md): collect writes kernels' times to a file; auto uses them",
        ("", "auto", "collect"))
    pgle_profile: str = path("", "NVIDIA GPU: a file of pgle=collect, by whose times the step is compiled")
    compile_xla_flags: str = key("", "compiler options, such as --xla_a=true --xla_b=2; auto: those for this hardware")


@group
class Conversations:
    """Finetuning: the data"""
    use_sft: bool = key(False, "dataset_path has .jsonl files of prompts and completions, or of chats (docs/data.md)")
    sft_train_on_completion_only: bool = key(True, "the loss counts what the assistant says alone; false: all tokens")


@group
class Tools:
    """Tools for data"""
    tokenized_path: str = path("", "src.tokenize_dataset: the folder it writes, for dataset_type=tokens")
    inspect_first_step: int = key(0, "src.inspect_data: the first batch it shows", FROM_0)
    inspect_num_steps: int = key(1, "src.inspect_data: how many", FROM_1)
    process_count: int = key(1, "src.inspect_data: as if of so many processes with these devices each", FROM_1, 2**20)
    process_index: int = key(0, "src.inspect_data: the process whose rows it shows", FROM_0, 2**20)


@group
class Decoding:
    """Decoding (src.decode, and the sample at the end of a run)"""
    prompt: str = key("def ", "the first text", any_text=True)
    prompt_path: str = path("", "src.decode: prompts, one a line, or JSONL with prompt or messages", is_local=True)
    interactive: bool = key(False, "src.decode: read prompts from the terminal, one after the other")
    use_chat_template: bool = key(False, "src.decode: prompts are a user's messages, in the tokenizer's chat template")
    sample_length: int = key(0, "tokens drawn at most; 0: none at the end, src.decode: fills the row", FROM_0, 2**24)
    max_prefill_predict_length: int = key(-1, "prompts are padded to it; -1: to a power of two", FROM_1_OR_UNSET, 2**24)
    decode_sampling_strategy: str = key("weighted", "greedy, weighted (all tokens), topk, nucleus, composite (both)",
        ("greedy", "weighted", "topk", "nucleus", "composite"))
    decode_sampling_temperature: float = key(0.7, "logits are divided by it; 0: greedy", FROM_0)
    decode_sampling_top_k: int = key(0, "topk, composite: draw from so many tokens, the likeliest", FROM_0, 2**24)
    decode_sampling_nucleus_p: float = key(-1.0,
        "nucleus, composite: draw from the fewest tokens that have this probability together", SHARE_OR_UNSET)
    decode_seed: int = key(0, "of the draws", SEED)
    quantize_weights: str = key("", "src.decode: int8 keeps the weights of products in 8 bits", ("", "int8"))
    decode_stop: tuple = key((), "src.decode: texts that end what is drawn, beside the tokenizer's own end",
        example='["Question:"]', any_text=True)


@group
class Diagnostics:
    """Diagnostics"""
    profiler: str = key("", "xplane: write a profile of some steps to the run's tensorboard folder", ("", "xplane"))
    skip_first_n_steps_for_profiler: int = key(1, "steps before the profile", FROM_0)
    profiler_steps: int = key(5, "steps in it", FROM_1)
    collect_stack_trace: bool = key(False, "write all threads' stacks now and then, and on a fault")
    stack_trace_to_cloud: bool = key(False, "true: to /tmp/debugging, which a TPU VM uploads; false: the console")
    stack_trace_interval_seconds: int = key(600, "between two of them", FROM_1, 2**24)
# fmt: on
