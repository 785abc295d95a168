import ast
import itertools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from src.config.dataset_spec import DatasetSpec
from src.extras.readers.tokens import TokenDocuments, TokenRows
from src.system.errors import UserError
from tests.data import memory
from tests.data.every_source import write_tokens

TOKENIZER = {"type": "sentencepiece", "vocab_size": 70_000, "digest": "abc"}


def spec_of(path):
    return DatasetSpec("", 64 * 1024, dataset_type="tokens", dataset_path=str(path))


def write(folder, shards, dtype="uint16", /, **changes):
    return write_tokens(folder, shards, dtype, **{"tokenizer": TOKENIZER, **changes})


@pytest.fixture(scope="module")
def shards():
    """Documents of 2 to 60 ids, in shards of 0 to 30 documents; no id comes twice."""
    rng = np.random.default_rng(0)
    ids = iter(rng.permutation(60_000).tolist())
    return [[[next(ids) for _ in range(rng.integers(2, 61))] for _ in range(count)] for count in (0, 30, 1, 0, 17, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shards):
    return write(tmp_path_factory.mktemp("tokens") / "folder", shards)


@pytest.fixture
def store(folder):
    """The folder in a remote store."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/bucket/tokens", recursive=True)
    yield files
    files.rm("/bucket", recursive=True)


def pairs_of(document):
    return list(itertools.pairwise(document))


@pytest.mark.parametrize("length", [1, 2, 7, 64, 5_000])
def test_rows_have_each_pair_of_the_documents_once_and_in_order(folder, shards, length):
    rows = TokenRows(spec_of(folder), length)
    expected = [pair for shard in shards for document in shard for pair in pairs_of(document)]
    found = []
    for i in range(rows.row_count):
        row = [pair for document in rows.row(i) for pair in pairs_of(document.ids.tolist())]
        assert len(row) == (length if i + 1 < rows.row_count else len(expected) - length * (rows.row_count - 1))
        found += row
    assert found == expected


def test_what_a_row_has_of_a_document_is_one_document_of_the_row(folder, shards):
    """So that attention ends where a document does, also where the next one begins in another shard."""
    document_of = {id_: (s, d) for s, shard in enumerate(shards) for d, ids in enumerate(shard) for id_ in ids}
    rows = TokenRows(spec_of(folder), 100)
    for i in range(rows.row_count):
        owners = [{document_of[id_] for id_ in document.ids.tolist()} for document in rows.row(i)]
        assert all(len(owner) == 1 for owner in owners)
        assert len(set.union(*owners)) == len(owners)


def test_documents_are_those_written(folder, shards):
    documents = TokenDocuments(spec_of(folder))
    expected = [document for shard in shards for document in shard]
    assert [documents[i].tolist() for i in range(len(documents))] == expected
    assert documents[3].dtype == np.int32


def test_ids_may_have_32_bits(tmp_path):
    folder = write(tmp_path / "a", [[[1, 65_536, 7], [65_535, 3_000_000_000 // 2]]], "uint32")
    documents = TokenDocuments(spec_of(folder))
    assert [documents[i].tolist() for i in range(2)] == [[1, 65_536, 7], [65_535, 1_500_000_000]]


def test_rows_come_in_any_order_and_to_several_threads(folder):
    rows = TokenRows(spec_of(folder), 16)
    expected = [[document.ids.tolist() for document in rows.row(i)] for i in range(rows.row_count)]
    order = np.random.default_rng(0).integers(0, rows.row_count, 500).tolist()
    fresh = TokenRows(spec_of(folder), 16)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: [document.ids.tolist() for document in fresh.row(i)], order))
    assert found == [expected[i] for i in order]


def test_no_file_is_read_as_python(folder, shards, monkeypatch):
    """Python 3.11's parser, with which numpy reads the head of a .npy file, fails now and then in several threads."""

    def evaluate(text):
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "literal_eval", evaluate)
    assert TokenDocuments(spec_of(folder))[0].tolist() == shards[1][0]


def test_more_shards_than_stay_open_are_read(tmp_path):
    resource = pytest.importorskip("resource")
    shards = [[[n, n + 1, n + 2]] for n in range(300)]
    documents = TokenDocuments(spec_of(write(tmp_path / "a", shards)))
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))  # by the tests before it
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 280, hard))
    try:
        assert [documents[i].tolist() for i in range(300)] == [shard[0] for shard in shards]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def test_a_remote_folder_gives_the_same_rows_and_documents(folder, store):
    rows, remote = TokenRows(spec_of(folder), 50), TokenRows(spec_of("memory://bucket/tokens"), 50)
    assert remote.row_count == rows.row_count
    for i in range(rows.row_count):
        assert [d.ids.tolist() for d in remote.row(i)] == [d.ids.tolist() for d in rows.row(i)]
    documents, remote = TokenDocuments(spec_of(folder)), TokenDocuments(spec_of("memory://bucket/tokens"))
    assert [remote[i].tolist() for i in range(len(remote))] == [documents[i].tolist() for i in range(len(documents))]
    assert remote.fingerprint() == documents.fingerprint()


