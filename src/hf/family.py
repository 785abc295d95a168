"""A family of models: how its config.json and its tensors correspond to ours."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from src.hf.common_fields import INERT, ONLY
from src.hf.fields import (
    Json,
    Keys,
    Layers,
    Table,
    read_fields,
    require,
    require_known,
    required_entries,
    unknown_entries,
    write_fields,
)
from src.hf.tensor_map import TensorMap

# What multi-modal folders have beside the text model, and how they prefix the text model's names.
NOT_TEXT = re.compile(
    r"(model\.)?(vision_(tower|model)|multi_modal_projector|mm_projector|connector|audio_tower|embed_(vision|audio))\."
)
TEXT_MODEL = re.compile(r"^(language_model\.model|model\.language_model|model\.text_model)\.")
TEXT_HEAD = re.compile(r"^language_model\.")


@dataclass(frozen=True)
class Family:
    """A family of models, with its table of fields and its table of tensors."""

    model_type: str  # config.json's name for it
    architecture: str  # the class that transformers loads it with
    fields: Table
    tensors: tuple[TensorMap, ...]
    other_model_types: tuple[str, ...] = ()  # of models that are all the same but for this name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # entries that transformers adds where they are absent
    # What all of its models have and no entry says, beside RMS norms and rotary positions.
    keys: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # entries that are written whatever the model
    only: Mapping[str, Any] = field(default_factory=dict)  # entries of which one value is here, beside ONLY
    # Entries that alter no logits in transformers, beside INERT. Any other entry is refused.
    inert: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # transformers' other names of entries -> theirs above
    # Of all its tensors but the output projection's; a folder of a bare model has them without it.
    prefix: str = "model."
    skipped: tuple[str, ...] = ()  # patterns of tensors that are not weights, or that repeat another's
    whole_heads: bool = False  # transformers loads only models whose width is a multiple of their number of heads
    mtp_prefix: str = ""  # of tensors of extra prediction layers that are not here
    copied: tuple[TensorMap, ...] = ()  # rows of tensors, written and not read, that repeat a weight for each MTP layer

    def read_config(self, hf: Mapping[str, Any]) -> Keys:
        """Returns config.json's keys, layers that differ as a segment each; raises UserError for what is not here."""
        only = {**ONLY, **self.only}
        require(hf, **only)
        require_known(hf, {*self.known, *INERT, *only})
        for alias, name in self.aliases.items():
            require(hf, **({name: hf[alias]} if alias in hf else {}))
        named = {self.aliases.get(name, name): value for name, value in hf.items()}
        read = read_fields(self.fields, {"tie_word_embeddings": False, **self.defaults, **named})
        return {"normalization": "rms", "position_type": "rope", **self.keys, **read}

    def write_config(self, layers: Layers, max_target_length: int) -> Json:
        """Returns the config.json that `read_config` reads as these layers' keys, if the family has such a model."""
        longest = "max_position_embeddings"
        length = {} if longest in self.aliases else {longest: max_target_length}
        return {**length, **write_fields(self.fields, layers), **self.constants}

    def differences(self, hf: Mapping[str, Any]) -> list[str]:
        """Returns the entries of another kind's config.json that this family has no meaning for, and those it lacks."""
        given = {*self.defaults, *(self.aliases.get(name, name) for name in hf)}
        lacking = [f"{name} (missing)" for name in required_entries(self.fields) if name not in given]
        return unknown_entries(hf, {*self.known, *INERT, *ONLY, *self.only}) + lacking

    @property
    def known(self) -> set[str]:
        """Returns the entries of config.json beyond those that all families have, but for `only`."""
        return {name for row in self.fields for name in row.names} | {*self.inert, *self.aliases}

    def file_name(self, weight: str) -> str:
        """Returns the name in the table of the tensor that holds a weight."""
        return next(row.file for row in self.tensors if row.weight == weight)

    def is_mtp_layer(self, name: str, layers: int) -> bool:
        """Returns whether a tensor is of an extra prediction layer; they follow the model's `layers`."""
        if self.mtp_prefix and name.startswith(self.mtp_prefix):
            return True
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return bool(self.copied and match) and int(match[1]) >= layers

    def skips(self, name: str) -> bool:
        """Returns whether a tensor of this name holds no weights."""
        return any(re.search(pattern, name) for pattern in self.skipped)

    def table_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the table's name of each tensor of a folder's text model -> its name in the files."""
        text = {TEXT_HEAD.sub("", TEXT_MODEL.sub("model.", name)): name for name in names if not NOT_TEXT.match(name)}
        if not any(name.startswith(self.prefix) for name in text):
            text = {self.prefix + name: on_disk for name, on_disk in text.items()}
        return text
