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
EMPTY = Range("(empty)", lambda value: not value)
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


class Lists(Requires):
    """As `Requires`, but a setting without effect is not refused: a line lists it."""


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
_READ = (*_WITH_COLUMN, "tokens")  # synthetic data are not read
_WITHOUT_STEPS = Range(
    "(an entry without eval_steps)", lambda sets: not sets or any("eval_steps" not in each for each in sets)
)
_NAMED_DATA = ("eval_dataset_path", "eval_dataset_name", "eval_datasets", "datasets")
_SAMPLED = ("weighted", "topk", "nucleus", "composite")
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
    Lists("eval_steps", eval_datasets=_WITHOUT_STEPS),
    Requires("load_ema", load_parameters_path=IS_SET, load_weights_rules=IS_SET),
    *(Requires(key, lr_schedule_type=reading(SCHEDULES, key)) for key in _read_by(SCHEDULES)),
    Requires("quantization_exclude", quantization=["int8", "fp8", "mxfp8"], quantize_weights="int8"),
    Requires("lora_alpha lora_parameters", lora_rank=ABOVE_0),
    Lists("dataset_path eval_dataset_path tokenizer_type tokenizer_path sample_length", dataset_type=_READ),
    Requires("dataset_name eval_dataset_name", dataset_type=["tfds", "hf"]),
    # In tfds it names data; in hf it is only a configuration of the data that a path names.
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
# fmt: on

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
    settings: Sequence[Setting],
    config: Mapping[str, Any],
    failed: set[str],
    notes: list[str],
    command: str,
    unread: Sequence[Requires] = (),
) -> list[tuple[str, str]]:
    """Finds a user's settings that differ from the default but have no effect; returns (key, sentence) for each.

    `settings` are in the order in which they apply, and `config` is the result. Skips keys in `failed`, and keys that a
    source after their own made unused. With a `command`, also finds keys that are for others, or that are `unread`
    (see `unread_keys.UNREAD`). Settings that may be ignored are listed in `notes` instead.
    """
    last = {setting.key.partition(".")[0]: (number, setting) for number, setting in enumerate(settings)}
    known = {key: value for key, value in config.items() if key not in failed}
    unread = [need for need in unread if need.one_of.keys() <= known.keys() and not need.satisfied(known)]
    not_read = {key for need in unread for key in need.keys}
    problems: list[tuple[str, str]] = []
    ignored: dict[tuple[str, str], list[str]] = {}  # settings that `notes` lists together, by source and reason
    for key, (number, setting) in last.items():
        if key not in known or known[key] == KEYS[key].default:
            continue
        changed = {later.key.partition(".")[0] for later in settings[number:] if later.where != setting.where}
        found = _of_others(key, command, unread) or _idle(key, known, changed, not_read)
        if not found:
            continue
        reason, ignored_where = found
        typed = f"{key}={dump(known[key])}"
        if {"anywhere": True, "in files": setting.where != TYPED, "nowhere": False}[ignored_where]:
            ignored.setdefault((setting.where, reason), []).append(typed)
        else:
            problems.append((key, _no_effect([typed], setting.where, reason)))
    for key, place, facts, needs in _listed(known):
        unmet = [need for need in needs if need.one_of.keys() <= facts.keys() | known.keys()]
        for fact, need in ((fact, each) for each in unmet for fact in each.keys if fact in facts):
            if key in last and facts[fact] != KEYS[fact].default and not need.satisfied({**known, **facts}):
                typed, where = f"{fact}={dump(facts[fact])}", f"{key}, {place}"
                if key == "decoder_segments":
                    problems.append((key, f"{where}: {typed} has no effect: it needs {need}"))
                else:
                    typed = typed.removeprefix("train_").removeprefix("eval_")  # as an entry spells it
                    ignored.setdefault((where, f"it needs {need}"), []).append(typed)
    notes += [_no_effect(typed, *why) for why, typed in ignored.items()]
    return problems


def _no_effect(settings: Sequence[str], where: str, reason: str) -> str:
    """Words the sentence for settings that have the same `reason`, which is worded for one setting."""
    if len(settings) == 1:
        return f"{settings[0]} ({where}) has no effect: {reason}"
    for one, several in {"it is": "they are", "it needs": "they need", "reads it": "reads them"}.items():
        reason = reason.replace(one, several)
    return f"{', '.join(settings)} ({where}) have no effect: {reason}"


def _of_others(key: str, command: str, unmet: Sequence[Requires]) -> tuple[str, str] | None:
    """Returns why `command` does not read a key, and where it may be ignored, as `Key.ignored`; None if it does."""
    need = next((each for each in unmet if key in each.keys), None)
    commands, ignored = KEYS[key].commands, "anywhere" if isinstance(need, Lists) else KEYS[key].ignored
    if need and need.one_of:
        return f"{command} reads it only with {need}", ignored
    if need or (command and commands and command not in commands):
        return f"it is for {(*commands, 'src.train')[0]}, and this is {command}", ignored
    return None


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any], Sequence[Requires]]]:
    """Yields what describes each layer or dataset in a list: the list's key, the place, its keys, requirements."""
    for number, entry in enumerate(config.get("decoder_segments", ()), 1):
        for facts in entry["pattern"]:
            yield "decoder_segments", f"segment {number}", facts, LAYER_REQUIREMENTS
    for is_eval, name in enumerate(("datasets", "eval_datasets")):
        for entry in config.get(name, ()):
            facts = {keys[is_eval]: entry[setting] for setting, keys in SETTINGS.items() if setting in entry}
            yield name, entry["name"], facts, REQUIREMENTS


def _idle(key: str, config: Mapping[str, Any], changed: set[str], not_read: set[str]) -> tuple[str, str] | None:
    """Returns, as `_of_others`, why a key affects no layer or dataset, if not due to keys `changed` or `not_read`."""
    lists, places = _places(key, config)
    if changed & lists:
        return None
    if not places:
        whole = " and ".join(sorted(lists))
        instead = whole.replace(" and ", "=[] ")
        return f"{whole} sets it for each entry; to use this value instead, add {instead}=[]", "nowhere"
    needs = [need for need in REQUIREMENTS if key in need.keys and need.one_of.keys() <= config.keys() - not_read]
    for need in needs:
        if not changed & need.one_of.keys() and not any(need.satisfied({**config, **place}) for place in places):
            return f"it needs {need}", "anywhere" if isinstance(need, Lists) else "nowhere"
    return None


def _places(key: str, config: Mapping[str, Any]) -> tuple[set[str], list[Mapping[str, Any]]]:
    """Finds the layers, or for a key of data or decoding the datasets, that do not have a value of their own.

    Returns the keys that list layers or datasets, and the settings of each one found.
    """
    if KEYS[key].section not in ("data", "decoding"):  # a text of a model needs a tokenizer, which comes with data
        layers = [facts for entry in config.get("decoder_segments", ()) for facts in entry["pattern"]] or [{}]
        return {"decoder_segments"}, [facts for facts in layers if key not in facts]
    setting = next((setting for setting, keys in SETTINGS.items() if key in keys), key)
    names = SETTINGS.get(setting, (key, key))
    lists = {name for name, used in zip(("datasets", "eval_datasets"), names, strict=True) if used == key}
    entries = [entry for name in lists for entry in config.get(name) or ({},)]
    return lists, [entry for entry in entries if setting not in entry]
