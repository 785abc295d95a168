"""What is known of a family of models."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from src.hf import config_json as cj
from src.hf.table import Row

Keys = cj.Keys
Json = cj.Json

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
        facts: config.json to the keys of base.yml; layers that differ are `decoder_segments` of one layer each.
        hf_config: every layer's keys (the model's own included, sizes scaled) to config.json. `facts` of that gives
            other keys where the family has no such model.
        rows: its table of tensors.
        prefix: of all its tensors but the output projection's; a folder of a bare model has them without it.
        skipped: patterns of names of tensors that hold no weights, or none that another does not hold too.
        whole_heads: whether transformers loads only models whose width is a multiple of their number of heads.
        copied: rows of tensors that repeat a weight for each extra prediction layer; they are written, not read.
        mapped: the entries of config.json that `facts` reads.
        inert: those that alter no logits in transformers, beside `config_json.INERT`.
        only: those of which one value is here, beside `config_json.ONLY`; any other entry is refused.
        aliases: transformers' other names of entries -> theirs above.
    """

    model_type: str
    architecture: str
    facts: Callable[[Mapping[str, Any]], Keys]
    hf_config: Callable[[Sequence[Mapping[str, Any]]], Json]
    rows: tuple[Row, ...]
    prefix: str = "model."
    skipped: tuple[str, ...] = ()
    copied: tuple[Row, ...] = ()
    whole_heads: bool = False
    mapped: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def keys(self, hf: Mapping[str, Any]) -> Keys:
        """The keys of base.yml that a config.json gives, as `facts` reads it.

        Raises:
            UserError: it has an entry, or a value of one, that is not here.
        """
        only = {**cj.ONLY, **self.only}
        cj.refuse(hf, **only)
        cj.refuse_others(hf, {*self.mapped, *self.inert, *self.aliases, *cj.INERT, *only})
        renamed = {self.aliases.get(name, name): value for name, value in hf.items()}
        for alias, name in self.aliases.items():
            cj.refuse(hf, **({name: hf[alias]} if alias in hf else {}))
        return self.facts(renamed)

    @property
    def output_file(self) -> str:
        """The output projection's name."""
        return next(row.file for row in self.rows if row.weight == "output")

    @property
    def embedding_file(self) -> str:
        """The embedding's name."""
        return next(row.file for row in self.rows if row.weight == "embedding")

    def is_further_layer(self, name: str, layers: int) -> bool:
        """Whether a tensor of this name belongs to an extra prediction layer, which follow the model's `layers`."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        return self.predicts_ahead and found is not None and int(found[1]) >= layers

    @property
    def predicts_ahead(self) -> bool:
        """Whether the family's models may have extra prediction layers."""
        return any(row.weight.startswith("mtp.") for row in self.rows)

    @property
    def has_dense_layers(self) -> bool:
        """Whether the family's models may have layers without experts."""
        return any(row.weight == "layer.feed_forward.wi" and "E" not in row.dims.split() for row in self.rows)

    def is_skipped(self, name: str) -> bool:
        """Whether a tensor of this name holds no weights."""
        return any(re.search(pattern, name) for pattern in self.skipped)

    def table_names(self, names: Iterable[str]) -> dict[str, str]:
        """The name that the table has for each tensor of a folder's text model -> its name in the files."""
        text = {TEXT_HEAD.sub("", TEXT_MODEL.sub("model.", name)): name for name in names if not NOT_TEXT.match(name)}
        if not any(name.startswith(self.prefix) for name in text):
            text = {self.prefix + name: on_disk for name, on_disk in text.items()}
        return text
