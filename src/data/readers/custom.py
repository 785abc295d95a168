"""Reads documents that a function of the user returns: `dataset_type=custom`."""

import functools
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from src.config.schema import Config
from src.config.source_spec import SourceSpec
from src.data.readers.records import as_document, from_fields
from src.data.types import Fingerprint, Source
from src.errors import UserError
from src.user_code import call, class_name, load_function, says_if_slow

# Bounds of an iterable, which is kept in memory.
_MAX_DOCUMENTS = 5_000_000
_MAX_BYTES = 8 << 30
_END = object()

Facts = Mapping[str, str | int]


class CustomSource(Source):
    """Reads the items of an object with `__len__` and `__getitem__`, which several threads may call at a time.

    Args:
        documents: the object. An item is a text, a list or a 1-D array of ids, or a mapping with one of these in
            `column`.
        name: what to call the object in messages.
        column: `dataset_column`.
        vocab_size: V; ids are in [0, V).
        facts: what tells the object from others, for the fingerprint.

    Raises:
        UserError: it has no item, or `len` fails.
    """

    def __init__(self, documents: Sequence[Any], name: str, column: str, vocab_size: int, facts: Facts) -> None:
        self._documents = documents
        self._name = name
        self._column = column
        self._vocab_size = vocab_size
        self._facts = facts
        self._length = call(f"{name}: len() of what it returned", len, documents)
        if not self._length:
            raise UserError(f"{name} returned no document")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> str | np.ndarray:
        name = f"{self._name}: item {i}"
        return _document(call(name, operator.getitem, self._documents, i), name, self._column, self._vocab_size)

    def fingerprint(self) -> Fingerprint:
        return {**self._facts, "type": "custom", "documents": self._length}


def custom_source(spec: SourceSpec, config: Config) -> CustomSource:
    """Opens the documents that the function `dataset_factory`, module:function, returns.

    It is called with the config, which is read as config.max_target_length or config["max_target_length"], and with
    the split: `train_split`, or `eval_split` for an evaluation. It returns one of two things:

    - An object with `__len__` and `__getitem__`, whose items are read as they are needed. Its `fingerprint()`, a
      mapping of names to strings and whole numbers, goes into checkpoints, so that a run is not resumed over other
      data; without one, its class and length do.
    - An iterable. Every host goes through it once, at the start, and keeps its documents in memory. So it must end,
      have the same documents each time, and no more than five million, which take 8 GiB at most.

    Raises:
        UserError: there is no such function, it raises, or it returns something else.
    """
    setting = spec.setting("dataset_factory")
    if not spec.settings["dataset_factory"]:
        raise UserError(
            f"dataset_type=custom: set {spec.key('dataset_factory')}=module:function. It is called with the config and "
            "the split and returns documents: an object with __len__ and __getitem__, or an iterable"
        )
    factory = load_function(spec.settings["dataset_factory"], spec.key("dataset_factory"))
    with says_if_slow(f"{setting}, which has not returned"):
        made = call(setting, factory, config, spec.settings["split"])
    facts: Facts = {"class": class_name(made)}
    if isinstance(made, (str, bytes, Mapping)) or not (_is_indexed(made) or isinstance(made, Iterable)):
        raise UserError(
            f"{setting} returned a value of type {class_name(made)}: expected documents, as an object with __len__ and "
            "__getitem__, or as an iterable"
        )
    if not _is_indexed(made):
        with says_if_slow(f"{setting}: the iterable that it returned has not ended, and is read whole"):
            made, facts = _read_whole(made, setting, spec.column, config.vocab_size)
    elif callable(getattr(made, "fingerprint", None)):
        facts = call(f"{setting}: fingerprint() of what it returned", made.fingerprint)
        if not isinstance(facts, Mapping) or any(type(fact) not in (str, int) for fact in facts.values()):
            raise UserError(f"{setting}: fingerprint() must return a mapping of names to strings and whole numbers")
    return CustomSource(made, setting, spec.column, config.vocab_size, facts)


def _is_indexed(made: Any) -> bool:
    return hasattr(made, "__len__") and hasattr(made, "__getitem__")


def _read_whole(made: Iterable[Any], setting: str, column: str, vocab_size: int) -> tuple[list[Any], Facts]:
    """Reads the documents of an iterable, and digests them."""
    documents: list[str | np.ndarray] = []
    digest, total = hashlib.sha256(), 0
    iterator = call(setting, iter, made)
    while (item := call(name := f"{setting}: item {len(documents)}", next, iterator, _END)) is not _END:
        document = _document(item, name, column, vocab_size)
        data = document.encode() if isinstance(document, str) else document.tobytes()
        digest.update(b"%d " % len(data) + data)
        documents.append(document)
        total += len(data)
        if len(documents) > _MAX_DOCUMENTS or total > _MAX_BYTES:
            raise UserError(
                f"{setting} returned an iterable that has not ended after {len(documents):,} documents of {total:,} "
                "bytes. Iterables are kept in memory: return an object with __len__ and __getitem__ for more"
            )
    return documents, {"class": class_name(made), "digest": digest.hexdigest()[:16]}


def _document(item: Any, name: str, column: str, vocab_size: int) -> str | np.ndarray:
    """Returns the text of an item, or its ids as int32 [n]; raises UserError for anything else."""
    read = functools.partial(as_document, vocab_size=vocab_size)
    try:
        return from_fields(item, column, read) if isinstance(item, Mapping) else read(item)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
