"""A family of models: how its config.json and its tensors correspond to ours.

A table reads config.json entries into keys of base.yml, and writes them back. A table row is a `Field`, one entry for
one key, or a `FieldGroup`, entries that only make sense together. If two rows have the same entry or key, the later one
wins.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from src.config.model_checks import check_value
from src.config.requirements import LAYER_REQUIREMENTS
from src.config.schema import KEYS, Model
from src.config.yaml import type_name
from src.extras.hf.tensor_map import TensorMap
from src.system.errors import UserError

Keys = dict[str, Any]
Json = Mapping[str, Any]
Layers = Sequence[Model]  # the settings of each layer, first to last

REQUIRED, UNSET = object(), object()  # values of `Field.absent`

# Key values that mean "none" or "same as another key": no number in config.json has this meaning.
NOT_IN_JSON = {
    **dict.fromkeys(("attn_logits_soft_cap", "final_logits_soft_cap", "query_pre_attn_scalar"), 0),
    **dict.fromkeys(("mlp_activations_limit", "sliding_window_size", "chunk_attn_window_size", "base_moe_mlp_dim"), 0),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    **{"num_experts": 1, "rope_attention_factor": 0},
}


@dataclass(frozen=True)
class Field:
    """An entry of config.json and the base.yml key of the same meaning."""

    name: str  # in config.json
    key: str  # in base.yml
    # The key's value if the entry is absent or null, or a function that computes it from the keys read so far.
    # REQUIRED: the entry must exist. UNSET: base.yml's default applies.
    absent: Any = REQUIRED
    # config.json's values -> the key's, if they differ. An export writes the first entry with the key's value, or
    # else the very first one.
    values: Mapping[Any, Any] | None = None
    written: Callable[[Model], Any] | None = None  # computes the entry from a layer, if reversing `read` is not enough

    def read(self, hf: Json, keys: Keys) -> Keys:
        """Returns the key and its value, or {} if base.yml's default applies; `keys` are the ones of the rows above.

        Raises UserError for a value that is invalid or has no equivalent.
        """
        default = KEYS[self.key].default
        if hf.get(self.name) is None:
            if self.absent is not UNSET:
                return {self.key: self.absent(keys) if callable(self.absent) else self.absent}
            # transformers treats null as false.
            return {self.key: False} if isinstance(default, bool) and self.name in hf else {}
        if self.values:
            if (value := hf[self.name]) not in list(self.values):
                known = ", ".join(map(str, self.values))
                raise UserError(f"config.json has {self.name} {value}: expected one of {known}")
            return {self.key: self.values[value]}
        value = entry(hf, self.name, default)
        if problem := check_value(self.key, value):
            raise UserError(f"config.json has {self.name} {json.dumps(value)}: {problem}")
        if value == NOT_IN_JSON.get(self.key):
            raise UserError(f"config.json has {self.name} {value}, which is not supported: expected more")
        return {self.key: value}

    def write(self, layers: Layers) -> Json:
        """Writes the entry that `read` reads as this key, taken from the first layer to which the key applies."""
        layer = layer_with(layers, self.key)
        value = getattr(layer, self.key)
        if self.written:
            value = self.written(layer)
        elif self.values:
            value = next((name for name, other in self.values.items() if other == value), next(iter(self.values)))
        elif self.absent is UNSET and value == NOT_IN_JSON.get(self.key):
            value = None
        return {self.name: list(value) if isinstance(value, tuple) else value}


@dataclass(frozen=True)
class FieldGroup:
    """Entries of config.json that only make sense together."""

    name: str  # names of the entries, separated by spaces
    # Maps config.json and the keys above to further keys; raises UserError for unsupported values.
    read: Callable[[Json, Keys], Keys | None] = lambda hf, keys: None
    write: Callable[[Layers], Json] = lambda layers: {}


Table = tuple[Field | FieldGroup, ...]


def layer_with(layers: Layers, key: str) -> Model:
    """Returns the first layer on which a key has an effect, or else the first layer."""
    needs = [need for need in LAYER_REQUIREMENTS if key in need.keys]
    return next((layer for layer in layers if all(need.satisfied(vars(layer)) for need in needs)), layers[0])


def required_entries(table: Table) -> list[str]:
    """Lists the entries that a config.json must have."""
    return list(dict.fromkeys(row.name for row in table if isinstance(row, Field) and row.absent is REQUIRED))


def read_fields(table: Table, hf: Json) -> Keys:
    """Reads a table's keys from config.json; raises UserError if an entry is missing or not supported."""
    if missing := [name for name in required_entries(table) if hf.get(name) is None]:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    keys: Keys = {}
    for row in table:
        keys.update(row.read(hf, keys) or {})
    return keys


