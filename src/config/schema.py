"""Every key of the configuration, declared once, and `Config`, its typed sections.

`configs/base.yml` is written from here: `python -m src.config.base_yml > configs/base.yml`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from src.config import keys
from src.config.command_keys import (
    RUN_COMMANDS,
    Aot,
    Conversations,
    Decoding,
    Diagnostics,
    HarnessTasks,
    Preferences,
    Tools,
)
from src.config.keys import ABOVE_0, AXIS_SIZE, FROM_0, FROM_1, FROM_1_OR_UNSET, FROM_64, Key, frozen, group, key, path
from src.config.model_keys import AttentionFacts, FeedForwardFacts, LayerFacts, Model, ModelSize, PositionFacts
from src.config.step_keys import Compilation, Numerics, Optimizer, Quantization, Step, Trainable

# The mesh's axes, and the word for each in the keys of its sizes: ici_WORD_parallelism and dcn_WORD_parallelism.
MESH_AXES = {axis: axis for axis in ("data", "stage", "fsdp", "context", "expert", "tensor")} | {"stage": "pipeline"}
# The logical dims of weights and activations: the mesh axes that shard each, and what it is.
LOGICAL_AXES = {
    "batch": (("data", "fsdp", "expert"), "rows"),
    "length": (("context",), "the sequence, within a block"),
    "norm_length": (("context",), "the sequence, between blocks, where the norms are; [context, tensor]: less memory"),
    "activation_embed": ((), "the residual stream's width"),
    "vocab": (("tensor", "stage"), ""),
    "embed": (("fsdp", "context", "expert"), ""),
    "heads": (("tensor",), ""),
    "kv_heads": (("tensor",), ""),
    "head_dim": ((), ""),
    "mlp": (("tensor",), ""),
    "expert": (("expert",), ""),
    "expert_embed": (("fsdp", "context"), "embed, of the weights of experts"),
    "latent": (
        ("fsdp", "context", "expert"),
        "ranks of latent attention; a mesh that does not divide them has them whole",
    ),
    "position": ((), ""),
    "layers": (("stage",), "the repeats of the segment with the most layers"),
    "other_layers": ((), "those of the others"),
}

_EVALUATE, _RUNS = {"commands": ("src.evaluate",)}, {"commands": RUN_COMMANDS}


# fmt: off
@group
class Run:
    """Run"""
    run_name: str = key("", "folder of the run below base_output_directory, such as a or sweep/a; empty: a dated name")
    base_output_directory: str = path("runs", "any path etils reads: a local folder, gs://bucket/dir, s3://bucket/dir")
    model_name: str = key("",
        "configs/models/NAME.yml, a path to such a file, a model's or run's folder, hf://ORG/NAME; empty: as below")
    hardware: str = key("", "empty: detected; cpu, gpu or tpu: an error if another is found", ("", "cpu", "gpu", "tpu"))
    steps: int = key(10_000, "optimizer steps of the whole run; -1: learning_rate_schedule_steps", FROM_1_OR_UNSET)
    log_period: int = key(1, "steps between printed lines; metrics.jsonl has every step", FROM_1)
    quiet: bool = key(False, "print no header and no line of a step before the last, as in a sweep")
    accept_changes: tuple = key((), "keys a resumed run may change although they alter weights, data or its order")


@group
class BatchKeys:
    """Batch"""
    per_device_batch_size: float = key(12.0,
        "rows per device and micro-batch; a fraction where devices share a row", ABOVE_0, 2**20)
    enable_rampup_batch_size: bool = key(False, "the batch grows to that, from a smaller one (docs/data.md)", **_RUNS)
    per_device_batch_size_start: float = key(4.0, "... rows per device and micro-batch at first", ABOVE_0, **_RUNS)
    per_device_batch_size_increment: float = key(2.0, "... and what each further size adds", ABOVE_0, **_RUNS)
    global_rampup_samples: int = key(500, "... rows until it is full, an equal part for each smaller size", FROM_1,
        2**40, **_RUNS)
    max_target_length: int = key(2048, "T, tokens per row", FROM_1, 2**24, resume_invariant=True)
    packing: bool = key(True, "true: documents fill rows, apart by segment; false: one a row, padded",
        resume_invariant=True)
    long_documents: str = key("split", "packing=false: what does not fit goes on (split) or is left out (truncate)",
        ("split", "truncate"), resume_invariant=True)
    batch_transform: str = key("", "module:function(rows) -> rows: alters batches, may add fields",
        resume_invariant=True)


@group
class DataSources:
    """Data"""
    dataset_type: str = key("text", "text (files, JSONL), tfds, array_record, parquet, tokens, hf, synthetic or custom",
        ("text", "tfds", "array_record", "parquet", "tokens", "hf", "synthetic", "custom"))
    dataset_path: str = path("", "a file, folder or glob; tfds: the data folder; text: empty is Python's own source")
    dataset_name: str = key("", "tfds: the dataset, such as c4/en:3.0.1; hf: its configuration")
    train_split: str = key("train", "tfds, hf: of the dataset; tfds: such as train[10%:]")
    dataset_column: str = key("text", "JSONL, tfds, array_record, parquet, hf: the field with a text, or a list of ids")
    array_record_format: str = key("example",
        "array_record: a record is an example (tf.train.Example), json or text", ("example", "json", "text"))
    dataset_factory: str = key("", "custom: module:function(config, split) -> documents (docs/data.md)")
    datasets: tuple = key((), "a mixture: [{name: web, weight: 7, dataset_path: ...}, ...], other keys as above")
    eval_dataset_path: str = path("", "as dataset_path; empty: a held-out part of the training data")
    eval_dataset_name: str = key("", "tfds: as dataset_name", resume_invariant=False)
    eval_split: str = key("validation", "tfds: as train_split", resume_invariant=False)
    eval_datasets: tuple = key((), "as datasets: [{name: books, eval_steps: 10, dataset_path: ...}, ...]",
        resume_invariant=False)
    max_document_bytes: int = key(65_536, "text: longer documents are cut, or one would own a row for long", FROM_64)
    eval_fraction: float = key(0.02, "of the documents held out where eval_dataset_path is empty", keys.BELOW_1)
    tokenizer_type: str = key("byte",
        "byte (256 bytes, bos, eos), sentencepiece or huggingface", ("byte", "sentencepiece", "huggingface"))
    tokenizer_path: str = path("",
        "sentencepiece: a .model file (src.train_tokenizer); huggingface: a model folder, hf://ORG/NAME", is_local=True)
    data_shuffle_seed: int = key(0, "of the order of documents", keys.SEED)
    data_threads: int = key(1, "threads that make rows; more pay with a remote store", FROM_1, 2**10,
        resume_invariant=False)


@group
class Evaluation:
    """Evaluation"""
    eval_interval: int = key(-1, "steps between evaluations, and one at the end; -1: none", FROM_1_OR_UNSET)
    target_eval_loss: float = key(0.0, "training ends once the eval_loss of every set is at most this; 0: never",
        FROM_0, commands=RUN_COMMANDS)
    eval_steps: int = key(-1, "batches per evaluation; -1: one epoch of the evaluation data", FROM_1_OR_UNSET)
    eval_mode: str = key("reset",
        "each evaluation begins with the first batch (reset) or after the last one's (rolling)", ("reset", "rolling"))
    eval_per_device_batch_size: float = key(0.0, "0: per_device_batch_size", FROM_0, 2**20)
    eval_metrics: str = key("", "module:function(logits, batch) -> {name: (sum, count)}: evaluations report quotients")
    texts_path: str = path("", "texts to score, one per line or JSONL with a field text", is_local=True, **_EVALUATE)
    scores_path: str = path("", "where the scores of texts_path go, JSONL", is_local=True, **_EVALUATE)
    tokens_path: str = path("", "ids to compute logits for, a .npy file of int32 [B, T]", is_local=True, **_EVALUATE)
    logits_path: str = path("", "where their logits go, a .npy file of float32 [B, T, V]", is_local=True, **_EVALUATE)
    results_path: str = path("", "where losses, bits per byte and counts go as JSON", is_local=True, **_EVALUATE)


@group
class Checkpoint:
    """Checkpoints"""
    enable_checkpointing: bool = key(True, "save, and resume from the newest good one")
    async_checkpointing: bool = key(True, "training goes on while a checkpoint is written")
    checkpoint_period: int = key(1000, "steps between checkpoints; one is also saved at the end and on SIGTERM", FROM_1)
    max_num_checkpoints_to_keep: int = key(3, "at the end; one more in training; -1: all are kept", FROM_1_OR_UNSET)
    load_parameters_path: str = path("", "a run, checkpoint, Hugging Face folder or hf://ORG/NAME: its weights, step 0")
    load_weights_rules: tuple = key((),
        "each weight by the first that fits: [{match: REGEX, path: as above, name: there, as \\1}, ...]",
        commands=RUN_COMMANDS)
    load_ema: bool = key(False, "of both above: the averages of those runs' weights (ema_decay)")
    load_full_state_path: str = path("", "the same: start with its weights, optimizer, step and data position")


@group
class Mesh:
    """Mesh (sizes multiply to the devices; one ici and one dcn size may be -1: what is left)"""
    mesh_axes: tuple = key(tuple(MESH_AXES), "outermost first")
    ici_data_parallelism: int = key(1, "copies of the weights; ici: within a TPU slice or a GPU host", AXIS_SIZE)
    ici_pipeline_parallelism: int = key(1, "stages of a pipeline, each with some layers: the axis stage", AXIS_SIZE)
    ici_fsdp_parallelism: int = key(-1, "shards of the weights and of the rows", AXIS_SIZE)
    ici_context_parallelism: int = key(1, "parts of the sequence", AXIS_SIZE)
    ici_expert_parallelism: int = key(1, "shards of the experts, and of the rows beside them", AXIS_SIZE)
    ici_tensor_parallelism: int = key(1, "shards of heads, hidden dims and vocabulary", AXIS_SIZE)
    dcn_data_parallelism: int = key(-1, "the same; dcn: between slices or hosts", AXIS_SIZE)
    dcn_pipeline_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_fsdp_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_context_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_expert_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    dcn_tensor_parallelism: int = key(1, "between slices or hosts", AXIS_SIZE)
    logical_axis_rules: Mapping = key({axis: axes for axis, (axes, _) in LOGICAL_AXES.items()},
        "logical dim of a weight or activation: the mesh axes that shard it",
        entries={axis: comment for axis, (_, comment) in LOGICAL_AXES.items()})
    num_pipeline_microbatches: int = key(-1,
        "M, parts of a micro-batch's rows that go through the stages; -1: as many as stages", FROM_1_OR_UNSET, 2**16)
    num_pipeline_repeats: int = key(1,
        "R, how often each goes through; -1: one repeat per turn; (stages - 1) / (M R + stages - 1) is idle",
        FROM_1_OR_UNSET, 2**16)
    coordinator_address: str = key("", "host:port of process 0; empty: found by JAX (docs/parallelism.md says where)")
    num_processes: int = key(-1, "with coordinator_address: how many", AXIS_SIZE)
    process_id: int = key(-1, "with coordinator_address: which, from 0", keys.FROM_0_OR_UNSET, 2**20)
    jax_distributed_initialization_timeout: int = key(300, "seconds a job waits for all its processes", FROM_1, 2**24)
    jax_distributed_heartbeat_timeout_seconds: int = key(30, "seconds after which a silent host is lost", FROM_1, 2**16)


@dataclasses.dataclass(frozen=True)
class Data(DataSources, Conversations):
    """The data that are read, and their tokenizer."""


def size_key(kind: str, mesh_axis: str) -> str:
    """Returns the key of a mesh axis's size within a slice (`kind` ici) or between slices (dcn)."""
    return f"{kind}_{MESH_AXES[mesh_axis]}_parallelism"


