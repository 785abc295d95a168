"""Documents that were tokenized before the run, read where they lie: `dataset_type=tokens`.

`python -m src.tokenize_dataset` writes such a folder. Of each shard, numbered from 0, it has

    000000.ids              the ids of the shard's documents end to end, uint16 or uint32, little-endian
    000000.pair_starts.npy  int64 [documents + 1]: how many pairs the shard has before each document, and in all

A document of n ids, two or more, has n - 1 (token, target) pairs, so the first id of a shard's document d is its id
number pair_starts[d] + d. Beside them, tokens.json has

    format            1; it changes where these files are to be read in another way
    dtype             of the ids: uint16 or uint32
    vocab_size        that of the config they were written with: every id is below it
    tokenizer         the tokenizer's fingerprint; null where the source had ids and no text
    source, settings  the source's fingerprint, and the config's settings of it
    items_per_shard   how many of the source's items went into each shard; those without a pair are left out
    shards            of each: documents, ids, largest_id, sha256 of its ids, ids_bytes and index_bytes of the two files

Local files are mapped into memory. Of a remote folder ids are read by ranges, and a shard's index is copied to this
machine when the shard is first read from.

Damage: sizes are compared at the opening, and the digests and indexes of local shards of half a GiB together, spread
over the folder. Ids and bounds of documents are checked as they are read, whatever the folder's size.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from src.config.source_spec import SourceSpec
from src.data import order
from src.data.readers import files
from src.data.types import Document, Source
from src.errors import UserError, first_few
from src.json_text import parse_json

FORMAT = 1
SUMMARY = "tokens.json"
UNFINISHED = "unfinished.json"  # in the place of tokens.json while shards are being written

# Each mapped file holds a file descriptor, of which a process often has no more than 1,024: so many shards stay mapped.
_MAPPED = 100
_VERIFIED_BYTES = 1 << 29  # of shards whose digests are compared at the opening


class ShardFacts(NamedTuple):
    """What tokens.json says of a shard."""

    documents: int
    ids: int
    largest_id: int
    sha256: str
    ids_bytes: int
    index_bytes: int


def ids_name(shard: int) -> str:
    """The file with a shard's ids."""
    return f"{shard:06d}.ids"


def index_name(shard: int) -> str:
    """The file that says where a shard's documents begin."""
    return f"{shard:06d}.pair_starts.npy"


def missing_files(shards: Mapping[int, ShardFacts], sizes: Mapping[str, int]) -> list[str]:
    """What is wrong with the files of these shards, a sentence each.

    Args:
        shards: by their numbers.
        sizes: of the files there are, in bytes.
    """
    problems = []
    for number, shard in shards.items():
        for name, size in ((ids_name(number), shard.ids_bytes), (index_name(number), shard.index_bytes)):
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] != size:
                problems.append(f"{name} has {sizes[name]:,} bytes of {size:,}")
    return problems


