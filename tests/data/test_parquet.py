import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from src.config.dataset_spec import train_specs
from src.data.group_shuffle import GroupShuffle
from src.system.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
parquet = pytest.importorskip("src.extras.readers.parquet")


@pytest.fixture
def open_parquet(config):
    def make(path, column="text"):
        keys = {"dataset_type": "parquet", "dataset_path": str(path), "dataset_column": column}
        return parquet.ParquetSource(*train_specs(config(**keys).data))

    return make


def write(file, rows=10, row_group_size=4, **columns):
    """A file with a column `text` in row groups, and others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {"text": [f"{file.stem} {n}" for n in range(rows)], **columns}
    pq.write_table(pa.table(columns), file, row_group_size=row_group_size)
    return file


def items(source):
    return [source[i] for i in range(len(source))]


def test_rows_come_in_order_of_files_as_pyarrow_reads_them(tmp_path, open_parquet):
    for name in ("b.parquet", "a/z.parquet", "a/y.parquet"):
        write(tmp_path / name)
    names = ("a/y.parquet", "a/z.parquet", "b.parquet")
    expected = [text for name in names for text in pq.read_table(tmp_path / name)["text"].to_pylist()]
    source = open_parquet(tmp_path)
    assert len(source) == 30
    assert items(source) == expected
    assert source.group_sizes().tolist() == [4, 4, 2] * 3
    assert source.document_keys() is None
    assert items(open_parquet(tmp_path / "a" / "*.parquet")) == expected[:20]
    assert items(open_parquet(tmp_path / "b.parquet")) == expected[20:]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_of_every_string_type(tmp_path, open_parquet, kind):
    texts = ["é", "", "two\nlines", None, "é"]
    write(tmp_path / "a.parquet", row_group_size=2, text=pa.array(texts, pa.string()).cast(kind))
    assert items(open_parquet(tmp_path)) == [text or "" for text in texts]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2), pa.list_(pa.uint64())]
)
def test_ids_of_every_list_type(tmp_path, open_parquet, kind):
    lists = [[1, 2], [65_535, 0], None, [3, 4], [5, 6]]
    write(tmp_path / "a.parquet", row_group_size=2, text=pa.array(lists, kind))
    source = open_parquet(tmp_path)
    assert [ids.tolist() for ids in items(source)] == [ids or [] for ids in lists]
    assert {ids.dtype for ids in items(source)} == {np.dtype(np.int32)}


def test_a_column_of_nulls_has_empty_texts(tmp_path, open_parquet):
    write(tmp_path / "a.parquet", text=[None] * 3)
    write(tmp_path / "b.parquet", rows=2)
    assert items(open_parquet(tmp_path)) == ["", "", "", "b 0", "b 1"]


def test_lists_of_different_lengths(tmp_path, open_parquet):
    lists = [list(range(n)) for n in (3, 0, 200, 1)]
    write(tmp_path / "a.parquet", row_group_size=3, text=lists)
    assert [ids.tolist() for ids in items(open_parquet(tmp_path))] == lists


def test_a_field_of_structs_and_a_name_with_a_dot(tmp_path, open_parquet):
    structs = [{"content": {"text": f"inner {n}", "id": n}} for n in range(5)]
    write(tmp_path / "a.parquet", text=structs, **{"x.y": [f"dotted {n}" for n in range(5)]})
    assert items(open_parquet(tmp_path, "text.content.text")) == [f"inner {n}" for n in range(5)]
    assert items(open_parquet(tmp_path, "x.y")) == [f"dotted {n}" for n in range(5)]
    write(tmp_path / "a.parquet", text=structs, **{"text.content.text": [f"dotted {n}" for n in range(5)]})
    assert items(open_parquet(tmp_path, "text.content.text")) == [f"dotted {n}" for n in range(5)]


def test_empty_row_groups_and_files_are_passed_over(tmp_path, open_parquet):
    write(tmp_path / "a.parquet", rows=0)
    with pq.ParquetWriter(tmp_path / "b.parquet", pa.schema({"text": pa.string()})) as writer:
        for texts in ([], ["one", "two"], [], ["three"]):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}), row_group_size=4)
    source = open_parquet(tmp_path)
    assert items(source) == ["one", "two", "three"]
    order = GroupShuffle(source.group_sizes(), 0, 0)
    assert sorted(source[order(n)] for n in range(3)) == ["one", "three", "two"]


def test_each_row_group_is_read_once_an_epoch_and_only_its_column(tmp_path, open_parquet, monkeypatch):
    for n in range(5):
        write(tmp_path / f"{n}.parquet", rows=100, row_group_size=10, other=["x" * 1000] * 100)
    reads = []
    read = pq.ParquetFile.read_row_group

    def counted(self, number, columns=None, **keys):
        reads.append(columns)
        return read(self, number, columns=columns, **keys)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 300)  # two groups
    source = open_parquet(tmp_path)
    assert reads == []
    order = GroupShuffle(source.group_sizes(), 0, 0)
    assert len({source[order(n)] for n in range(500)}) == 500
    assert reads == [["text"]] * 50


def test_row_groups_of_one_size_have_orders_of_their_own():
    """Rows that are sorted within each group would otherwise come sorted alike from all."""
    order = GroupShuffle(np.full(4, 100), 0, 0)
    epochs = np.array([order(n) for n in range(800)]).reshape(2, 4, 100)
    for epoch in epochs:
        assert sorted(epoch.ravel()) == list(range(400))
    inner = {tuple(group % 100) for group in epochs.reshape(8, 100)}
    assert len(inner) == 8


@pytest.fixture
def counted_reads(monkeypatch):
    """The numbers of the row groups read, and a function to be called at each read."""
    reads, at_each, read = [], [lambda: None], pq.ParquetFile.read_row_group

    def counted(self, number, **keys):
        reads.append(number)
        at_each[0]()
        return read(self, number, **keys)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    return reads, at_each


def test_the_cache_keeps_what_was_used_last_within_its_bytes(tmp_path, open_parquet, counted_reads, monkeypatch):
    pq.write_table(pa.table({"text": ["x" * 96] * 4}), tmp_path / "a.parquet", row_group_size=1)
    reads, _ = counted_reads
    source = open_parquet(tmp_path)
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 3 * (96 + 2 * 4))  # two offsets of 4 bytes
    for group in (0, 1, 2, 0, 3, 0, 1, 3, 2):
        source[group]
    # 3 puts 1 out, 1 puts 2 out, 2 puts 0 out.
    assert reads == [0, 1, 2, 3, 1, 2]


def test_threads_that_want_one_row_group_wait_for_one_read(tmp_path, open_parquet, counted_reads):
    pq.write_table(pa.table({"text": ["x"] * 4}), tmp_path / "a.parquet")
    started, may_end = threading.Event(), threading.Event()
    reads, at_each = counted_reads
    at_each[0] = lambda: (started.set(), may_end.wait(60))
    source = open_parquet(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(source.__getitem__, i) for i in range(4)]
        assert started.wait(60)
        may_end.set()
        assert [future.result() for future in waiting] == ["x"] * 4
    assert reads == [0]


def test_many_threads_read_what_one_reads(tmp_path, open_parquet, monkeypatch):
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 300)
    for n in range(3):
        write(tmp_path / f"{n}.parquet", rows=50, row_group_size=7)
    expected = items(open_parquet(tmp_path))
    source = open_parquet(tmp_path)
    numbers = np.random.default_rng(0).integers(0, 150, 2000).tolist()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(source.__getitem__, numbers)) == [expected[i] for i in numbers]


def test_fingerprint_is_of_names_sizes_rows_and_column(tmp_path, open_parquet):
    def found(place, column="text", **columns):
        write(tmp_path / place / "a.parquet", **{"other": ["x"] * 10, **columns})
        return open_parquet(tmp_path / place, column).fingerprint()

    first = found("x")
    assert first == found("y")
    assert (first["documents"], first["file a.parquet"]) == (10, (tmp_path / "x" / "a.parquet").stat().st_size)
    assert found("x", "other") != first
    assert found("z", text=[f"other {n}" for n in range(10)]) != first


@pytest.mark.parametrize(
    ("columns", "column", "message"),
    [
        ({"b": ["x"] * 10}, "body", r"dataset_column=body: .*a\.parquet has no such column; it has b, text"),
        ({"text": [{"a": "x"}] * 10}, "text.b", "has no such column; it has text"),
        ({"text": [1.5] * 10}, "text", r"dataset_column=text: in .*a\.parquet the column is of type double"),
        ({"text": [b"x"] * 10}, "text", "of type binary; expected strings, or lists"),
        ({"text": [["x"]] * 10}, "text", "of type list"),
        ({"text": [[1.5]] * 10}, "text", "of type list"),
        ({"text": [3] * 10}, "text", "of type int64"),
        ({"text": [{"a": "x"}] * 10}, "text", "of type struct"),
    ],
)
def test_a_column_that_is_absent_or_no_text_is_an_error_at_opening(tmp_path, open_parquet, columns, column, message):
    write(tmp_path / "a.parquet", **columns)
    with pytest.raises(UserError, match=message):
        open_parquet(tmp_path, column)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, None], "there is a null among the ids"),
        ([3, -1], "the id -1 is not in the range"),
        ([3, 2**40], "the id 1099511627776 is not in the range"),
    ],
)
def test_ids_that_are_none_are_an_error_that_names_the_row(tmp_path, open_parquet, ids, message):
    write(tmp_path / "a.parquet", row_group_size=4, text=[[1]] * 6 + [ids])
    source = open_parquet(tmp_path)
    assert source[5].tolist() == [1]
    with pytest.raises(UserError, match=rf"a\.parquet, row group 1, row 2 of the group, text: {message}"):
        source[6]


def test_a_string_that_is_not_utf8_is_an_error_that_names_the_row(tmp_path, open_parquet):
    broken = pa.array([b"fine", b"caf\xe9"]).view(pa.string())
    write(tmp_path / "a.parquet", row_group_size=4, text=broken)
    source = open_parquet(tmp_path)
    assert source[0] == "fine"
    with pytest.raises(UserError, match=r"a\.parquet, row group 0, row 1 of the group, text: 'utf-8' codec"):
        source[1]


def test_nothing_there_and_no_row_are_errors(tmp_path, open_parquet):
    with pytest.raises(UserError, match=r"dataset_path=.*nowhere: there is no such file"):
        open_parquet(tmp_path / "nowhere")
    with pytest.raises(UserError, match="dataset_path is empty"):
        open_parquet("")
    with pytest.raises(UserError, match="has no row"):
        open_parquet(tmp_path)
    write(tmp_path / "a.parquet", text=pa.array([], pa.string()))
    with pytest.raises(UserError, match=rf"dataset_path={tmp_path} has no row"):
        open_parquet(tmp_path)


def test_a_missing_shard_is_named(tmp_path, open_parquet):
    for n in (0, 1, 3):
        write(tmp_path / f"x-{n:05}-of-00004.parquet")
    with pytest.raises(UserError, match=r"of 4 files x-00002-of-00004\.parquet is missing"):
        open_parquet(tmp_path)
    assert len(open_parquet(tmp_path / "x-0000[01]-of-*")) == 20


def test_a_truncated_file_is_named_at_opening(tmp_path, open_parquet):
    write(tmp_path / "a.parquet")
    whole = write(tmp_path / "b.parquet").read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"text, not Parquet"):
        (tmp_path / "b.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"b\.parquet can't be read as Parquet, or is damaged"):
            open_parquet(tmp_path)


def test_a_damaged_row_group_is_named_when_it_is_read(tmp_path, open_parquet):
    file = write(tmp_path / "a.parquet")
    start = pq.read_metadata(file).row_group(1).column(0).dictionary_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + 20] = b"\xff" * 20
    file.write_bytes(content)
    source = open_parquet(tmp_path)
    assert source[3] == "a 3"
    for _ in range(2):  # the failed read is not kept
        with pytest.raises(UserError, match=r"a\.parquet, row group 1 can't be read, the file is damaged"):
            source[4]


def test_a_flipped_bit_is_noticed_where_the_file_has_checksums(tmp_path, open_parquet):
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"text": ["x" * 100] * 10}), tmp_path / "a.parquet", write_page_checksum=True, **plain)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[content.index(b"x" * 100) + 7] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    source = open_parquet(tmp_path)
    with pytest.raises(UserError, match=r"row group 0 can't be read, the file is damaged: .*CRC"):
        source[0]


def test_a_missing_package_is_an_error_that_says_how_to_install_it(config, monkeypatch):
    from src.data.open import open_source
    from src.data.types import InputSpec

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "src.extras.readers.parquet")
    settings = config(dataset_type="parquet", dataset_path="x")
    with pytest.raises(UserError, match=r"pyarrow.*bash setup\.sh data"):
        open_source(*train_specs(settings.data), InputSpec.of(settings, None))