@dataclasses.dataclass(frozen=True, eq=False)
class Config(Mapping[str, Any]):
    """The configuration of a command, in typed sections; for commands also a flat mapping (`config["steps"]`)."""

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

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "Config":
        """Returns the configuration with these keys, each of its type, and the defaults of the others."""
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in keys.items():
            values[KEYS[name].section][name] = frozen(value)
        return cls(**{name: section(**values[name]) for name, section in SECTIONS.items()})

    def replace(self, **keys: Any) -> "Config":
        """Returns the configuration with other values of some keys."""
        return Config.of({**self, **keys})

    def __getitem__(self, name: str) -> Any:
        return getattr(getattr(self, KEYS[name].section), name)

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS:
            raise AttributeError(f"no section or key {name}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)


SECTIONS: dict[str, type] = {field.name: field.type for field in dataclasses.fields(Config)}
# In base.yml's order; its titles are the docstrings.
GROUPS: list[type] = [
    *(Run, ModelSize, LayerFacts, AttentionFacts, PositionFacts, FeedForwardFacts, Numerics, Quantization),
    *(Compilation, Aot, Optimizer, BatchKeys, DataSources, Tools, Conversations, Trainable, Preferences, Evaluation),
    *(HarnessTasks, Decoding, Checkpoint, Mesh, Diagnostics),
]
# A run resumed with another value of one of their keys is another run, unless resume_invariant=False declares it.
RESUME_INVARIANT_GROUPS = (DataSources, Conversations, Trainable)


def collect(groups: Sequence[type], sections: Mapping[str, type]) -> dict[str, Key]:
    """Returns the keys that the groups declare, by name, each with the section that its group is a part of."""
    keys = {}
    for title, (section, cls) in itertools.product(groups, sections.items()):
        for field in dataclasses.fields(title) if issubclass(cls, title) else ():
            declared: Key = field.metadata["key"]
            invariant = declared.resume_invariant
            if invariant is None:
                invariant = title in RESUME_INVARIANT_GROUPS
            place = {"name": field.name, "section": section, "group": title.__doc__}
            keys[field.name] = dataclasses.replace(declared, **place, resume_invariant=invariant or section == "model")
    return keys


KEYS = collect(GROUPS, SECTIONS)


def defaults() -> dict[str, Any]:
    """Returns every key with its default, in base.yml's order."""
    return {name: key.default for name, key in KEYS.items()}


def keys_of(section: str) -> tuple[str, ...]:
    """Returns the names of a section's keys, in base.yml's order."""
    return tuple(name for name, key in KEYS.items() if key.section == section)


def section_of(section: str, keys: Mapping[str, Any]) -> Any:
    """Returns a section with those of the flat keys that are its own, and the defaults of its others."""
    return SECTIONS[section](**{name: frozen(keys[name]) for name in keys_of(section) if name in keys})