def test_of_a_remote_folder_an_index_is_read_once_and_ids_as_far_as_they_are_needed(store, monkeypatch):
    read = []
    original = type(store).cat_file

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = original(self, path, start, end, **kwargs)
        read.append((path.rpartition("/")[2], len(data)))
        return data

    monkeypatch.setattr(type(store), "cat_file", cat_file)
    rows = TokenRows(spec_of("memory://bucket/tokens"), 10)
    assert [name for name, _ in read] == ["tokens.json"]
    for i in range(20):
        rows.row(i)
    assert [name for name, _ in read].count("000001.pair_starts.npy") == 1
    for name, size in read:
        assert not name.endswith(".ids") or size <= 2 * 20  # a row of 10 pairs has parts of 10 documents at most


def test_a_store_s_file_that_became_shorter_is_named(store):
    rows = TokenRows(spec_of("memory://bucket/tokens"), 10)
    path = "/bucket/tokens/000001.ids"
    store.pipe_file(path, store.cat_file(path)[:50])
    with pytest.raises(UserError, match=r"000001\.ids is damaged: it has become shorter"):
        rows.row(5)


@pytest.mark.skipif(not memory.is_known, reason="Linux says it")
def test_a_hundred_million_documents_are_opened_and_read_in_little_memory(tmp_path):
    """An index of 800 MB in a sparse file: all documents but the last one are before its first pair."""
    documents, pairs = 100_000_000, 1_000_000
    index = np.lib.format.open_memmap(tmp_path / "000000.pair_starts.npy", "w+", np.int64, shape=(documents + 1,))
    index[-1] = pairs
    index.flush()
    with open(tmp_path / "000000.ids", "wb") as file:
        file.truncate(2 * (documents + pairs))
        file.seek(2 * (documents - 1 + 64 * 1_000))
        file.write(np.arange(100, dtype="<u2").tobytes())
    shard = {"documents": documents, "ids": documents + pairs, "largest_id": 99, "sha256": ""}
    sizes = {"ids_bytes": 2 * (documents + pairs), "index_bytes": (tmp_path / "000000.pair_starts.npy").stat().st_size}
    facts = {"format": 1, "dtype": "uint16", "tokenizer": None, "shards": [{**shard, **sizes}]}
    (tmp_path / "tokens.json").write_text(json.dumps(facts))
    script = f"""
from src.config.dataset_spec import DatasetSpec
from src.extras.readers.tokens import TokenDocuments, TokenRows
from tests.data import memory
before = memory.now()
spec = DatasetSpec("", 0, dataset_path={str(tmp_path)!r})
rows, documents = TokenRows(spec, 64), TokenDocuments(spec)
assert (rows.row_count, len(documents)) == (15_625, 100_000_000)
assert rows.row(1_000)[0].ids.tolist() == list(range(65))
assert len(documents[99_999_999]) == 1_000_001
print(memory.peak() - before)
"""
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert int(output) < 200 * 2**20


def test_the_fingerprint_tells_other_ids_and_not_another_place(tmp_path, shards, folder):
    same = TokenRows(spec_of(write(tmp_path / "same", shards)), 10).fingerprint()
    assert same == TokenRows(spec_of(folder), 20).fingerprint() == TokenDocuments(spec_of(folder)).fingerprint()
    assert same["documents"] == 48
    swapped = [[list(reversed(document)) for document in shard] for shard in shards]
    assert TokenRows(spec_of(write(tmp_path / "other", swapped)), 10).fingerprint() != same


def test_ids_beyond_the_vocabulary_are_an_error(folder, shards):
    largest = max(id_ for shard in shards for document in shard for id_ in document)
    tokens = TokenDocuments(spec_of(folder))
    tokens.check(largest + 1, None)
    with pytest.raises(
        UserError, match=f"dataset_path={folder} has ids up to {largest}.* set vocab_size={largest + 1}"
    ):
        tokens.check(largest, None)


def test_another_tokenizer_is_an_error_that_says_what_differs(folder):
    tokens = TokenRows(spec_of(folder), 10)
    tokens.check(70_000, dict(TOKENIZER))
    with pytest.raises(UserError, match="digest 'abc' there, 'xyz' here"):
        tokens.check(70_000, TOKENIZER | {"digest": "xyz"})


