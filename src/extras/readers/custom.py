"""Reads documents that a user's function returns: `dataset_type=custom`."""

import functools
import hashlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data.readers.fields import as_document, from_fields
from src.data.readers.records import Nulls
from src.data.types import Fingerprint, InputSpec, Source
from src.extras.readers.streams import StreamSource
from src.system.code_digests import code_digests
from src.system.errors import UserError
from src.system.user_code import call, class_name, load_function

# Limits for an iterable, which is held in memory.
_MAX_DOCUMENTS = 5_000_000
_MAX_BYTES = 8 << 30
_END = object()


def open_source(spec: DatasetSpec, inputs: InputSpec) -> Source:
    """Calls the function `dataset_factory`, and reads the object that it returns.

    That is read as a stream if it can save and restore a state, else by number (`CustomSource`). Raises as
    `load_function` and `CustomSource` do, as `call` does if the function raises, and UserError if it returns a stream's
    iterator.
    """
    name, factory = spec.setting("dataset_factory"), load_function(spec.dataset_factory, spec.key("dataset_factory"))
    digests = code_digests(spec.dataset_factory, spec.key("dataset_factory"))
    code: Fingerprint = {f"code {module}": digest for module, digest in digests.items()}
    dataset = call(name, factory, inputs.config, spec.split)
    read = functools.partial(document_of, name, spec.dataset_column, inputs.vocab_size, Nulls(name))
    is_iterable = isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")
    has_state = hasattr(dataset, "load_state_dict")
    if is_iterable and not has_state:
        has_state = hasattr(iterator := call(name, iter, dataset), "get_state")
        if has_state and iterator is dataset:
            raise UserError(
                f"{name} returned an iterator, which is read only once, and is read from its start several times: "
                "return the dataset whose iterator it is"
            )
    if has_state:
        facts = {**_facts(name, dataset), **code, "type": "custom", "column": spec.dataset_column}
        return StreamSource(name, dataset, read, facts, shuffles=False)
    return CustomSource(name, dataset, read, code)


def document_of(name: str, column: str, vocab_size: int, nulls: Nulls, i: int, item: Any) -> str | np.ndarray:
    """Reads the document in item `i` of a dataset; raises UserError, beginning with `name`, if the item lacks one."""
    read = functools.partial(as_document, vocab_size=vocab_size)
    try:
        return nulls(from_fields(item, column, read)) if isinstance(item, Mapping) else read(item)
    except ValueError as error:
        raise UserError(f"{name}: item {i}: {error}") from None


def _facts(name: str, dataset: Any) -> dict[str, str | int]:
    """Returns the `fingerprint()` of a user's object, or its class if it lacks that method.

    Raises UserError if the method raises, or returns anything but a mapping of names to strings and integers.
    """
    if not callable(getattr(dataset, "fingerprint", None)):
        return {"class": class_name(dataset)}
    facts = call(f"{name}: fingerprint() of what it returned", dataset.fingerprint)
    if not isinstance(facts, Mapping) or any(type(fact) not in (str, int) for fact in facts.values()):
        raise UserError(f"{name}: fingerprint() must return a mapping of names to strings and whole numbers")
    return dict(facts)


class CustomSource(Source):
    """Reads the documents in an object that the function `dataset_factory` (module:function) returned.

    The function is called with the config and the split, and returns an object with `__len__` and `__getitem__`, or an
    iterable, which is read completely at the start. docs/data.md lists the requirements for both and for their items.
    Raises UserError if the function returned something else, no documents, endless ones, or an iterable of more than
    `_MAX_DOCUMENTS` or `_MAX_BYTES`; also as `call` does if the object's code raises.
    """

    def __init__(self, name: str, dataset: Any, read: Callable[..., str | np.ndarray], code: Fingerprint) -> None:
        self._name, self._document = name, read
        # Filters of Grain's MapDataset leave None for an element that they drop.
        self._may_filter = hasattr(dataset, "to_iter_dataset")
        self._facts = _facts(name, dataset) | code
        is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, (str, bytes, Mapping)) or not (is_indexed or isinstance(dataset, Iterable)):
            raise UserError(
                f"{name} returned a value of type {class_name(dataset)}: expected documents, as an object with __len__ "
                "and __getitem__, or as an iterable"
            )
        if not is_indexed:
            dataset, digest = self._read_whole(dataset)
            self._facts["digest"] = digest
        self._documents: Sequence[Any] = dataset
        self._length = call(f"{name}: len() of what it returned", len, dataset)
        if not self._length:
            raise UserError(f"{name} returned no document")
        if self._length == sys.maxsize:
            raise UserError(f"{name} returned an endless dataset: leave repeat() out, a run repeats its data")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> str | np.ndarray:
        item = call(f"{self._name}: item {i}", operator.getitem, self._documents, i)
        return "" if item is None and self._may_filter else self._document(i, item)

    def fingerprint(self) -> Fingerprint:
        return {**self._facts, "type": "custom", "documents": self._length}

    def _read_whole(self, dataset: Iterable[Any]) -> tuple[list[str | np.ndarray], str]:
        documents: list[str | np.ndarray] = []
        digest, total = hashlib.sha256(), 0
        iterator = call(self._name, iter, dataset)
        while (item := call(f"{self._name}: item {len(documents)}", next, iterator, _END)) is not _END:
            document = self._document(len(documents), item)
            data = document.encode() if isinstance(document, str) else document.tobytes()
            digest.update(b"%d " % len(data) + data)
            documents.append(document)
            total += len(data)
            if len(documents) > _MAX_DOCUMENTS or total > _MAX_BYTES:
                raise UserError(
                    f"{self._name} returned an iterable that has not ended after {len(documents):,} documents of "
                    f"{total:,} bytes. Iterables are kept in memory: return an object with __len__ and __getitem__ for "
                    "more"
                )
        return documents, digest.hexdigest()[:16]
