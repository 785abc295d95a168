"""Lists which keys have an effect only with certain values of others, in every command or (`OF_TRAIN`) in src.train."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from src.config.attention_types import ATTENTION_TYPES, keys_of_type
from src.config.keys import ABOVE_0, FROM_1, FROM_2, Range
from src.config.optimizer_keys import OPTIMIZERS, SCHEDULES, reading
from src.config.schema import KEYS
from src.config.yaml import dump

IS_SET = Range("...", bool)
EMPTY = Range("(empty)", lambda value: not value)
ABOVE_1 = Range("a number above 1", lambda x: x > 1)
_PART = Range("a number below 1", lambda x: x < 1)


def _other(choice: str) -> Range:
    return Range(f"(not {choice})", lambda value: value != choice)


class Above(NamedTuple):
    """Stands for any number above the value of the key `key`."""

    key: str

    @property
    def words(self) -> str:
        """The condition as messages show it."""
        return f"(more than {self.key})"


class Requires:
    """Says that `keys` have an effect only if at least one key in `one_of` has a value that it requires.

    That is one value, one in a list, one in a `Range`, or one `Above` another key's. With no `one_of`, they never do.
    """

    def __init__(self, keys: str | Sequence[str], **one_of: Any) -> None:
        self.keys = keys.split() if isinstance(keys, str) else keys
        self.one_of = {key: of if isinstance(of, list | tuple) else [of] for key, of in one_of.items()}

    def satisfied(self, facts: Mapping[str, Any]) -> bool:
        """Returns whether the keys have an effect, given the values `facts` of a configuration's or a layer's keys."""
        return any(_holds(values, facts[key], facts) for key, values in self.one_of.items())

    def __str__(self) -> str:
        return " or ".join(
            f"{key}={values.words if isinstance(values, Range | Above) else ' or '.join(map(dump, values))}"
            for key, values in self.one_of.items()
        )


def _holds(values: Any, value: Any, facts: Mapping[str, Any]) -> bool:
    if isinstance(values, Above):
        return value > facts.get(values.key, 0)  # 0: the other key is invalid, and reported already
    return values.holds(value) if isinstance(values, Range) else value in values


class Lists(Requires):
    """As `Requires`, but a setting without effect is not an error: the command's notes list it."""


def _of_optimizers(key: str) -> Requires:
    """Requires an optimizer that reads the key, in `opt_type` or in a rule."""
    names = reading(OPTIMIZERS, key)
    rules = Range(
        f"[{{opt_type: {' or '.join(names)}}}]", lambda rules: any(it.get("opt_type") in names for it in rules)
    )
    return Requires(key, opt_type=names, optimizer_rules=rules)


def _read_by(table: Mapping[str, Any]) -> list[str]:
    """Lists the keys that any entry of `table`, OPTIMIZERS or SCHEDULES, has in its `reads`."""
    return list(dict.fromkeys(key for it in table.values() for key in it.reads))


def _of_group(start: str, *without: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS.values() if key.group.startswith(start) and not key.name.startswith(without))


_OF_TYPES = {key for declared in ATTENTION_TYPES.values() for key in keys_of_type(declared)}
# Keys under "Model: attention" that are not an attention type's own: a type reads all, none, or its `scores`.
OF_SCORES = tuple(key for key in _of_group("Model: attention", "attention_type") if key not in _OF_TYPES)
_OF_ROPE = _of_group("Model: positions", "position_type")
# Keys of layers that are read outside of them too: for the final norm, and for embeddings.
AROUND_LAYERS = (*_of_group("Model: norms"), "dropout_rate", "position_type")


def _of_type(key: str) -> Requires:
    """Requires a type that reads the key, or whose `scores` lack it: there, model_checks refuses the key."""
    shared = key in (*OF_SCORES, *_OF_ROPE)
    kinds = [kind for kind, it in ATTENTION_TYPES.items() if key in keys_of_type(it) or (shared and it.head_dim)]
    return Requires(key, attention_type=kinds)


