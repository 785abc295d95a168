"""What users write themselves: documents of their own (dataset_factory), and changes to batches (batch_transform)."""

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from src.config.source_spec import SourceSpec
from src.data.packing import Batch
from src.data.readers.documents import DocumentSource, as_document, from_fields
from src.errors import UserError
from src.user_code import call, load_function, says_if_slow

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

# What is read whole may have no more, nor take more memory.
_MOST_DOCUMENTS = 5_000_000
_MOST_BYTES = 8 << 30
_END = object()
MAX_WEIGHT = 1e30  # of a token in the loss, either way

Facts = Mapping[str, str | int]


class CustomSource(DocumentSource):
    """The items of an object with `__len__` and `__getitem__`, which several threads may call at a time.

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
        """How many items there are."""
        return self._length

    def __getitem__(self, i: int) -> str | np.ndarray:
        """The text or ids of item `i`."""
        name = f"{self._name}: item {i}"
        return _document(call(name, operator.getitem, self._documents, i), name, self._column, self._vocab_size)

    def fingerprint(self) -> dict[str, str | int]:
        """How many items there are, and what tells the object from others."""
        return {**self._facts, "type": "custom", "documents": self._length}


def custom_source(spec: SourceSpec, config: "FrozenConfigDict") -> CustomSource:
    """The documents that the function `dataset_factory`, module:function, returns.

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
    facts: Facts = {"class": _class(made)}
    if isinstance(made, (str, bytes, Mapping)) or not (_is_indexed(made) or isinstance(made, Iterable)):
        raise UserError(
            f"{setting} returned a value of type {_class(made)}: expected documents, as an object with __len__ and "
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


def apply_transform(function: Callable[[Batch], Batch], vocab_size: int, batch: Batch) -> Batch:
    """What the function `batch_transform` makes of a batch.

    Args:
        function: takes the rows of this host, may change them in place, and returns them.
        vocab_size: V.
        batch: {tokens, targets, segment_ids, positions: int32 [rows, T], loss_mask: float32 [rows, T]}.

    Returns:
        The same names, shapes and dtypes.

    Raises:
        UserError: the function raises, or returns others, or values that the model can't take: ids outside the
            vocabulary, segments or positions below 0, weights of the loss that are not finite.
    """
    expected = {name: f"{array.dtype} {list(array.shape)}" for name, array in batch.items()}
    changed = call("batch_transform", function, dict(batch))
    if not isinstance(changed, Mapping):
        raise UserError(
            f"batch_transform returned a value of type {_class(changed)}: expected a dict of {', '.join(expected)}"
        )
    arrays = {name: np.asarray(array) for name, array in changed.items()}
    found = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
    if different := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
        listed = "\n".join(f"  {n}: {expected.get(n, 'none')} -> {found.get(n, 'none')}" for n in different)
        raise UserError(
            f"batch_transform returned other arrays than it was given (given -> returned):\n{listed}\n"
            "Expected the same names, shapes and dtypes"
        )
    ids, whole, any_number = (0, vocab_size - 1), (0, np.iinfo(np.int32).max), (-MAX_WEIGHT, MAX_WEIGHT)
    ranges = {"tokens": ids, "targets": ids, "segment_ids": whole, "positions": whole, "loss_mask": any_number}
    for name, (least, most) in ranges.items():
        unfit = ~((arrays[name] >= least) & (arrays[name] <= most))  # NaN is within no range
        if unfit.any():
            raise UserError(
                f"batch_transform returned {name} with the value {arrays[name][unfit][0]}: expected {least} to {most}"
            )
    return arrays


def _is_indexed(made: Any) -> bool:
    return hasattr(made, "__len__") and hasattr(made, "__getitem__")


def _read_whole(made: Iterable[Any], setting: str, column: str, vocab_size: int) -> tuple[list[Any], Facts]:
    """The documents of an iterable, and a digest of them."""
    documents: list[str | np.ndarray] = []
    digest, total = hashlib.sha256(), 0
    iterator = call(setting, iter, made)
    while (item := call(name := f"{setting}: item {len(documents)}", next, iterator, _END)) is not _END:
        document = _document(item, name, column, vocab_size)
        data = document.encode() if isinstance(document, str) else document.tobytes()
        digest.update(b"%d " % len(data) + data)
        documents.append(document)
        total += len(data)
        if len(documents) > _MOST_DOCUMENTS or total > _MOST_BYTES:
            raise UserError(
                f"{setting} returned an iterable that has not ended after {len(documents):,} documents of {total:,} "
                "bytes. Iterables are kept in memory: return an object with __len__ and __getitem__ for more"
            )
    return documents, {"class": _class(made), "digest": digest.hexdigest()[:16]}


def _document(item: Any, name: str, column: str, vocab_size: int) -> str | np.ndarray:
    """The text of an item, or its ids as int32 [n]. Raises UserError for anything else."""
    read = functools.partial(as_document, vocab_size=vocab_size)
    try:
        return from_fields(item, column, read) if isinstance(item, Mapping) else read(item)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def _class(thing: Any) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
