"""Lists which keys need certain values of others, or certain commands, and finds settings without effect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from src.config.attention_types import ATTENTION_TYPES, keys_of_type
from src.config.dataset_spec import SETTINGS
from src.config.keys import ABOVE_0, FROM_1, FROM_2, Range
from src.config.optimizer_keys import OPTIMIZERS, SCHEDULES, reading
from src.config.schema import KEYS
from src.config.yaml import dump

IS_SET = Range("...", bool)
ABOVE_1 = Range("a number above 1", lambda x: x > 1)


class Requires:
    """Says that `keys` have an effect only if a key in `one_of` has its value, one of several, or one in a range."""

    def __init__(self, keys: str | Sequence[str], **one_of: Any) -> None:
        self.keys = keys.split() if isinstance(keys, str) else keys
        self.one_of = {key: of if isinstance(of, list | tuple) else [of] for key, of in one_of.items()}

    def satisfied(self, facts: Mapping[str, Any]) -> bool:
        """Returns whether the keys have an effect, given the values `facts` of a configuration's or a layer's keys."""
        return any(
            values.holds(facts[key]) if isinstance(values, Range) else facts[key] in values
            for key, values in self.one_of.items()
        )

    def __str__(self) -> str:
        return " or ".join(
            f"{key}={values.words if isinstance(values, Range) else ' or '.join(map(dump, values))}"
            for key, values in self.one_of.items()
        )


def _of_optimizers(key: str) -> Requires:
    """Requires an optimizer that reads the key, in `opt_type` or in a rule."""
    names = reading(OPTIMIZERS, key)
    rules = Range(
        f"[{{opt_type: {' or '.join(names)}}}]", lambda rules: any(it.get("opt_type") in names for it in rules)
    )
    return Requires(key, opt_type=names, optimizer_rules=rules)


def _read_by(table: Mapping[str, Any]) -> list[str]:
    """Lists the keys that some entries of a table read."""
    return list(dict.fromkeys(key for it in table.values() for key in it.reads))


def _of_group(start: str, *without: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS.values() if key.group.startswith(start) and not key.name.startswith(without))


_OF_TYPES = {key for declared in ATTENTION_TYPES.values() for key in keys_of_type(declared)}
# Keys under "Model: attention" that are not an attention type's own: a type reads all, none, or its `scores`.
OF_SCORES = tuple(key for key in _of_group("Model: attention", "attention_type") if key not in _OF_TYPES)
_OF_ROPE = _of_group("Model: positions", "position_type")


def _of_type(key: str) -> Requires:
    """Requires an attention type that reads the key, or refuses it, which model_checks reports."""
    shared = key in (*OF_SCORES, *_OF_ROPE)
    kinds = [kind for kind, it in ATTENTION_TYPES.items() if key in keys_of_type(it) or (shared and it.head_dim)]
    return Requires(key, attention_type=kinds)


_BY_LENGTH = ("llama3.1", "yarn", "dynamic", "longrope")  # rope_types that read original_max_position_embeddings
_SCALED_ROPE = ("linear", *_BY_LENGTH, "proportional")
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
_STAGES = Range("2 or more", lambda size: size >= 2 or size == -1)
REQUIREMENTS = (
    *LAYER_REQUIREMENTS,
    Requires("trainable_position_size", position_type="learned"),
    Requires("load_balance_loss_weight router_z_loss_weight", num_experts=FROM_2),
    Requires("routed_bias_update_rate", routed_bias=True),
    Requires("mtp_loss_scaling_factor", mtp_num_layers=ABOVE_0),
    Requires("remat_custom", remat_policy="custom"),
    *(_of_optimizers(key) for key in _read_by(OPTIMIZERS)),
    Requires("abort_on_nan_loss abort_on_inf_loss", on_nonfinite="stop"),
    Requires("skip_step_interval skip_step_scaling_factor", skip_step_on_spikes=True),
    Requires("target_eval_loss", eval_interval=FROM_1),
    Requires("load_ema", load_parameters_path=IS_SET, load_weights_rules=IS_SET),
    *(Requires(key, lr_schedule_type=reading(SCHEDULES, key)) for key in _read_by(SCHEDULES)),
    Requires("quantization_exclude", quantization=["int8", "fp8", "mxfp8"], quantize_weights="int8"),
    Requires("lora_alpha lora_parameters", lora_rank=ABOVE_0),
    Requires("dataset_name eval_dataset_name", dataset_type=["tfds", "hf"]),
    Requires("train_split eval_split", dataset_type=["tfds", "hf", "custom"]),
    # Without these keys, a part of the training split is held out.
    Requires("eval_split", eval_dataset_path=IS_SET, eval_dataset_name=IS_SET, eval_datasets=IS_SET),
    Requires("dataset_column", dataset_type=_WITH_COLUMN),
    Requires("array_record_format", dataset_type="array_record"),
    Requires("dataset_factory", dataset_type="custom"),
    Requires("max_document_bytes", dataset_type="text"),
    Requires("long_documents", packing=False),
    Requires("per_device_batch_size_start per_device_batch_size_increment global_rampup_samples",
         enable_rampup_batch_size=True),
    Requires("sft_train_on_completion_only", use_sft=True),
    Requires("num_fewshot limit include_path", tasks=IS_SET),
    Requires("decode_samples decode_prompt_tokens", decode_path=IS_SET, decode_metrics=IS_SET),
    Requires("decode_num_prompts", decode_prompt_tokens=ABOVE_0),
    Requires("decode_metrics", eval_interval=ABOVE_0),
    Requires("decode_sampling_top_k", decode_sampling_strategy=["topk", "composite"]),
    Requires("decode_sampling_nucleus_p", decode_sampling_strategy=["nucleus", "composite"]),
    Requires("num_pipeline_microbatches num_pipeline_repeats",
         ici_pipeline_parallelism=_STAGES, dcn_pipeline_parallelism=_STAGES),
    Requires("skip_first_n_steps_for_profiler profiler_steps", profiler="xplane"),
    Requires("hang_after_seconds hang_action", hang_after_steps=ABOVE_0),
    Requires("stack_trace_to_cloud stack_trace_interval_seconds", collect_stack_trace=True),
)
# fmt: on
# Keys that these commands do not take, because their data or loop has no use for them.
_UNUSED_BY = {
    "src.train_dpo": (
        *("use_sft", "sft_train_on_completion_only", "dataset_column", "max_document_bytes", "sample_length"),
        *("decode_metrics", "compiled_trainstep_file", "pgle", "pgle_profile", "packing", "long_documents"),
    )
}


TYPED = "on the command line"  # the source of settings that are not in a file


class Setting(NamedTuple):
    """One `key: value` or `key=value` as typed, with its source `where`, such as `in FILE`."""

    key: str
    value: Any
    where: str


def to_settings(keys: Mapping[str, Any], where: str) -> list[Setting]:
    """Makes a setting of each key in a file or a folder, described by `where`."""
    return [Setting(key, value, where) for key, value in keys.items()]


def unused_keys(
    settings: Sequence[Setting], config: Mapping[str, Any], failed: set[str], command: str, notes: list[str]
) -> list[tuple[str, str]]:
    """Finds a user's settings that differ from the default but have no effect; returns (key, sentence) for each.

    `settings` are in the order in which they apply, and `config` is the result. Skips keys in `failed`, and keys that a
    source after their own made unused. With a `command`, also finds keys that it does not read; their sentences go to
    `notes` if `Key.ignored` allows them.
    """
    last = {setting.key.partition(".")[0]: (number, setting) for number, setting in enumerate(settings)}
    known = {key: value for key, value in config.items() if key not in failed}
    problems = []
    for key, (number, setting) in last.items():
        changed = {later.key.partition(".")[0] for later in settings[number:] if later.where != setting.where}
        if key in known and known[key] != KEYS[key].default:
            commands, sentence = KEYS[key].commands, f"{key}={dump(known[key])} ({setting.where}) has no effect: "
            if command and ((commands and command not in commands) or key in _UNUSED_BY.get(command, ())):
                taken = {"anywhere": True, "in files": setting.where != TYPED, "nowhere": False}[KEYS[key].ignored]
                sentence += f"it is for {(*commands, 'src.train')[0]}, and this is {command}"
                notes += [sentence] * taken
                problems += [(key, sentence)] * (not taken)
            else:
                problems += [(key, sentence + reason) for reason in _idle(key, known, changed)]
    segments = known.get("decoder_segments", ()) if "decoder_segments" in last else ()
    for number, facts in [(number, facts) for number, each in enumerate(segments, 1) for facts in each["pattern"]]:
        layer = {**known, **facts}
        unmet = [
            need for need in LAYER_REQUIREMENTS if need.one_of.keys() <= layer.keys() and not need.satisfied(layer)
        ]
        for fact, need in ((fact, each) for each in unmet for fact in each.keys if fact in facts):
            if facts[fact] != KEYS[fact].default:
                sentence = f"{fact}={dump(facts[fact])} has no effect: it needs {need}"
                problems.append(("decoder_segments", f"decoder_segments, segment {number}: {sentence}"))
    return problems


def _idle(key: str, config: Mapping[str, Any], changed: set[str]) -> Iterator[str]:
    """Yields the reasons why a key has no effect on any layer or dataset, except reasons due to the keys `changed`."""
    whole, places = _places(key, config)
    if not places:
        if whole not in changed:
            yield f"{whole} sets it for each entry; to use this value instead, add {whole.replace(' and ', '=[] ')}=[]"
        return
    needs = [need for need in REQUIREMENTS if key in need.keys and need.one_of.keys() <= config.keys()]
    for need in needs:
        if not changed & {*need.one_of, whole} and not any(need.satisfied({**config, **place}) for place in places):
            yield f"it needs {need}"


def _places(key: str, config: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]]:
    """Finds the layers, or for a key of data the datasets, that do not replace the key's value by their own.

    Returns the key that lists layers or datasets, and the settings of each one found.
    """
    if KEYS[key].section != "data":
        layers = [facts for entry in config.get("decoder_segments", ()) for facts in entry["pattern"]] or [{}]
        return "decoder_segments", [facts for facts in layers if key not in facts]
    setting = next((setting for setting, keys in SETTINGS.items() if key in keys), key)
    names = SETTINGS.get(setting, (key, key))
    lists = {name for name, used in zip(("datasets", "eval_datasets"), names, strict=True) if used == key}
    entries = [entry for name in lists for entry in config.get(name) or ({},)]
    return " and ".join(sorted(lists)), [entry for entry in entries if setting not in entry]
