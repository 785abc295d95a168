"""Declares every key of the configuration once; `Config` has them in typed sections.

`configs/base.yml` is written from here: `python -m src.config.base_yml > configs/base.yml`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from src.config.command_keys import RUN_COMMANDS, Aot, Conversations, Decoding, Diagnostics, HarnessTasks, Tools
from src.config.keys import (
    ABOVE_0,
    AXIS_SIZE,
    BELOW_1,
    FROM_0,
    FROM_0_OR_UNSET,
    FROM_1,
    FROM_1_OR_UNSET,
    FROM_64,
    SEED,
    Key,
    frozen,
    group,
    key,
    path,
)
from src.config.model_keys import LayerKeys, Model
from src.config.step_keys import Step, Trainable
from src.system.errors import UserError

# The mesh's axes, and the word for each in the keys of its sizes: ici_WORD_parallelism and dcn_WORD_parallelism.
MESH_AXES = {axis: axis for axis in ("data", "stage", "fsdp", "context", "expert", "tensor")} | {"stage": "pipeline"}
# The logical dims of weights and activations: the mesh axes that shard each, and a description.
LOGICAL_AXES = {
    "batch": (("data", "fsdp", "expert"), "rows"),
    "length": (("context",), "the sequence, inside blocks"),
    "norm_length": (("context",), "the sequence, between blocks, at the norms; [context, tensor] uses less memory"),
    "activation_embed": ((), "width of the residual stream"),
    "vocab": (("tensor", "stage"), ""),
    "embed": (("fsdp", "context", "expert"), ""),
    "heads": (("tensor",), ""),
    "kv_heads": (("tensor",), ""),
    "head_dim": ((), ""),
    "mlp": (("tensor",), ""),
    "expert": (("expert",), ""),
    "expert_embed": (("fsdp", "context"), "embed, in expert weights"),
    "latent": (("fsdp", "context", "expert"), "ranks of latent attention; unsharded if the mesh does not divide them"),
    "position": ((), ""),
    "layers": (("stage",), "repeats of the segment with the most layers"),
    "other_layers": ((), "repeats of the other segments"),
}

_EVALUATE, _RUNS = {"commands": ("src.evaluate",)}, {"commands": (*RUN_COMMANDS, "src.verify")}


# fmt: off
@group
class Run:
    """Run"""
    run_name: str = key("", "the run's folder in base_output_directory, such as a or sweep/a; empty: dated name")
    base_output_directory: str = path("runs",
        "local folder, gs://bucket/dir or s3://bucket/dir (any path that etils reads)")
    model_name: str = key("",
        "name in configs/models, file, model or run folder, hf://ORG/NAME; empty: as below")
    hardware: str = key("",
        "cpu, gpu or tpu: fail if another is found; empty: use whichever is found", ("", "cpu", "gpu", "tpu"))
    steps: int = key(10_000, "total optimizer steps of the run; -1: learning_rate_schedule_steps", FROM_1_OR_UNSET)
    log_period: int = key(1, "steps between printed lines; metrics.jsonl has every step", FROM_1)
    quiet: bool = key(False, "print only the last step's line and no header, for sweeps")
    accept_changes: tuple = key((),
        "keys that a resumed run may change although they affect weights, data or its order")


@group
class BatchKeys:
    """Batch"""
    per_device_batch_size: float = key(12.0,
        "sequences per device and micro-batch; a fraction if devices share a sequence", ABOVE_0, 2**20)
    enable_rampup_batch_size: bool = key(False,
        "start with smaller batches and grow to per_device_batch_size (docs/data.md)", **_RUNS)
    per_device_batch_size_start: float = key(4.0,
        "batch ramp-up: sequences per device and micro-batch at the start", ABOVE_0, **_RUNS)
    per_device_batch_size_increment: float = key(2.0, "batch ramp-up: added at each increase", ABOVE_0, **_RUNS)
    global_rampup_samples: int = key(500,
        "batch ramp-up: sequences until the full size, the same number at each smaller size", FROM_1,
        2**40, **_RUNS)
    max_target_length: int = key(2048, "T, tokens per sequence", FROM_1, 2**24, resume_invariant=True)
    packing: bool = key(True, "pack documents into sequences, separated by segment; false: one per row, padded",
        resume_invariant=True)
    long_documents: str = key("split", "packing=false: split a long document over several sequences, or truncate it",
        ("split", "truncate"), resume_invariant=True)
    batch_transform: str = key("", "module:function(rows) -> rows; changes batches and may add fields",
        resume_invariant=True)


@group
class DataSources:
    """Data"""
    dataset_type: str = key("text", "text (files, JSONL), tfds, array_record, parquet, tokens, hf, synthetic or custom",
        ("text", "tfds", "array_record", "parquet", "tokens", "hf", "synthetic", "custom"))
    dataset_path: str = path("", "file, folder or glob; tfds: the data folder; text: empty for Python's own source")
    dataset_name: str = key("", "tfds: name of the dataset, such as c4/en:3.0.1; hf: of its configuration")
    train_split: str = key("train", "tfds, hf, custom: split to train on; tfds: also a slice such as train[10%:]")
    dataset_column: str = key("text", "field with the text, or with token ids (JSONL, tfds, array_record, parquet, hf)")
    array_record_format: str = key("example",
        "array_record: records are example (tf.train.Example), json or text", ("example", "json", "text"))
    dataset_factory: str = key("", "custom: module:function(config, split) -> documents (docs/data.md)")
    datasets: tuple = key((), "mixture: [{name: web, weight: 7, dataset_path: ...}, ...]; defaults: keys above")
    eval_dataset_path: str = path("", "like dataset_path; empty: hold out part of the training data")
    eval_dataset_name: str = key("", "tfds, hf: like dataset_name", resume_invariant=False)
    eval_split: str = key("validation", "tfds, hf, custom: like train_split", resume_invariant=False)
    eval_datasets: tuple = key((), "like datasets: [{name: books, eval_steps: 10, dataset_path: ...}, ...]",
        resume_invariant=False)
    max_document_bytes: int = key(65_536,
        "text: cut longer documents, so that none occupies a row for many batches", FROM_64)
    eval_fraction: float = key(0.02, "fraction of the documents to hold out if eval_dataset_path is empty", BELOW_1)
    tokenizer_type: str = key("byte",
        "byte (256 bytes, bos, eos), sentencepiece or huggingface", ("byte", "sentencepiece", "huggingface"))
    tokenizer_path: str = path("",
        "sentencepiece: .model (src.train_tokenizer); huggingface: folder or hf://ORG/NAME", is_local=True)
    data_shuffle_seed: int = key(0, "seed of the document order", SEED)
    data_threads: int = key(1, "threads that build rows; more than one helps with a remote store", FROM_1, 2**10,
        resume_invariant=False)


@group
class Evaluation:
    """Evaluation"""
    eval_interval: int = key(-1, "steps between evaluations; there is also one at the end; -1: none", FROM_1_OR_UNSET)
    target_eval_loss: float = key(0.0, "end training once the eval_loss of every set is at most this; 0: never",
        FROM_0, commands=RUN_COMMANDS)
    eval_steps: int = key(-1, "batches per evaluation; -1: one epoch of the evaluation data", FROM_1_OR_UNSET)
    eval_mode: str = key("reset",
        "reset: start at the first batch; rolling: continue after the previous evaluation", ("reset", "rolling"))
    eval_per_device_batch_size: float = key(0.0,
        "like per_device_batch_size, in evaluation; 0: the same", FROM_0, 2**20)
    eval_metrics: str = key("", "module:function(logits, batch) -> {name: (sum, count)}; reported as sum / count")
    texts_path: str = path("", "texts to score, one per line, or JSONL with a field text", is_local=True, **_EVALUATE)
    scores_path: str = path("", "output file for the scores of texts_path, JSONL", is_local=True, **_EVALUATE)
    tokens_path: str = path("",
        "token ids to compute logits for, a .npy file of int32 [B, T]", is_local=True, **_EVALUATE)
    logits_path: str = path("", "output file for logits, .npy of float32 [B, T, V]", is_local=True, **_EVALUATE)
    results_path: str = path("", "output file for losses, bits per byte and counts, JSON", is_local=True, **_EVALUATE)


@group
class Checkpoint:
    """Checkpoints"""
    enable_checkpointing: bool = key(True, "save checkpoints, and resume from the newest intact one")
    async_checkpointing: bool = key(True, "continue training while a checkpoint is written")
    checkpoint_period: int = key(1000, "steps between checkpoints; one is also saved at the end and on SIGTERM", FROM_1)
    max_num_checkpoints_to_keep: int = key(3,
        "checkpoints left at the end (one more during training); -1: keep all", FROM_1_OR_UNSET)
    load_parameters_path: str = path("",
        "weights at step 0, from a run, checkpoint, Hugging Face folder or hf://ORG/NAME")
    load_weights_rules: tuple = key((),
        "first match wins: [{match: REGEX, path: as above, name: its name there, as \\1}]",
        commands=RUN_COMMANDS)
    load_ema: bool = key(False, "load_parameters_path, load_weights_rules: load the EMA of the weights (ema_decay)")
    load_full_state_path: str = path("", "a run or checkpoint to take weights, optimizer, step and data position from")


@group
class Mesh:
    """Mesh (sizes multiply to the number of devices; one ici and one dcn size may be -1: the rest)"""
    mesh_axes: tuple = key(tuple(MESH_AXES), "outermost first")
    ici_data_parallelism: int = key(1, "replicas of the weights; ici: within a TPU slice or a GPU host", AXIS_SIZE)
    ici_pipeline_parallelism: int = key(1, "pipeline stages, each with some of the layers (mesh axis stage)", AXIS_SIZE)
    ici_fsdp_parallelism: int = key(-1, "shards of the weights and of the batch", AXIS_SIZE)
    ici_context_parallelism: int = key(1, "shards of each sequence", AXIS_SIZE)
    ici_expert_parallelism: int = key(1, "shards of the experts, and of the batch", AXIS_SIZE)
    ici_tensor_parallelism: int = key(1, "shards of heads, hidden dims and vocabulary", AXIS_SIZE)
    dcn_data_parallelism: int = key(-1, "like ici_data_parallelism; dcn: between slices or hosts", AXIS_SIZE)
    dcn_pipeline_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_fsdp_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_context_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_expert_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_tensor_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    logical_axis_rules: Mapping = key({axis: axes for axis, (axes, _) in LOGICAL_AXES.items()},
        "logical dim of a weight or activation: the mesh axes that shard it",
        entries={axis: comment for axis, (_, comment) in LOGICAL_AXES.items()})
    num_pipeline_microbatches: int = key(-1,
        "M, parts of each micro-batch that pass through the S stages; -1: as many as stages", FROM_1_OR_UNSET, 2**16)
    num_pipeline_repeats: int = key(1,
        "R, passes of each part; -1: one repeat a pass; idle: (S - 1) / (M R + S - 1)",
        FROM_1_OR_UNSET, 2**16)
    coordinator_address: str = key("", "host:port of process 0; empty: JAX finds it (docs/parallelism.md says where)")
    num_processes: int = key(-1, "with coordinator_address: number of processes", AXIS_SIZE)
    process_id: int = key(-1, "with coordinator_address: index of this process, from 0", FROM_0_OR_UNSET, 2**20)
    jax_distributed_initialization_timeout: int = key(300,
        "seconds that a job waits for all its processes", FROM_1, 2**24)
    jax_distributed_heartbeat_timeout_seconds: int = key(30,
        "seconds of silence after which a host counts as lost", FROM_1, 2**16)


@dataclasses.dataclass(frozen=True)
class Data(DataSources, Conversations):
    """The data to read, and their tokenizer."""


def size_key(kind: str, mesh_axis: str) -> str:
    """Names the key for the size of a mesh axis within a slice (`kind` ici) or between slices (dcn)."""
    return f"{kind}_{MESH_AXES[mesh_axis]}_parallelism"


@dataclasses.dataclass(frozen=True, eq=False)
class Config(Mapping[str, Any]):
    """The configuration of a command, in typed sections: `config.run.steps`.

    It is also a mapping of all keys, for code that has a key's name in a variable.
    """

    run: Run
    model: Model
    step: Step
    batch: BatchKeys
    data: Data
    evaluation: Evaluation
    harness: HarnessTasks
    decoding: Decoding
    checkpoint: Checkpoint
    mesh: Mesh
    aot: Aot
    tools: Tools
    diagnostics: Diagnostics

    if not TYPE_CHECKING:  # a type checker reports such names itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raises UserError for a key without its section, lest a user's function take it for missing."""
            if name in KEYS:
                raise UserError(f"config.{name}: read config.{KEYS[name].section}.{name}")
            raise AttributeError(f"the configuration has no attribute {name}")

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "Config":
        """Builds a configuration from these keys, each of its type, and the defaults of all others."""
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in keys.items():
            values[KEYS[name].section][name] = frozen(value)
        return cls(**{name: section(**values[name]) for name, section in SECTIONS.items()})

    def replace(self, **keys: Any) -> "Config":
        """Returns a copy with other values for some keys."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in keys.items():
            changed.setdefault(KEYS[name].section, {})[name] = frozen(value)
        sections = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changed.items()}
        return dataclasses.replace(self, **sections)

    def __getitem__(self, name: str) -> Any:
        return getattr(getattr(self, KEYS[name].section), name)

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)


SECTIONS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
# A run cannot resume with another value of a key in these groups, unless the key is declared resume_invariant=False.
RESUME_INVARIANT_GROUPS = (DataSources, Conversations, Trainable)


def collect(sections: Mapping[str, type]) -> dict[str, Key]:
    """Collects the keys of all sections by name, in the order of base.yml; a group's docstring is its title there."""
    keys = {}
    for section, cls in sections.items():
        groups = [cls for cls in cls.__mro__ if cls.__bases__ == (object,)]  # other classes only combine groups
        for title, field in ((cls, field) for cls in groups for field in dataclasses.fields(cls)):
            declared: Key = field.metadata["key"]
            invariant = declared.resume_invariant
            if invariant is None:
                invariant = section == "model" or title in RESUME_INVARIANT_GROUPS
            keys[field.name] = dataclasses.replace(
                declared,
                name=field.name,
                section=section,
                group=title.__doc__ or "",
                per_layer=declared.per_layer or issubclass(LayerKeys, title),
                resume_invariant=invariant,
            )
    return keys


KEYS = collect(SECTIONS)


def defaults() -> dict[str, Any]:
    """Maps every key to its default, in the order of base.yml."""
    return {name: key.default for name, key in KEYS.items()}


def keys_of(section: str) -> tuple[str, ...]:
    """Lists the names of a section's keys, in the order of base.yml."""
    return tuple(name for name, key in KEYS.items() if key.section == section)