def write_fields(table: Table, layers: Layers) -> Json:
    """Writes the config.json entries that `read_fields` reads as the layers' keys."""
    return {name: value for row in table for name, value in row.write(layers).items()}


def entry(hf: Json, name: str, default: Any) -> Any:
    """Returns an entry, or `default` if absent or null (null booleans are false); raises UserError for another type."""
    value = hf.get(name)
    if value is None:
        return False if isinstance(default, bool) and name in hf else default
    fits = {float: (int, float), tuple: list}.get(type(default), type(default))
    # A bool is an int in Python.
    if not isinstance(value, fits) or isinstance(value, bool) != isinstance(default, bool):
        expected = type_name(default).partition(",")[0]
        raise UserError(f"config.json has {name} {json.dumps(value)}: expected {expected}")
    return value


def count_entry(hf: Json, name: str, default: int) -> int:
    """Returns an entry as `entry` does, but raises UserError unless it is an integer of at least 1."""
    if (value := entry(hf, name, default)) < 1:
        raise UserError(f"config.json has {name} {value}: expected 1 or more")
    return value


def require(hf: Json, **values: Any) -> None:
    """Raises UserError if an entry has a value other than given; absent ones pass, and so do null and 0 for false."""
    for name, value in values.items():
        actual = hf.get(name, value)
        if actual != value and (actual or value):
            raise UserError(f"config.json has {name} {actual!r}, which is not supported: expected {value!r}")


def unknown_entries(hf: Json, known: Collection[str]) -> list[str]:
    """Names the entries beyond `known` that are neither null, false, 0 nor empty."""
    return [name for name, value in hf.items() if name not in known and value not in (None, False, [], {}, "")]


def require_known(hf: Json, known: Collection[str]) -> None:
    """Raises UserError for an entry of config.json that `unknown_entries` finds."""
    if unknown := unknown_entries(hf, known):
        listed = ", ".join(f"{name} {json.dumps(hf[name])}" for name in unknown)
        raise UserError(
            f"config.json has {listed}, which is not supported: if the model computes the same without it, remove it"
        )


# Entries that change no logits in any family: names, dtypes, special tokens, settings for training or generation only.
INERT = """
    _name_or_path architectures model_type transformers_version torch_dtype dtype auto_map
    quantization_config attention_dropout initializer_range use_cache cache_implementation
    chunk_size_feed_forward output_attentions output_hidden_states output_router_logits return_dict
    use_return_dict torchscript problem_type id2label label2id num_labels finetuning_task
    task_specific_params tokenizer_class prefix name_or_path attn_implementation
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id
    max_position_embeddings max_sequence_length pretraining_tp gradient_checkpointing
    router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size max_length min_length
    do_sample early_stopping num_beams num_beam_groups num_return_sequences temperature top_k
    top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty output_scores
    return_dict_in_generate unsloth_fixed unsloth_version
    _attn_implementation_autoset _num_labels output_past is_llama_config transformers.js_config for_llm_compressor
"""
# Entries for which transformers' class assumes one value, in any family.
ONLY = {"is_causal": True, "is_encoder_decoder": False}

# Tensors that multi-modal folders have in addition to the text model, and prefixes of the text model's names.
NOT_TEXT = re.compile(
    r"(model\.)?(vision_(tower|model)|multi_modal_projector|mm_projector|connector|audio_tower|embed_(vision|audio))\."
)
TEXT_MODEL = re.compile(r"^(language_model\.model|model\.language_model|model\.text_model)\.")
TEXT_HEAD = re.compile(r"^language_model\.")


