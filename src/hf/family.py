"""A family of models: how its config.json and its tensors correspond to ours."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from src.hf.common_fields import INERT, ONLY
from src.hf.fields import Json, Keys, LayerKeys, Table, read_fields, require, require_known, write_fields
from src.hf.tensor_map import TensorMap

# What multi-modal folders have beside the text model, and how they prefix the text model's names.
NOT_TEXT = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector|audio_tower)\.")
TEXT_MODEL = re.compile(r"^(language_model\.model|model\.language_model)\.")
TEXT_HEAD = re.compile(r"^language_model\.")


@dataclass(frozen=True)
class Family:
    """A family: one small module of families/ each.

    Attributes:
        model_type: config.json's name for it.
        architecture: the class that transformers loads it with.
        fields: its table of fields.
        tensors: its table of tensors.
        defaults: entries that transformers' class adds to a config.json that lacks them.
        keys: what all of its models have and no entry says, beside RMS norms and rotary positions.
        constants: entries that are written whatever the model.
        only: entries of which one value is here, beside `common_fields.ONLY`.
        inert: entries that alter no logits in transformers, beside `common_fields.INERT`. Any other entry is refused.
        aliases: transformers' other names of entries -> theirs above.
        prefix: of all its tensors but the output projection's; a folder of a bare model has them without it.
        skipped: patterns of names of tensors that hold no weights, or none that another does not hold too.
        whole_heads: whether transformers loads only models whose width is a multiple of their number of heads.
        copied: rows of tensors that repeat a weight for each extra prediction layer; they are written, not read.
    """

    model_type: str
    architecture: str
    fields: Table
    tensors: tuple[TensorMap, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    skipped: tuple[str, ...] = ()
    whole_heads: bool = False
    copied: tuple[TensorMap, ...] = ()

    def read_config(self, hf: Mapping[str, Any]) -> Keys:
        """Returns the keys of base.yml that a config.json says; layers that differ are segments of a layer each.

        Raises:
            UserError: it has an entry, or a value of one, that is not here.
        """
        only = {**ONLY, **self.only}
        require(hf, **only)
        require_known(hf, {*self.known, *INERT, *only})
        for alias, name in self.aliases.items():
            require(hf, **({name: hf[alias]} if alias in hf else {}))
        named = {self.aliases.get(name, name): value for name, value in hf.items()}
        read = read_fields(self.fields, {"tie_word_embeddings": False, **self.defaults, **named})
        return {"normalization": "rms", "position_type": "rope", **self.keys, **read}

    def write_config(self, layers: LayerKeys) -> Json:
        """Returns the config.json that `read_config` reads as these layers' keys, if the family has such a model."""
        return {**write_fields(self.fields, layers), **self.constants}

    @property
    def known(self) -> set[str]:
        """The entries of config.json that the family has beyond those of all families, but for `only`."""
        return {name for row in self.fields for name in row.names} | {*self.inert, *self.aliases}

    def file_name(self, weight: str) -> str:
        """Returns the name in the table of the tensor that holds a weight."""
        return next(row.file for row in self.tensors if row.weight == weight)

    def is_mtp_layer(self, name: str, layers: int) -> bool:
        """Returns whether a tensor is of an extra prediction layer; they follow the model's `layers`."""
        match = re.match(r"model\.layers\.(\d+)\.", name)
        has_mtp = any(row.weight.startswith("mtp.") for row in self.tensors)
        return has_mtp and match is not None and int(match[1]) >= layers

    @property
    def has_dense_layers(self) -> bool:
        """Returns whether the family's models may have layers without experts."""
        return any(row.weight == "layer.feed_forward.wi" and "E" not in row.dims.split() for row in self.tensors)

    def is_skipped(self, name: str) -> bool:
        """Returns whether a tensor of this name holds no weights."""
        return any(re.search(pattern, name) for pattern in self.skipped)

    def table_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the table's name of each tensor of a folder's text model -> its name in the files."""
        text = {TEXT_HEAD.sub("", TEXT_MODEL.sub("model.", name)): name for name in names if not NOT_TEXT.match(name)}
        if not any(name.startswith(self.prefix) for name in text):
            text = {self.prefix + name: on_disk for name, on_disk in text.items()}
        return text