def test_ids_without_a_known_tokenizer_suit_any(tmp_path):
    TokenDocuments(spec_of(write(tmp_path / "a", [[[1, 2]]], tokenizer=None))).check(3, TOKENIZER)


@pytest.mark.parametrize("source", [TokenDocuments, lambda spec: TokenRows(spec, 8)])
class TestBadFolders:
    def test_a_folder_of_another_type(self, source, tmp_path):
        (tmp_path / "books.jsonl").write_text('{"text": "a"}\n')
        with pytest.raises(UserError, match=r"it has books\.jsonl.*python -m src\.tokenize_dataset CONFIG"):
            source(spec_of(tmp_path))

    def test_an_empty_folder(self, source, tmp_path):
        with pytest.raises(UserError, match=r"no tokens\.json \(it is empty\)"):
            source(spec_of(tmp_path))

    def test_no_folder(self, source, tmp_path):
        with pytest.raises(UserError, match=f"dataset_path={tmp_path}/a: there is no such file or folder"):
            source(spec_of(tmp_path / "a"))

    def test_an_unfinished_folder(self, source, tmp_path):
        folder = write(tmp_path / "a", [[[1, 2]]])
        (folder / "tokens.json").rename(folder / "unfinished.json")
        with pytest.raises(UserError, match="is not finished: run the same"):
            source(spec_of(folder))

    @pytest.mark.parametrize("name", ["000001.ids", "000002.pair_starts.npy"])
    def test_a_missing_file(self, source, tmp_path, shards, name):
        folder = write(tmp_path / "a", shards)
        (folder / name).unlink()
        with pytest.raises(UserError, match=f"dataset_path={folder}: {name} is missing"):
            source(spec_of(folder))

    @pytest.mark.parametrize("name", ["000001.ids", "000002.pair_starts.npy"])
    def test_a_truncated_file(self, source, tmp_path, shards, name):
        folder = write(tmp_path / "a", shards)
        size = (folder / name).stat().st_size
        (folder / name).write_bytes((folder / name).read_bytes()[:-2])
        with pytest.raises(UserError, match=f"{name} has {size - 2:,} bytes of {size:,}"):
            source(spec_of(folder))

    @pytest.mark.parametrize("cut", [0, 10, -1])
    def test_damaged_json(self, source, tmp_path, cut):
        folder = write(tmp_path / "a", [[[1, 2]]])
        (folder / "tokens.json").write_text((folder / "tokens.json").read_text()[:cut])
        with pytest.raises(UserError, match=r"tokens\.json is damaged"):
            source(spec_of(folder))

    @pytest.mark.parametrize("change", [{"dtype": "int8"}, {"shards": [{"ids": 3}]}, {"shards": 3}, {"tokenizer": "a"}])
    def test_json_of_other_facts(self, source, tmp_path, change):
        with pytest.raises(UserError, match=r"tokens\.json is damaged"):
            source(spec_of(write(tmp_path / "a", [[[1, 2]]], **change)))

    @pytest.mark.parametrize("version", [0, 3, "1.5"])
    def test_another_format(self, source, tmp_path, version):
        with pytest.raises(UserError, match=f"is of format {version!r}; 1 to 2 are read here"):
            source(spec_of(write(tmp_path / "a", [[[1, 2]]], format=version)))

    def test_no_document(self, source, tmp_path):
        with pytest.raises(UserError, match="has no document"):
            source(spec_of(write(tmp_path / "a", [[], []])))


@pytest.fixture
def unverified(monkeypatch):
    """As of a folder that is too large to be verified at its opening."""
    monkeypatch.setattr("src.extras.readers.tokens._VERIFIED_BYTES", 0)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("source", [lambda spec: TokenRows(spec, 3), TokenDocuments])
