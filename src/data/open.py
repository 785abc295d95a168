"""Where data come from: numbered items that can be read in any order, and which of them a configuration names.

An item is a document: a text, its ids, or a conversation. Sources whose items are whole rows need no packing.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from src.config.source_spec import SourceSpec, eval_specs, names_eval_data, train_specs, train_weights
from src.data.conversations import Conversation, ConversationSource
from src.data.packing import Document
from src.data.tokenizer import Tokenizer
from src.errors import UserError, counted

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

Fingerprint = dict[str, str | int]
FEW = 0.03  # of a source's documents: so many may be cut without a word
Item = str | Conversation | np.ndarray
"""A document: its text, a conversation, or its ids as int32 [n]. A text may be empty, ids may be none."""


class Source(Protocol):
    """Documents numbered from 0, read in any order and from several threads at a time."""

    def __len__(self) -> int:
        """How many there are. Opening a source and this cost no more for a hundred million of them than for one."""

    def __getitem__(self, i: int) -> Item:
        """Document `i`; raises UserError with the place of what can't be read."""

    def document_keys(self) -> np.ndarray | None:
        """uint64 [items]: a hash that the pieces of one document share; None: there are too many to list."""

    def group_sizes(self) -> np.ndarray | None:
        """int64: how many items are stored together and read at once, in order; None: each is on its own."""

    def fingerprint(self) -> Fingerprint:
        """What makes two sources give the same items; the same wherever the data lie."""


@runtime_checkable
class RowSource(Protocol):
    """Rows numbered from 0, which fill T and go on in none: which row comes when is then computed, and kept nowhere."""

    row_count: int | None
    """Rows in an epoch, which come in a random order; None: there is no end, and they come as they are numbered."""

    def row(self, i: int) -> list[Document]:
        """The documents of row `i`, whose pairs are T together; the last row's may be fewer."""

    def fingerprint(self) -> Fingerprint:
        """What makes two sources give the same rows; the same wherever the data lie."""


class TrainData(NamedTuple):
    """What a run trains on.

    names: of the sources, as the config has them; one without a name is alone.
    weights: rows of each, in proportion.
    """

    names: tuple[str, ...]
    sources: tuple[Source | RowSource, ...]
    weights: tuple[float, ...]


class EvalSet(NamedTuple):
    """What a run evaluates on.

    name: as the config has it; empty where there is one set without a name.
    steps: batches per evaluation; -1: one epoch.
    """

    name: str
    source: Source | RowSource
    steps: int


def open_sources(config: "FrozenConfigDict", tokenizer: Tokenizer | None) -> tuple[TrainData, list[EvalSet]]:
    """The data to train on, and to evaluate on if the run evaluates: only then is a part of the training data held out.

    Raises:
        UserError: data in the config can't be read, or nothing can be held out.
    """
    return _open(config, tokenizer, evaluates=config.eval_interval > 0)


def open_eval_sets(config: "FrozenConfigDict", tokenizer: Tokenizer | None) -> list[EvalSet]:
    """The data that a run of this config evaluates on, or would.

    Raises:
        UserError: as `open_sources` does.
    """
    if names_eval_data(config):
        return _open_eval(config, tokenizer)
    return _open(config, tokenizer, evaluates=True)[1]


def _open(config: "FrozenConfigDict", tokenizer: Tokenizer | None, evaluates: bool) -> tuple[TrainData, list[EvalSet]]:
    from src.data.held_out import split

    if evaluates and config.datasets and not names_eval_data(config):
        raise UserError("nothing is held out of datasets: name data to evaluate on with eval_datasets")
    specs = train_specs(config)
    sources = [open_source(spec, config, tokenizer) for spec in specs]
    evaluation: list[EvalSet] = []
    if evaluates and names_eval_data(config):
        evaluation = _open_eval(config, tokenizer)
    elif evaluates:
        sources[0], held_out = split(sources[0], config.eval_fraction)
        evaluation = [EvalSet("", held_out, config.eval_steps)]
    return TrainData(tuple(spec.name for spec in specs), tuple(sources), train_weights(config)), evaluation


