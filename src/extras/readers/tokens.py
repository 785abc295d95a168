"""Reads documents that were tokenized before the run, without copying them: `dataset_type=tokens`.

`python -m src.tokenize_dataset` writes such a folder (docs/data.md has its format). A document of n ids, two or more,
has n - 1 pairs of an input and its target, so the first id of a shard's document d is the shard's id number
pair_starts[d] + d.

Local files are memory-mapped. In a remote folder, ids are read by byte ranges, and a shard's index is copied to this
machine when the shard is first used.

To detect damage, opening checks all sizes, and the digests of some local shards, half a GiB spread over the folder. Any
other index is checked on first use, by its digest if tokens.json has it (format 2), and ids as they are read.
"""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from src.config.dataset_spec import DatasetSpec
from src.data import order
from src.data.readers import files, find_files
from src.data.readers.records import Index
from src.data.types import Document, Fingerprint, InputSpec, Source
from src.extras.readers import remote_files
from src.system.errors import UserError, changed_keys, first_few
from src.system.json_text import parse_json
from src.system.storage_errors import attempted

FORMAT = 2
SUMMARY = "tokens.json"
# By the shard's number: its ids, and where its documents begin.
IDS_FILE, INDEX_FILE = "{:06d}.ids", "{:06d}.pair_starts.npy"
UNFINISHED = "unfinished.json"  # instead of tokens.json until all shards are written

_MAPPED_FILES = 200  # each uses a file descriptor, and processes are often limited to 1,024
_VERIFIED_BYTES = 1 << 29  # total size of shards whose digests are checked on opening