def test_one_bit_of_the_ids_is_noticed_at_the_opening(tmp_path, source):
    folder = write(tmp_path / "a", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    source(spec_of(folder))
    flip(folder / "000001.ids", 0)
    with pytest.raises(UserError, match=r"000001\.ids is damaged: its sha256"):
        source(spec_of(folder))


CHANGES = {  # of an index; each leaves a list of ascending numbers, as an index is
    "one": lambda starts: [*starts[:5], starts[5] + 1, *starts[6:]],
    "many": lambda starts: [starts[0], *(start + 1 for start in starts[1:-1]), starts[-1]],
}


@pytest.fixture(scope="module")
def long_documents():
    """A shard of twenty documents of seven ids."""
    return [[[document] * 7 for document in range(20)]]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("source", [lambda spec: TokenRows(spec, 3), TokenDocuments])
def test_a_changed_index_is_noticed_at_the_opening(tmp_path, long_documents, source, change):
    """Its documents still follow each other, and other tokens would be the last of a document."""
    folder = write(tmp_path / "a", long_documents)
    index = folder / "000000.pair_starts.npy"
    np.save(index, np.array(change(np.load(index).tolist())))
    with pytest.raises(UserError, match=r"000000\.pair_starts\.npy is damaged: its sha256"):
        source(spec_of(folder))


@pytest.mark.parametrize("bit", [0, 700, -1])
def test_one_bit_of_any_file_that_decides_a_batch_is_noticed_at_the_opening(tmp_path, shards, bit):
    folder = write(tmp_path / "a", shards)
    for file in sorted(folder.glob("0*")):
        data = file.read_bytes()
        if data:
            flip(file, max(bit, -len(data)) if bit < 0 else min(bit, len(data) - 1))
            with pytest.raises(UserError, match=re.escape(file.name)):
                TokenDocuments(spec_of(folder))
            file.write_bytes(data)
    TokenDocuments(spec_of(folder))


@pytest.mark.usefixtures("unverified")
def test_a_changed_index_is_noticed_at_its_first_use(tmp_path, long_documents):
    folder = write(tmp_path / "a", [*long_documents, [[1, 2, 3]]])
    index = folder / "000000.pair_starts.npy"
    np.save(index, np.array(CHANGES["one"](np.load(index).tolist())))
    documents = TokenDocuments(spec_of(folder))
    assert documents[20].tolist() == [1, 2, 3]
    with pytest.raises(UserError, match=r"000000\.pair_starts\.npy is damaged: its sha256"):
        documents[19]


def test_a_changed_index_in_a_store_is_noticed_at_its_first_use(store):
    path = "/bucket/tokens/000001.pair_starts.npy"
    data = bytearray(store.cat_file(path))
    data[-16] ^= 1  # the last document but one ends elsewhere
    store.pipe_file(path, bytes(data))
    with pytest.raises(UserError, match=r"000001\.pair_starts\.npy is damaged: its sha256"):
        TokenRows(spec_of("memory://bucket/tokens"), 10).row(0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_of_a_folder_of_format_1_a_changed_index_has_another_fingerprint(tmp_path, long_documents, change):
    """It is read as before, and a run that began with the other index is told."""
    folder = write(tmp_path / "a", long_documents, format=1)
    before = TokenDocuments(spec_of(folder)).fingerprint()
    index = folder / "000000.pair_starts.npy"
    np.save(index, np.array(change(np.load(index).tolist())))
    after = TokenDocuments(spec_of(folder)).fingerprint()
    assert {name for name in before if before[name] != after[name]} == {"contents"}


def test_a_scrambled_index_of_format_1_is_noticed_at_the_opening(tmp_path):
    folder = write(tmp_path / "a", [[[1, 2, 3], [3, 4], [5, 6, 7, 8]]], format=1)
    np.save(folder / "000000.pair_starts.npy", np.array([0, 3, 2, 6]))
    with pytest.raises(UserError, match=r"000000\.pair_starts\.npy is damaged"):
        TokenDocuments(spec_of(folder))


@pytest.mark.usefixtures("unverified")
def test_of_a_folder_too_large_to_verify_what_is_read_is_checked(tmp_path):
    folder = write(tmp_path / "a", [[[1, 2, 3], [3, 4], [5, 6, 7, 8]]], format=1)
    np.save(folder / "000000.pair_starts.npy", np.array([0, 3, 2, 6]))
    with pytest.raises(UserError, match=r"pair_starts\.npy is damaged: its documents do not follow"):
        TokenDocuments(spec_of(folder))[1]
    with pytest.raises(UserError, match=r"pair_starts\.npy is damaged: its documents do not follow"):
        TokenRows(spec_of(folder), 6).row(0)
    folder = write(tmp_path / "b", [[[1, 2, 3], [3, 4]]])
    flip(folder / "000000.ids", 1)  # the first id becomes 257
    with pytest.raises(UserError, match=r"000000\.ids is damaged: it has ids beyond 4"):
        TokenDocuments(spec_of(folder))[0]


@pytest.mark.usefixtures("unverified")
def test_a_damaged_index_is_named_when_it_is_reached(tmp_path):
    folder = write(tmp_path / "a", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    np.save(folder / "000001.pair_starts.npy", np.array([1, 1, 2]))
    documents = TokenDocuments(spec_of(folder))
    assert documents[1].tolist() == [3, 4]
    with pytest.raises(UserError, match=r"000001\.pair_starts\.npy is damaged"):
        documents[2]
    (folder / "000001.pair_starts.npy").write_bytes(bytes((folder / "000001.pair_starts.npy").stat().st_size))
    with pytest.raises(UserError, match=r"000001\.pair_starts\.npy is damaged"):
        TokenDocuments(spec_of(folder))[2]