_BY_LENGTH = ("llama3.1", "yarn", "dynamic", "longrope")  # rope_types that read original_max_position_embeddings
_SCALED_ROPE = ("linear", *_BY_LENGTH, "proportional")
_WITH_SCORES = [kind for kind, it in ATTENTION_TYPES.items() if it.head_dim]
_WITHOUT_FACTOR = ("dynamic", "longrope", "proportional")  # rope_types with an effect even if rope_factor is 1
# fmt: off
# Requirements of keys that may differ by layer. A layer's spec omits keys without effect on it.
LAYER_REQUIREMENTS = (
    *(_of_type(key) for key in KEYS if key in {*_OF_TYPES, *OF_SCORES, *_OF_ROPE}),
    Requires("attention_out_bias", attention_bias=True),
    Requires("attn_temperature_floor", attn_temperature_scale=ABOVE_0),
    Requires(_OF_ROPE, position_type="rope"),
    Requires("rope_factor", rope_type=_SCALED_ROPE),
    Requires("rope_type", rope_factor=ABOVE_1, rope_attention_factor=ABOVE_0, rope_type=_WITHOUT_FACTOR),
    Requires("original_max_position_embeddings", rope_type=_BY_LENGTH),
    Requires("rope_attention_factor", rope_type=["yarn", "longrope"]),
    Requires("rope_short_factor rope_long_factor", rope_type="longrope"),
    Requires("rope_low_freq_factor rope_high_freq_factor", rope_type="llama3.1"),
    Requires("beta_fast beta_slow rope_truncate mscale mscale_all_dim", rope_type="yarn"),
    Requires(["base_moe_mlp_dim", *_of_group("Model: feed-forward", "mlp_")], num_experts=FROM_2),
    Requires("shared_expert_gate", shared_experts=FROM_1),
    Requires("topk_routing_group routing_group_score", n_routing_groups=FROM_2),
    Requires("base_mlp_dim", num_experts=1, base_moe_mlp_dim=0),
)
_WITH_COLUMN = ("text", "tfds", "array_record", "parquet", "hf", "custom")
_READ = (*_WITH_COLUMN, "tokens")  # synthetic data are not read
_WITHOUT_STEPS = Range(
    "(an entry without eval_steps)", lambda sets: not sets or any("eval_steps" not in each for each in sets)
)
_NAMED_DATA = ("eval_dataset_path", "eval_dataset_name", "eval_datasets", "datasets")
_WITHOUT_PATH = Range(
    "(an entry without dataset_path)", lambda sets: not sets or any("dataset_path" not in each for each in sets)
)
_SAMPLED = ("weighted", "topk", "nucleus", "composite")
_STAGES = Range("2 or more", lambda size: size >= 2 or size == -1)
REQUIREMENTS = (
    *LAYER_REQUIREMENTS,
    Lists("log_period", quiet=False, weight_dtype="bfloat16"),  # also the step of NarrowWeights' report
    Requires("trainable_position_size", position_type="learned"),
    # Not in LAYER_REQUIREMENTS: a layer's spec, and so an exported model, keeps these settings.
    Lists("rope_type rope_factor", rope_type=_other("dynamic"),
         max_target_length=Above("original_max_position_embeddings")),
    Lists("attention", attention_type=_WITH_SCORES),
    Lists("position_type", attention_type=_WITH_SCORES, position_type=["learned", "sinusoidal"]),
    Lists("mscale", mscale_all_dim=ABOVE_0),
    Lists("mscale", rope_attention_factor=[0.0]),
    Lists("mscale_all_dim", mscale=ABOVE_0, attention_type="mla"),
    Lists("mscale_all_dim", rope_attention_factor=[0.0], attention_type="mla"),
    Lists("n_routing_groups topk_routing_group routing_group_score", n_routing_groups=Above("topk_routing_group")),
    Lists("rope_type", rope_type=_other("proportional"), rope_factor=ABOVE_1, partial_rotary_factor=_PART),
    Requires("load_balance_loss_weight router_z_loss_weight", num_experts=FROM_2),
    Requires("routed_bias_update_rate", routed_bias=True),
    Requires("mtp_loss_scaling_factor", mtp_num_layers=ABOVE_0),
    Requires("remat_custom", remat_policy="custom"),
    *(_of_optimizers(key) for key in _read_by(OPTIMIZERS)),
    Requires("abort_on_nan_loss abort_on_inf_loss", on_nonfinite="stop"),
    Requires("skip_step_interval skip_step_scaling_factor", skip_step_on_spikes=True),
    Requires("target_eval_loss", eval_interval=FROM_1),
    Lists("eval_steps", eval_datasets=_WITHOUT_STEPS),
    Requires("load_ema", load_parameters_path=IS_SET, load_weights_rules=IS_SET),
    *(Lists("init_weights_seed", **{key: EMPTY}, lora_rank=ABOVE_0, dropout_rate=ABOVE_0)
      for key in ("load_parameters_path", "load_full_state_path")),
    *(Requires(key, lr_schedule_type=reading(SCHEDULES, key)) for key in _read_by(SCHEDULES)),
    Lists("learning_rate_final_fraction", lr_schedule_type=_other("wsd"), wsd_decay_steps_fraction=ABOVE_0),
    Lists("lr_schedule_type learning_rate_final_fraction", warmup_steps_fraction=_PART),
    Requires("quantization_exclude", quantization=["int8", "fp8", "mxfp8"], quantize_weights="int8"),
    Requires("lora_alpha lora_parameters", lora_rank=ABOVE_0),
    Lists("dataset_path eval_dataset_path tokenizer_type tokenizer_path sample_length", dataset_type=_READ),
    Requires("dataset_name eval_dataset_name", dataset_type=["tfds", "hf"]),
    # With tfds, eval_dataset_name names data; with hf, only a configuration of the data that a path names.
    Lists("eval_dataset_name", dataset_type="tfds", eval_dataset_path=IS_SET, eval_datasets=IS_SET),
    Requires("train_split eval_split", dataset_type=["tfds", "hf", "custom"]),
    # Without these keys, a part of the training split is held out.
    Requires("eval_split", eval_dataset_path=IS_SET, eval_dataset_name=IS_SET, eval_datasets=IS_SET),
    # Data are held out of the only training set if no others are named.
    *(Lists("eval_fraction", **{key: EMPTY}) for key in _NAMED_DATA),
    Lists("eval_fraction", dataset_type=[kind for kind in _READ if kind != "hf"]),
    Requires("dataset_column", dataset_type=_WITH_COLUMN),
    Lists("dataset_column", dataset_type=[kind for kind in _READ if kind != "array_record"],
         array_record_format=["example", "json"]),
    Lists("dataset_column max_document_bytes", use_sft=False),
    Requires("array_record_format", dataset_type="array_record"),
    Requires("dataset_factory", dataset_type="custom"),
    Requires("max_document_bytes", dataset_type="text"),
    Requires("long_documents", packing=False),
    Lists("long_documents", dataset_type=_READ),
    Requires("per_device_batch_size_start per_device_batch_size_increment global_rampup_samples",
         enable_rampup_batch_size=True),
    Requires("sft_train_on_completion_only", use_sft=True),
    Requires("num_fewshot limit include_path", tasks=IS_SET),
    Lists("trust_tasks", include_path=IS_SET, tasks=Range("FILE.yaml", lambda names: ".y" in names)),
    Requires("decode_samples decode_prompt_tokens", decode_path=IS_SET, decode_metrics=IS_SET),
    Requires("decode_num_prompts", decode_prompt_tokens=ABOVE_0),
    Requires("decode_metrics", eval_interval=ABOVE_0),
    Lists("decode_sampling_temperature decode_seed", decode_sampling_strategy=_SAMPLED),
    Lists("decode_seed decode_sampling_top_k decode_sampling_nucleus_p", decode_sampling_temperature=ABOVE_0),
    Requires("decode_sampling_top_k", decode_sampling_strategy=["topk", "composite"]),
    Requires("decode_sampling_nucleus_p", decode_sampling_strategy=["nucleus", "composite"]),
    Requires("num_pipeline_microbatches num_pipeline_repeats",
         ici_pipeline_parallelism=_STAGES, dcn_pipeline_parallelism=_STAGES),
    Lists("async_checkpointing checkpoint_period max_num_checkpoints_to_keep", enable_checkpointing=True),
    Requires("skip_first_n_steps_for_profiler profiler_steps", profiler="xplane"),
    Requires("hang_after_seconds hang_action", hang_after_steps=ABOVE_0),
    Requires("stack_trace_to_cloud stack_trace_interval_seconds", collect_stack_trace=True),
)
_EVALUATION = [name for name, key in KEYS.items() if key.section == "evaluation" and not key.commands]
SAMPLING = [name for name, key in KEYS.items() if name.startswith(("decode_sampling", "decode_seed", "decode_stop"))]
SAMPLING += ["use_chat_template", "max_prefill_predict_length"]
# Further ones, for src.train only: other commands may read these keys without `eval_interval` or `sample_length`.
OF_TRAIN = (
    # With tfds, dataset_path is the folder of evaluation data too. With other types, `unused_keys._idle` refuses it if
    # every entry of `datasets` has a path.
    Lists("dataset_path", dataset_type=_other("tfds"), datasets=_WITHOUT_PATH, eval_dataset_name=IS_SET,
         eval_datasets=IS_SET),
    Lists([name for name in _EVALUATION if name != "eval_interval"], eval_interval=FROM_1),
    Lists([name for name in KEYS if name.startswith(("eval_dataset", "eval_split", "eval_fraction"))],
         eval_interval=FROM_1, dataset_type="synthetic"),  # without text to train on, they give the sample a tokenizer
    Lists(SAMPLING, sample_length=FROM_1, decode_metrics=IS_SET),
    Lists("decode_samples decode_prompt_tokens decode_num_prompts", decode_metrics=IS_SET),
)
# fmt: on

