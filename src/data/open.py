"""Opens the data that the config names with the reader for their format, and holds a part out for evaluation."""

import importlib
from typing import Any

import numpy as np

from src import installing
from src.config.dataset_spec import DatasetSpec, eval_specs, names_eval_data, train_specs, train_weights
from src.config.schema import Evaluation
from src.data import order
from src.data.types import Document, EvalSet, Fingerprint, InputSpec, Item, RowSource, Source, TrainData, is_stream
from src.system.errors import MissingExtra, UserError

AnySource = Source | RowSource
READERS = {  # dataset_type -> the module whose `open_source(spec, inputs)` opens it
    "text": "src.data.readers.text",
    "synthetic": "src.data.readers.synthetic",
    "custom": "src.extras.readers.custom",
    "tfds": "src.extras.readers.tfds",
    "array_record": "src.extras.readers.array_record",
    "parquet": "src.extras.readers.parquet",
    "hf": "src.extras.readers.hf",
    "tokens": "src.extras.readers.tokens",
}


def open_sources(inputs: InputSpec, evaluation: Evaluation) -> tuple[TrainData, list[EvalSet]]:
    """Opens a run's training data and, with `eval_interval`, its evaluation sets.

    If the config names no evaluation data, a part of the training data is held out.
    Raises UserError if data can't be read, or no part of them can be held out; TransientError if a store fails.
    """
    specs = train_specs(inputs.data)
    sources = [open_source(spec, inputs) for spec in specs]
    eval_sets: list[EvalSet] = []
    if evaluation.eval_interval > 0 and names_eval_data(inputs.data):
        eval_sets = open_eval_sets(inputs, evaluation)
    elif evaluation.eval_interval > 0:
        sources[0], held_out = train_validation_split(sources[0], inputs.data.eval_fraction)
        eval_sets = [EvalSet("", held_out, evaluation.eval_steps)]
    return TrainData(tuple(spec.name for spec in specs), tuple(sources), train_weights(inputs.data)), eval_sets


def open_eval_sets(inputs: InputSpec, evaluation: Evaluation) -> list[EvalSet]:
    """Opens a config's evaluation data, even if its run does not evaluate; raises as `open_sources` does."""
    data, steps = inputs.data, evaluation.eval_steps
    if names_eval_data(data):
        counts = [entry.get("eval_steps", steps) for entry in data.eval_datasets] or [steps]
        specs = zip(eval_specs(data), counts, strict=True)
        return [EvalSet(spec.name, open_source(spec, inputs), count) for spec, count in specs]
    if data.datasets:
        raise UserError("no evaluation data are held out of datasets: name data to evaluate on with eval_datasets")
    source = open_source(train_specs(data)[0], inputs)
    return [EvalSet("", train_validation_split(source, data.eval_fraction)[1], steps)]


def open_source(spec: DatasetSpec, inputs: InputSpec) -> AnySource:
    """Opens a dataset with the reader for its `dataset_type`; with `use_sft`, text as conversations.

    Raises UserError if it can't be read, if its reader or a package for it is missing, or if it is a stream that begins
    with the same documents on two hosts; TransientError if a store fails.
    """
    try:
        source = _open(spec, inputs)
    except MissingExtra:
        raise
    except ImportError as error:
        extra = "streams" if spec.dataset_type == "hf" else "data"
        missing = f"{spec.setting('dataset_type')}: {error.name} is not installed"
        raise UserError(f"{missing}. {installing(extra)} installs it") from error
    if is_stream(source):
        source.check_hosts_differ()
    return source


def _open(spec: DatasetSpec, inputs: InputSpec) -> AnySource:
    if spec.dataset_type == "text" and inputs.data.use_sft:
        if not spec.dataset_path:
            raise UserError(f"use_sft=true reads .jsonl files of conversations: set {spec.key('dataset_path')}")
        from src.extras.conversations import ConversationSource

        return ConversationSource(spec.dataset_path, spec.key("dataset_path"), inputs)
    reader = importlib.import_module(READERS[spec.dataset_type])  # its own imports may not be installed
    return reader.open_source(spec, inputs)


# ---- Held-out data


class _Subset:
    """Selects items of another source by their numbers, ascending; `part` identifies it among the source's subsets."""

    def __init__(self, source: Any, items: np.ndarray | range, part: str) -> None:
        self._source, self._items, self.part = source, items, part
        self.listings, self.is_remote = getattr(source, "listings", ()), getattr(source, "is_remote", False)

    def fingerprint(self) -> Fingerprint:
        return {**self._source.fingerprint(), "part": self.part}


class Subset(_Subset, Source):
    """Selects documents of a source by ascending numbers, which must be consecutive if the source has groups."""

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> Item:
        return self._source[int(self._items[i])]

    def document_keys(self) -> np.ndarray | None:
        keys = self._source.document_keys()
        return None if keys is None else keys[self._items]

    def group_sizes(self) -> np.ndarray | None:
        sizes = self._source.group_sizes()
        if sizes is None:
            return None
        # The items are consecutive if the source has groups, so only the first and last groups may be partial.
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return np.diff(np.clip(bounds, self._items[0], self._items[-1] + 1))


class RowSubset(_Subset, RowSource):
    """Selects consecutive rows of a source of rows that is not endless."""

    def __init__(self, source: Any, items: np.ndarray | range, part: str) -> None:
        super().__init__(source, items, part)
        self.row_count = len(items)

    def row(self, i: int) -> list[Document]:
        return self._source.row(self._items[i])


def train_validation_split(source: AnySource, fraction: float) -> tuple[AnySource, AnySource]:
    """Splits a source into training items and held-out items; the pieces of a document stay together.

    If the documents have hash keys, a document is held out if its hash is in the lowest `fraction` of all values, so
    that documents added to the source later do not move others. With few documents, the lowest hash is held out anyway
    and the highest is not. In other sources, and for the pieces of a single document, the last items are held out: this
    fraction of them, but at least one. Raises UserError if the source has only one item, or is endless.
    """
    train, held_out = f"all but {fraction} of the documents", f"{fraction} of the documents"
    has_rows = isinstance(source, RowSource)
    subset, count = (RowSubset, source.row_count) if has_rows else (Subset, len(source))
    if count is None:
        raise UserError("endless rows have no part to hold out: name data to evaluate on with eval_dataset_path=PATH")
    if count < 2:
        raise UserError(
            "cannot hold out evaluation data: the training data are a single uncut document. Name other data with "
            "eval_dataset_path=PATH, or turn evaluation off with eval_interval=-1"
        )
    first = count - min(max(int(fraction * count), 1), count - 1)
    items = range(first), range(first, count)
    if not has_rows and (keys := source.document_keys()) is not None:
        keys = order.mix64(keys)
        if keys.min() == keys.max():
            train, held_out = "all but the end of the document", "the document's end"
        else:
            mask = ((keys < int(fraction * 2**64)) | (keys == keys.min())) & (keys != keys.max())
            items = np.flatnonzero(~mask), np.flatnonzero(mask)
    return subset(source, items[0], train), subset(source, items[1], held_out)