@dataclass(frozen=True)
class Family:
    """A family of models, with its table of fields and its table of tensors."""

    model_type: str  # its name in config.json
    fields: Table
    tensors: tuple[TensorMap, ...]
    other_model_types: tuple[str, ...] = ()  # of models that differ only in this name
    class_name: str = ""  # transformers' class, if it does not follow from model_type
    defaults: Json = field(default_factory=dict)  # values that transformers uses for absent entries
    # Keys that all of its models share without an entry, besides RMS norms and rotary positions.
    keys: Json = field(default_factory=dict)
    constants: Json = field(default_factory=dict)  # entries that are always written
    only: Json = field(default_factory=dict)  # entries with only one supported value, besides ONLY
    # Entries that change no logits in transformers, besides INERT. Any other entry is refused.
    inert: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)  # transformers' other names of entries -> the names above
    # Prefix of all tensors except the output projection; a folder of a bare model omits it.
    prefix: str = "model."
    skipped: tuple[str, ...] = ()  # patterns of tensors that are not weights, or that duplicate another tensor
    whole_heads: bool = False  # transformers requires the width to be a multiple of the number of heads
    mtp_prefix: str = ""  # of tensors of unsupported extra prediction layers
    copied: tuple[TensorMap, ...] = ()  # tensors that are written but not read: copies of a weight for each MTP layer

    @property
    def architecture(self) -> str:
        """The class that transformers loads it with: Qwen3MoeForCausalLM for qwen3_moe."""
        words = self.model_type.removesuffix("_text").split("_")
        return self.class_name or f"{''.join(map(str.capitalize, words))}ForCausalLM"

    def read_config(self, hf: Json) -> Keys:
        """Converts config.json to keys, with a segment per layer if layers differ; raises UserError if unsupported."""
        require(hf, **{**ONLY, **self.only})
        require_known(hf, self.known)
        for alias, name in self.aliases.items():
            require(hf, **({name: hf[alias]} if alias in hf else {}))
        named = {self.aliases.get(name, name): value for name, value in hf.items()}
        read = read_fields(self.fields, {"tie_word_embeddings": False, **self.defaults, **named})
        return {"normalization": "rms", "position_type": "rope", **self.keys, **read}

    def write_config(self, layers: Layers, max_target_length: int) -> Json:
        """Writes the config.json that `read_config` reads as these layers' keys, if the family supports them."""
        longest = "max_position_embeddings"
        length = {} if longest in self.aliases else {longest: max_target_length}
        return {**length, **write_fields(self.fields, layers), **self.constants}

    def differences(self, hf: Json) -> list[str]:
        """Lists entries of another type's config.json that this family does not know, and entries it would need."""
        given = {*self.defaults, *(self.aliases.get(name, name) for name in hf)}
        lacking = [f"{name} (missing)" for name in required_entries(self.fields) if name not in given]
        return unknown_entries(hf, self.known) + lacking

    @property
    def known(self) -> set[str]:
        """The entries of config.json that this family understands or can ignore."""
        names = " ".join([INERT, self.inert, *(row.name for row in self.fields)])
        return {*names.split(), *ONLY, *self.only, *self.aliases}

    def file_name(self, weight: str) -> str:
        """Returns the table's name of the tensor that contains a weight."""
        return next(row.file for row in self.tensors if row.weight == weight)

    def is_mtp_layer(self, name: str, layers: int) -> bool:
        """Tests by name whether a tensor belongs to an extra prediction layer; these are numbered from `layers` on."""
        if self.mtp_prefix and name.startswith(self.mtp_prefix):
            return True
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(self.copied and match and int(match[1]) >= layers)

    def skips(self, name: str) -> bool:
        """Tests whether a tensor of this name contains no weights, or duplicates another tensor."""
        return any(re.search(pattern, name) for pattern in self.skipped)

    def table_names(self, names: Iterable[str]) -> dict[str, str]:
        """Maps names in the table to names in the files, for a folder's tensors outside of vision and audio models."""
        text = {TEXT_HEAD.sub("", TEXT_MODEL.sub("model.", name)): name for name in names if not NOT_TEXT.match(name)}
        if not any(name.startswith(self.prefix) for name in text):
            text = {self.prefix + name: on_disk for name, on_disk in text.items()}
        return text