LISTS = ("decoder_segments", "datasets", "eval_datasets")  # keys with settings of layers or of datasets
TYPED = "on the command line"  # the source of settings that are not in a file


class Setting(NamedTuple):
    """One `key: value` or `key=value` as typed, with its source `where`, such as `in FILE`."""

    key: str
    value: Any
    where: str


def to_settings(keys: Mapping[str, Any], where: str) -> list[Setting]:
    """Makes a `Setting` of each key that a file or folder sets; `where` describes it, such as `in FILE`."""
    return [Setting(key, value, where) for key, value in keys.items()]


def unmet(needs: Iterable[Requires], facts: Mapping[str, Any]) -> list[Requires]:
    """Lists requirements that the values `facts` do not satisfy, except any with a key in `one_of` not in `facts`."""
    return [need for need in needs if need.one_of.keys() <= facts.keys() and not need.satisfied(facts)]


def may_be_unused(
    settings: Sequence[Setting], config: Mapping[str, Any], command: str, unread: Sequence[Requires]
) -> bool:
    """Returns whether any of the settings may have no effect: only then import `unused_keys`, which finds them."""
    names = {setting.key.partition(".")[0] for setting in settings} & config.keys()
    needs = [need for need in (*REQUIREMENTS, *unread) if names.intersection(need.keys)]
    return (
        command not in ("", "src.train")
        or any(KEYS[name].commands for name in names)
        or any(config.get(name) for name in LISTS)  # perhaps from a model's file
        or bool(unmet(needs, config))
    )