class ShardEntry(NamedTuple):
    """A shard's entry in tokens.json."""

    documents: int
    ids: int
    largest_id: int
    sha256: str  # of the file of ids
    ids_bytes: int
    index_bytes: int
    index_sha256: str = ""  # of the index; missing in folders of format 1

    @property
    def pairs(self) -> int:
        """Number of targets: each document has one fewer than ids."""
        return self.ids - self.documents


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lists how two fingerprints differ, entry by entry, also within mappings; `prefix` precedes each name."""
    changes = []
    for name in changed_keys(old, new):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += differences(before, after, f"{prefix}{name} ")
        else:
            changes.append(f"{prefix}{name} {before!r} there, {after!r} here")
    return changes


def missing_files(shards: Mapping[int, ShardEntry], sizes: Mapping[str, int]) -> list[str]:
    """Lists in a sentence each file of `shards` that is missing in `sizes`, in bytes by name, or has another size."""
    problems = []
    for number, shard in shards.items():
        for name, size in ((IDS_FILE.format(number), shard.ids_bytes), (INDEX_FILE.format(number), shard.index_bytes)):
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] != size:
                problems.append(f"{name} has {sizes[name]:,} bytes of {size:,}")
    return problems


class _TokenFolder:
    """Finds and reads the ids of a tokenized folder's documents; raises UserError if files don't match tokens.json."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._setting = spec.setting("dataset_path")
        listing = find_files.list_files(spec.dataset_path, spec.key("dataset_path"))
        self._folder, self._sizes = listing.folder, listing.sizes
        if SUMMARY not in self._sizes:
            if UNFINISHED in self._sizes:
                again = "run the same src.tokenize_dataset command again to continue"
                raise UserError(f"{self._setting} is not finished: {again}")
            contents = f"it has {first_few(self._sizes)}" if self._sizes else "it is empty"
            raise UserError(
                f"{self._setting} has no {SUMMARY} ({contents}). dataset_type=tokens reads a folder of token ids, and "
                "`python -m src.tokenize_dataset CONFIG tokenized_path=FOLDER` writes one from data of another type"
            )
        summary = files.read(self._path(SUMMARY), 0, self._sizes[SUMMARY])
        entries = _parse(summary, f"{self._setting}: {SUMMARY}")
        self._shards: list[ShardEntry] = entries["shards"]
        if problems := missing_files(dict(enumerate(self._shards)), self._sizes):
            more = f", and {len(problems) - 1} more files don't match it" if len(problems) > 1 else ""
            raise UserError(
                f"{self._setting}: {problems[0]}, by its {SUMMARY}{more}. The folder is incomplete or changed: copy "
                "it again, or write it again into a new folder"
            )
        self._documents = Index([shard.documents for shard in self._shards])
        self._pairs = Index([shard.pairs for shard in self._shards])
        if not len(self._documents):
            raise UserError(f"{self._setting} has no documents")
        self._dtype = np.dtype(entries["dtype"]).newbyteorder("<")
        self._tokenizer: Mapping[str, Any] | None = entries["tokenizer"]
        self._mapped = functools.lru_cache(maxsize=_MAPPED_FILES)(self._map)
        self._copies = remote_files.LocalCopies() if files.is_remote(self._folder) else None
        self._digest = hashlib.sha256(summary).hexdigest()[:16]
        self._verified_indexes: set[int] = set()
        self.listings: Sequence[Any] = [listing]
        if not self._copies:
            self._verify()

    def check(self, vocab_size: int, tokenizer: Mapping[str, Any] | None) -> None:
        """Raises UserError if an id exceeds the vocabulary, or if the ids' tokenizer has another fingerprint."""
        largest_id = max(shard.largest_id for shard in self._shards)
        if largest_id >= vocab_size:
            raise UserError(
                f"{self._setting} has ids up to {largest_id}, but with vocab_size={vocab_size} ids end before "
                f"{vocab_size}: set vocab_size={largest_id + 1} or more"
            )
        if tokenizer and self._tokenizer and (changes := differences(self._tokenizer, tokenizer)):
            raise UserError(
                f"{self._setting} was written with another tokenizer ({'; '.join(changes)}): set tokenizer_type "
                "and tokenizer_path to that one, or write the tokens again with this one"
            )

    def fingerprint(self) -> Fingerprint:
        tokens = sum(shard.ids for shard in self._shards)
        # `_digest` is of tokens.json, which includes digests of each shard's files.
        fingerprint = {"type": "tokens", "documents": len(self._documents), "tokens": tokens, "digest": self._digest}
        return fingerprint | {"contents": self.listings[0].fingerprint["contents"]}

    def _verify(self) -> None:
        """Checks the digests and indexes of some shards, `_VERIFIED_BYTES` at most; raises UserError for damage."""
        budget = _VERIFIED_BYTES
        for number in np.argsort(order.mix64(np.arange(len(self._shards), dtype=np.uint64))).tolist():
            shard, digest = self._shards[number], hashlib.sha256()
            if shard.ids_bytes + shard.index_bytes > budget:
                continue
            budget -= shard.ids_bytes + shard.index_bytes
            for chunk in files.chunks(self._path(IDS_FILE.format(number)), shard.ids_bytes):
                digest.update(chunk)
            if digest.hexdigest() != shard.sha256:
                raise self._damaged(IDS_FILE.format(number), f"its sha256 is not the one in {SUMMARY}")
            index = self._index(number)
            if shard.documents:
                self._check_order(number, index)

    def _check_order(self, shard: int, pair_starts: np.ndarray) -> None:
        if len(pair_starts) < 2 or not np.all(np.diff(pair_starts) > 0):
            raise self._damaged(INDEX_FILE.format(shard), "its documents do not follow each other")

    def _ids(self, shard: int, start: int, stop: int) -> np.ndarray:
        name, largest_id = IDS_FILE.format(shard), self._shards[shard].largest_id
        begin, end = start * self._dtype.itemsize, stop * self._dtype.itemsize
        data = files.read(self._path(name), begin, end) if self._copies else self._mapped(name)[begin:end]
        if len(data) < end - begin:
            raise self._damaged(name, f"it has become shorter than {SUMMARY} has it")
        ids = np.frombuffer(data, self._dtype).astype(np.int32)
        if ids.max(initial=0) > largest_id or ids.min(initial=0) < 0:  # 2**31 or more overflows
            raise self._damaged(name, f"it has ids beyond {largest_id}, its largest")
        return ids

    def _damaged(self, name: str, how: str) -> UserError:
        return UserError(f"{self._path(name)} is damaged: {how}. Copy it again, or write the tokens again")

    def _index(self, shard: int) -> np.ndarray:
        """Returns int64 [documents + 1]: the number of pairs before each of a shard's documents, and in total.

        Raises UserError if the index is damaged.
        """
        name, entry = INDEX_FILE.format(shard), self._shards[shard]
        count = entry.documents + 1
        # The array is at the end of the file. Skip numpy's header parsing by `ast`, which in Python 3.11 fails
        # occasionally when several threads do it (SystemError, python/cpython issue 106905).
        data = self._mapped(name)
        if entry.index_sha256 and shard not in self._verified_indexes:
            if hashlib.sha256(data).hexdigest() != entry.index_sha256:
                raise self._damaged(name, f"its sha256 is not the one in {SUMMARY}")
            self._verified_indexes.add(shard)
        index = data[-8 * count :].view("<i8")
        if (index[0], index[-1]) != (0, entry.pairs):
            raise self._damaged(name, f"by {SUMMARY} it is int64 [{count}] from 0 to {entry.pairs}")
        return index

    def _map(self, name: str) -> np.ndarray:
        file = self._path(name)
        place = self._copies.path(file, self._sizes[name]) if self._copies else file
        # A plain array: each slice of a memmap would be a memmap again, at ten times the cost.
        return attempted(file, lambda: np.memmap(place, np.uint8, "r").view(np.ndarray))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


