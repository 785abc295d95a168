"""Reads documents that a function of the user returns: `dataset_type=custom`."""

import functools
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from src.config.source_spec import SourceSpec
from src.data.readers.records import as_document, from_fields
from src.data.types import Fingerprint, InputSpec, Source
from src.errors import UserError
from src.user_code import call, class_name, load_function, says_if_slow

# Bounds of an iterable, which is kept in memory.
_MAX_DOCUMENTS = 5_000_000
_MAX_BYTES = 8 << 30
_END = object()


class CustomSource(Source):
    """Reads the documents that the function `dataset_factory`, module:function, returns.

    It is called with the config and the split, and returns an object with `__len__` and `__getitem__`, or an iterable,
    which is read whole at the start. docs/data.md says what either has to hold to, and what their items may be.
    Raises UserError where there is no such function, it raises, or it returns something else, or no document.
    """

    def __init__(self, spec: SourceSpec, inputs: InputSpec) -> None:
        self._name = name = spec.setting("dataset_factory")
        self._column = spec.dataset_column
        self._as_document = functools.partial(as_document, vocab_size=inputs.vocab_size)
        factory = load_function(spec.dataset_factory, spec.key("dataset_factory"))
        with says_if_slow(f"{name}, which has not returned"):
            made = call(name, factory, inputs.config, spec.split)
        self._facts: Mapping[str, str | int] = {"class": class_name(made)}
        is_indexed = hasattr(made, "__len__") and hasattr(made, "__getitem__")
        if isinstance(made, (str, bytes, Mapping)) or not (is_indexed or isinstance(made, Iterable)):
            raise UserError(
                f"{name} returned a value of type {class_name(made)}: expected documents, as an object with __len__ "
                "and __getitem__, or as an iterable"
            )
        if not is_indexed:
            with says_if_slow(f"{name}: the iterable that it returned has not ended, and is read whole"):
                made, digest = self._read_whole(made)
            self._facts |= {"digest": digest}
        elif callable(getattr(made, "fingerprint", None)):
            self._facts = facts = call(f"{name}: fingerprint() of what it returned", made.fingerprint)
            if not isinstance(facts, Mapping) or any(type(fact) not in (str, int) for fact in facts.values()):
                raise UserError(f"{name}: fingerprint() must return a mapping of names to strings and whole numbers")
        self._documents: Sequence[Any] = made
        self._length = call(f"{name}: len() of what it returned", len, made)
        if not self._length:
            raise UserError(f"{name} returned no document")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> str | np.ndarray:
        return self._document(i, call(f"{self._name}: item {i}", operator.getitem, self._documents, i))

    def fingerprint(self) -> Fingerprint:
        return {**self._facts, "type": "custom", "documents": self._length}

    def _document(self, i: int, item: Any) -> str | np.ndarray:
        try:
            is_mapping = isinstance(item, Mapping)
            return from_fields(item, self._column, self._as_document) if is_mapping else self._as_document(item)
        except ValueError as error:
            raise UserError(f"{self._name}: item {i}: {error}") from None

    def _read_whole(self, made: Iterable[Any]) -> tuple[list[str | np.ndarray], str]:
        """Returns the documents of an iterable, and their digest."""
        documents: list[str | np.ndarray] = []
        digest, total = hashlib.sha256(), 0
        iterator = call(self._name, iter, made)
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