def _open_eval(config: "FrozenConfigDict", tokenizer: Tokenizer | None) -> list[EvalSet]:
    steps = [entry.get("eval_steps", config.eval_steps) for entry in config.eval_datasets] or [config.eval_steps]
    return [
        EvalSet(spec.name, open_source(spec, config, tokenizer), count)
        for spec, count in zip(eval_specs(config), steps, strict=True)
    ]


def open_source(spec: SourceSpec, config: "FrozenConfigDict", tokenizer: Tokenizer | None) -> Source | RowSource:
    """One set of data. What reads its format is imported here, where it is needed.

    Args:
        spec: which.
        config: the run's.
        tokenizer: the run's, which token files must have been made with; None where nothing is text.

    Raises:
        UserError: it can't be read, or what reads it is not installed.
    """
    match spec.type:
        case "text" if config.use_sft:
            if not spec.path:
                raise UserError(f"use_sft=true reads .jsonl files of conversations: set {spec.key('dataset_path')}")
            return ConversationSource(spec.path, spec.key("dataset_path"))
        case "text":
            from src.data.readers.text import TextSource

            return TextSource(spec.path, spec.max_document_bytes, spec.key("dataset_path"), spec.column)
        case "synthetic":
            from src.data.readers.synthetic import SyntheticSource

            # Evaluation's seed is unlike every training seed, which is at least 0: the two must share no row.
            seed = -1 - config.data_shuffle_seed if spec.is_eval else config.data_shuffle_seed
            return SyntheticSource(config.vocab_size, config.max_target_length, seed)
        case "tfds":
            from src.data.readers.tfds import TfdsSource

            return TfdsSource(spec)
        case "array_record":
            from src.data.readers.array_record import ArrayRecordSource

            return ArrayRecordSource(spec)
        case "parquet":
            from src.data.readers.parquet import ParquetSource

            return ParquetSource(spec)
        case "tokens":
            from src.data.readers.tokens import TokenDocuments, TokenRows

            source = TokenRows(spec, config.max_target_length) if config.packing else TokenDocuments(spec)
            source.check(config.vocab_size, tokenizer.fingerprint() if tokenizer else None)
            return source
        case _:
            from src.data.readers.custom import custom_source

            return custom_source(spec, config)


def describe_data(config: "FrozenConfigDict", data: TrainData) -> list[str]:
    """A line for each source: its type, where it is from, how much it has, and its share of the rows."""
    lines = []
    for spec, source, weight in zip(train_specs(config), data.sources, data.weights, strict=True):
        place = " ".join(filter(None, (spec.settings["dataset_name"], spec.path, spec.settings["dataset_factory"])))
        if spec.type == "text" and not place:
            place = "the Python standard library's source"
        line = ", ".join(filter(None, (place, amount(source))))
        share = f", {weight / sum(data.weights):.4g} of the rows" if spec.name else ""
        lines.append(f"{spec.name}: " * bool(spec.name) + f"{spec.type}: {line}{share}")
    return lines


def describe_eval_set(data: EvalSet) -> str:
    """A line for a set: what it is, and how much of it an evaluation takes."""
    facts = data.source.fingerprint()
    part = f"{facts['part']}: " if "part" in facts else f"{facts['type']}: "
    taken = "one epoch" if data.steps == -1 else f"{data.steps:,} batches"
    return f"{data.name}: " * bool(data.name) + f"{part}{amount(data.source)}, {taken} per evaluation"


def amount(source: Source | RowSource) -> str:
    """Returns how much data a source has, in words, and how many of its documents are cut, if they are not few."""
    if isinstance(source, RowSource):
        return f"{counted(source.row_count, 'row')} per epoch" if source.row_count else "random tokens"
    count, cut = len(source), 0.0
    if (keys := source.document_keys()) is not None:  # equal for the pieces of a document, which follow each other
        pieces = np.diff(np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]])))
        count, cut = len(pieces), float((pieces > 1).mean())
    share = f"{cut:.0%} of them " * (cut < 1)
    said = f", {share}cut into pieces by max_document_bytes" * (cut > FEW)
    return counted(count, "conversation" if isinstance(source[0], Conversation) else "document") + said