class TokenRows(_TokenFolder):
    """Cuts all documents' pairs every T: row i has the pairs [i T, (i + 1) T), so it needs no packing position."""

    def __init__(self, spec: DatasetSpec, length: int) -> None:
        super().__init__(spec)
        self._length = length
        self.row_count = -(-len(self._pairs) // length)

    def row(self, i: int) -> list[Document]:
        """Returns a row's documents, of which the first and the last may be incomplete."""
        documents: list[Document] = []
        first, end = i * self._length, min((i + 1) * self._length, len(self._pairs))
        while first < end:
            shard, start = self._pairs.find(first)
            stop = min(start + end - first, self._shards[shard].pairs)
            index = self._index(shard)
            begin = int(np.searchsorted(index, start, side="right")) - 1
            after = int(np.searchsorted(index, stop, side="left"))
            self._check_order(shard, index[begin : after + 1] if begin >= 0 else index[:0])
            # Pair p of document d is ids p + d and p + d + 1 of the shard.
            ids = self._ids(shard, start + begin, stop + after)
            bounds = (np.clip(index[begin : after + 1], start, stop) - start).tolist()
            documents += [Document(ids[bounds[d] + d : bounds[d + 1] + d + 1]) for d in range(after - begin)]
            first += stop - start
        return documents


class TokenDocuments(_TokenFolder, Source):
    """Reads documents one by one, for rows with one document each."""

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i: int) -> np.ndarray:
        """Reads the int32 ids of document `i`, two or more."""
        shard, document = self._documents.find(i)
        pair_starts = self._index(shard)[document : document + 2]
        self._check_order(shard, pair_starts)
        first, last = pair_starts.tolist()
        return self._ids(shard, first + document, last + document + 1)


def _parse(summary: bytes, name: str) -> dict[str, Any]:
    try:
        entries = parse_json(summary)
        if (version := entries["format"]) not in range(1, FORMAT + 1):
            raise UserError(f"{name} is of format {version!r}; 1 to {FORMAT} are read here: write the tokens again")
        entries["shards"] = [ShardEntry(**shard) for shard in entries["shards"]]
        if entries["dtype"] not in ("uint16", "uint32") or not isinstance(entries["tokenizer"], dict | None):
            raise ValueError(f"dtype {entries['dtype']!r}, tokenizer {entries['tokenizer']!r}")
        if any([type(value) for value in shard] != [int, int, int, str, int, int, str] for shard in entries["shards"]):
            raise ValueError("a shard's entry is not integers and digests")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{name} is damaged ({type(error).__name__}: {error}): copy it again, or write the tokens again"
        ) from None
    return entries


def open_source(spec: DatasetSpec, inputs: InputSpec) -> "TokenRows | TokenDocuments":
    """Opens a folder of token ids: as rows if documents are packed, else as documents.

    Raises UserError if the folder is incomplete or damaged, or does not fit the vocabulary or tokenizer.
    """
    source = TokenRows(spec, inputs.batch.max_target_length) if inputs.batch.packing else TokenDocuments(spec)
    source.check(inputs.vocab_size, inputs.tokenizer.fingerprint() if inputs.tokenizer else None)
    return source