class _Tokens:
    """What rows and documents have in common: the folder, its documents numbered over all shards.

    Raises:
        UserError: it is no such folder, or its files are not those that its tokens.json tells of.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self._setting = spec.setting("dataset_path")
        listing = files.list_files(spec.path, spec.key("dataset_path"))
        self._folder = listing.folder
        self._sizes = dict(zip(listing.names, listing.sizes, strict=True))
        if SUMMARY not in self._sizes:
            raise _no_summary(self._setting, listing.names)
        summary = files.read(self._path(SUMMARY), 0, self._sizes[SUMMARY])
        facts = _parse(summary, f"{self._setting}: {SUMMARY}")
        shards: list[ShardFacts] = facts["shards"]
        if problems := missing_files(dict(enumerate(shards)), self._sizes):
            others = f", and {len(problems) - 1} more files are not as it says" if len(problems) > 1 else ""
            raise UserError(
                f"{self._setting}: {problems[0]}, by its {SUMMARY}{others}. It was copied in part, or changed: copy it "
                "again, or write it again into a new folder"
            )
        documents = np.array([shard.documents for shard in shards], np.int64)
        ids = np.array([shard.ids for shard in shards], np.int64)
        # Before each shard, and in all: documents, and pairs.
        self._document_starts = np.concatenate([[0], np.cumsum(documents)])
        self._pair_starts = np.concatenate([[0], np.cumsum(ids - documents)])
        if not self._document_starts[-1]:
            raise UserError(f"{self._setting} has no document")
        self._dtype = np.dtype(facts["dtype"]).newbyteorder("<")
        self._tokenizer: Mapping[str, Any] | None = facts["tokenizer"]
        self._index = functools.lru_cache(maxsize=_MAPPED)(self._map_index)
        self._mapped_ids = functools.lru_cache(maxsize=_MAPPED)(self._map_ids)
        self._copies = tempfile.TemporaryDirectory(prefix="mintext-") if files.is_remote(self._folder) else None
        self._fingerprint = {
            "type": "tokens",
            "documents": int(documents.sum()),
            "tokens": int(ids.sum()),
            "digest": hashlib.sha256(summary).hexdigest()[:16],
        }
        self._largest_ids = [shard.largest_id for shard in shards]
        if not self._copies:
            self._verify(shards)

    def check(self, vocab_size: int, tokenizer: Mapping[str, Any] | None) -> None:
        """Raises UserError where the ids don't suit the run.

        Args:
            vocab_size: V of its model.
            tokenizer: its tokenizer's fingerprint; None where it has none.
        """
        largest_id = max(self._largest_ids)
        if largest_id >= vocab_size:
            raise UserError(
                f"{self._setting} has ids up to {largest_id}, and vocab_size={vocab_size} has none from "
                f"{vocab_size} on: set vocab_size={largest_id + 1} or more"
            )
        if tokenizer is None or self._tokenizer is None:
            return
        if differences := compare(self._tokenizer, tokenizer):
            raise UserError(
                f"{self._setting} was written with another tokenizer ({'; '.join(differences)}): set tokenizer_type "
                "and tokenizer_path to that one, or write the tokens again with this one"
            )

    def fingerprint(self) -> dict[str, str | int]:
        """Counts, and a digest of tokens.json, which has one of each shard's ids."""
        return dict(self._fingerprint)

    def _verify(self, shards: list[ShardFacts]) -> None:
        """Compares digests of some local shards' ids, and looks through their indexes, before anything is read."""
        spread = np.argsort(order.mix64(np.arange(len(shards), dtype=np.uint64))).tolist()
        chosen, budget = [], _VERIFIED_BYTES
        for shard in spread:
            if (size := shards[shard].ids_bytes + shards[shard].index_bytes) <= budget:
                chosen.append(shard)
                budget -= size

        def verify(shard: int) -> None:
            digest = hashlib.sha256()
            for chunk in files.chunks(self._path(ids_name(shard)), shards[shard].ids_bytes):
                digest.update(chunk)
            if digest.hexdigest() != shards[shard].sha256:
                raise self._damaged(ids_name(shard), f"its sha256 is not the one in {SUMMARY}")
            if shards[shard].documents and not np.all(np.diff(self._index(shard)) > 0):
                raise self._damaged(index_name(shard), "its documents do not follow each other")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(verify, chosen))

    def _ids(self, shard: int, start: int, stop: int) -> np.ndarray:
        """int32: the ids [start, stop) of a shard."""
        if self._copies is None:
            ids = self._mapped_ids(shard)[start:stop].astype(np.int32)
        else:
            size = self._dtype.itemsize
            data = files.read(self._path(ids_name(shard)), start * size, stop * size)
            ids = np.frombuffer(data[: len(data) // size * size], self._dtype).astype(np.int32)
        if len(ids) < stop - start:
            raise self._damaged(ids_name(shard), f"it has become shorter than {SUMMARY} has it")
        if ids.max(initial=0) > self._largest_ids[shard] or ids.min(initial=0) < 0:  # of 2**31 and more
            raise self._damaged(ids_name(shard), f"it has ids beyond {self._largest_ids[shard]}, its largest")
        return ids

    def _damaged(self, name: str, how: str) -> UserError:
        return UserError(f"{self._path(name)} is damaged: {how}. Copy it again, or write the tokens again")

    def _map_ids(self, shard: int) -> np.ndarray:
        """All ids of a shard that has a document, in its file."""
        path = self._path(ids_name(shard))
        # The bare array: each slice of a memmap would be one again, at ten times the price.
        return files.attempted(path, lambda: np.memmap(path, self._dtype, "r").view(np.ndarray))

    def _map_index(self, shard: int) -> np.ndarray:
        """int64 [documents + 1]: the pairs of a shard before each of its documents, and in all."""
        path = self._path(index_name(shard))
        documents = int(np.diff(self._document_starts[shard : shard + 2])[0])
        pairs = int(np.diff(self._pair_starts[shard : shard + 2])[0])
        # The array ends the file. numpy reads what is before it with `ast`, which in Python 3.11 fails now and then
        # where threads are at it together (SystemError, python/cpython issue 106905).
        place = self._copied(index_name(shard)) if self._copies else path
        index = files.attempted(
            path, lambda: np.memmap(place, np.uint8, "r").view(np.ndarray)[-8 * (documents + 1) :].view("<i8")
        )
        if (index[0], index[-1]) != (0, pairs):
            raise self._damaged(index_name(shard), f"by {SUMMARY} it is int64 [{documents + 1}] from 0 to {pairs}")
        return index

    def _copied(self, name: str) -> Path:
        """A copy on this machine of a file in a remote folder."""
        copy = Path(self._copies.name) / name
        if not copy.exists():
            descriptor, part = tempfile.mkstemp(dir=copy.parent)  # another thread may be at it too
            with open(descriptor, "wb") as file:
                file.writelines(files.chunks(self._path(name), self._sizes[name]))
            os.replace(part, copy)
        return copy

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


class TokenRows(_Tokens):
    """The pairs of all documents end to end, cut at T: row i has the pairs [i T, (i + 1) T), the last row fewer.

    So each pair comes once an epoch, and a row is found by two searches in the indexes: nothing is kept from before.

    Args:
        spec: its `dataset_path` is the folder.
        length: T, pairs per row.

    Raises:
        UserError: it is no such folder, or its files are not those that its tokens.json tells of.
    """

    def __init__(self, spec: SourceSpec, length: int) -> None:
        super().__init__(spec)
        self._length = length
        self._pairs = int(self._pair_starts[-1])
        self.row_count = -(-self._pairs // length)

    def row(self, i: int) -> list[Document]:
        """Row `i`: whole documents, but for the first and the last one, of which it may be a part."""
        documents: list[Document] = []
        first, end = i * self._length, min((i + 1) * self._length, self._pairs)
        while first < end:
            shard = int(np.searchsorted(self._pair_starts, first, side="right")) - 1
            before, after = self._pair_starts[shard : shard + 2].tolist()
            last = min(end, after)
            documents.extend(self._documents(shard, first - before, last - before))
            first = last
        return documents

    def _documents(self, shard: int, first: int, last: int) -> Iterator[Document]:
        """The documents that the pairs [first, last) of a shard belong to, as far as these go."""
        index = self._index(shard)
        begin = int(np.searchsorted(index, first, side="right")) - 1
        end = int(np.searchsorted(index, last, side="left"))
        if not (0 <= begin < end and np.all(np.diff(index[begin : end + 1]) > 0)):
            raise self._damaged(index_name(shard), "its documents do not follow each other")
        # Pair p of document d is ids p + d and p + d + 1 of the shard.
        ids = self._ids(shard, first + begin, last + end)
        bounds = (np.clip(index[begin : end + 1], first, last) - first).tolist()
        for d in range(end - begin):
            yield Document(ids[bounds[d] + d : bounds[d + 1] + d + 1])


class TokenDocuments(_Tokens, Source):
    """The documents one by one, for rows of one document each. The argument and errors are those of TokenRows."""

    def __len__(self) -> int:
        """How many documents there are."""
        return int(self._document_starts[-1])

    def __getitem__(self, i: int) -> np.ndarray:
        """The int32 ids of document `i`, two or more."""
        shard = int(np.searchsorted(self._document_starts, i, side="right")) - 1
        document = i - int(self._document_starts[shard])
        first, last = self._index(shard)[document : document + 2].tolist()
        if not first < last:
            raise self._damaged(index_name(shard), "its documents do not follow each other")
        return self._ids(shard, first + document, last + document + 1)


def compare(there: Mapping[str, Any], here: Mapping[str, Any], of: str = "") -> list[str]:
    """How two fingerprints differ, fact by fact; `of` is what to say before a fact's name."""
    differences = []
    for name in dict.fromkeys([*there, *here]):
        old, new = there.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differences += compare(old, new, f"{of}{name} ")
        elif old != new:
            differences.append(f"{of}{name} {old!r} there, {new!r} here")
    return differences


def _parse(summary: bytes, name: str) -> dict[str, Any]:
    """tokens.json's facts, with `shards` as a list of ShardFacts; raises UserError where it is damaged."""
    try:
        facts = parse_json(summary)
        if (version := facts["format"]) != FORMAT:
            raise UserError(f"{name} is of format {version!r}, and this version reads {FORMAT}: write the tokens again")
        facts["shards"] = [ShardFacts(**shard) for shard in facts["shards"]]
        if facts["dtype"] not in ("uint16", "uint32") or not isinstance(facts["tokenizer"], dict | None):
            raise ValueError(f"dtype {facts['dtype']!r}, tokenizer {facts['tokenizer']!r}")
        if any([type(fact) for fact in shard] != [int, int, int, str, int, int] for shard in facts["shards"]):
            raise ValueError("a shard's facts are not whole numbers and a digest")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{name} is damaged ({type(error).__name__}: {error}): copy it again, or write the tokens again"
        ) from None
    return facts


def _no_summary(setting: str, names: list[str]) -> UserError:
    """Why a folder without tokens.json is not read."""
    if UNFINISHED in names:
        return UserError(
            f"{setting} is not finished: type the command of src.tokenize_dataset that began it again, and it goes on"
        )
    found = f"it has {first_few(names)}" if names else "it is empty"
    return UserError(
        f"{setting} has no {SUMMARY} ({found}). dataset_type=tokens reads a folder of token ids, and `python -m "
        "src.tokenize_dataset CONFIG tokenized_path=FOLDER` writes one from data of another type"
    )
