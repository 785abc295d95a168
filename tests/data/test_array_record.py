import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("array_record", reason="bash setup.sh data installs it")

from array_record.python.array_record_module import ArrayRecordReader
from tensorflow_datasets.proto import tf_example_pb2

from src.config.dataset_spec import SETTINGS, DatasetSpec
from src.extras.readers import array_record
from src.extras.readers.array_record import ArrayRecordSource
from src.system.errors import UserError
from tests.data.every_source import write_records as write
from tests.data.one_source import open_sources

REPOSITORY = Path(__file__).resolve().parents[2]


def example(**fields):
    """A serialized tf.train.Example: str and bytes become a bytes_list, lists of ints and floats theirs."""
    message = tf_example_pb2.Example()
    for name, value in fields.items():
        feature = message.features.feature[name]
        if isinstance(value, list):
            (feature.float_list if isinstance(value[0], float) else feature.int64_list).value.extend(value)
        else:
            feature.bytes_list.value.append(value.encode() if isinstance(value, str) else value)
    return message.SerializeToString()


def source(path, record_format="text", column="text", is_eval=False):
    settings = {
        **dict.fromkeys(SETTINGS, ""),
        "dataset_type": "array_record",
        "dataset_path": str(path),
        "dataset_column": column,
        "array_record_format": record_format,
    }
    return ArrayRecordSource(DatasetSpec("", 65_536, is_eval, **settings))


def items(source):
    return [source[i] for i in range(len(source))]


def test_shards_are_read_in_order_of_their_names_as_grain_reads_them(tmp_path):
    counts = {"b.array_record": 3, "a.arrayrecord": 100, "c/empty.array_record": 0, "c/x.array_record": 1}
    for name, count in counts.items():
        write(tmp_path / name, [f"{name} {n} é".encode() for n in range(count)])
    (tmp_path / "notes.txt").write_text("not one of them")
    ours = items(source(tmp_path))
    grain = pytest.importorskip("grain")
    theirs = grain.sources.ArrayRecordDataSource([str(tmp_path / name) for name in sorted(counts)])
    assert ours == [theirs[i].decode() for i in range(len(theirs))]
    assert len(ours) == 104


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7", "group_size:100,transpose:true", "uncompressed"])
def test_every_layout_gives_the_same_records(tmp_path, options):
    texts = [f"record {n}" * (n % 5) for n in range(250)]
    assert items(source(write(tmp_path / "x.array_record", map(str.encode, texts), options))) == texts


def test_a_file_a_folder_and_a_glob(tmp_path):
    for n in range(4):
        write(tmp_path / f"x-{n:05}-of-00004", [b"%d" % n])
    assert items(source(tmp_path / "x-00002-of-00004")) == ["2"]
    assert items(source(tmp_path / "x-*")) == ["0", "1", "2", "3"]
    assert items(source(tmp_path / "x-0000[13]-of-*")) == ["1", "3"]
    assert items(source(f"file://{tmp_path}/x-*3-of-*")) == ["3"]


def count_by_the_package(file):
    reader = ArrayRecordReader(str(file))
    assert reader.ok()
    return reader.num_records()


@pytest.mark.parametrize("group", [1, 2, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 1999, 40_000])
def test_records_are_counted_as_the_package_counts_them(tmp_path, count, group):
    file = write(tmp_path / "x", (b"%d" % n for n in range(count)), f"group_size:{group}")
    assert array_record.count_records(str(file), file.stat().st_size) == count_by_the_package(file) == count


def test_records_are_counted_wherever_the_footer_falls(tmp_path, monkeypatch):
    """Its header may be at the end of a block, at the start of the next, or in both; no file's index is read for it."""
    expected = {}
    for length in range(65_536 - 300, 65_536 + 40, 3):
        file = write(tmp_path / str(length), [random.Random(length).randbytes(length), b"second"])
        expected[str(file)] = count_by_the_package(file)
    monkeypatch.setattr(array_record, "open_reader", None)
    assert {file: array_record.count_records(file, os.path.getsize(file)) for file in expected} == expected
    assert set(expected.values()) == {2}


def test_json_records(tmp_path):
    records = [{"text": "é\n", "n": 1}, {"text": ""}, {"text": [0, 5, 2**31 - 1]}, {"text": []}]
    file = write(tmp_path / "x", [*(json.dumps(record).encode() for record in records), rb'{"text": "a\ud800b"}'])
    one, empty, ids, none, replaced = items(source(file, "json"))
    assert (one, empty, replaced) == ("é\n", "", "a?b")
    assert (ids.dtype, ids.tolist()) == (np.int32, [0, 5, 2**31 - 1])
    assert (none.dtype, none.tolist()) == (np.int32, [])


def test_example_records(tmp_path):
    empty_list = tf_example_pb2.Example()
    empty_list.features.feature["text"].int64_list.SetInParent()
    records = [example(text="é", url="u"), example(text=[7, 0, 2**31 - 1], score=[0.5]), empty_list.SerializeToString()]
    text, ids, none = items(source(write(tmp_path / "x", records), "example"))
    assert text == "é"
    assert (ids.dtype, ids.tolist()) == (np.int32, [7, 0, 2**31 - 1])
    assert (none.dtype, none.tolist()) == (np.int32, [])


@pytest.mark.parametrize(
    ("record_format", "record", "message"),
    [
        ("text", b"caf\xe9 au lait", r"it is not UTF-8 \(invalid continuation byte\)"),
        ("json", b'{"text": ', "not JSON"),
        ("json", b"caf\xe9", "not JSON"),
        ("json", b'["text"]', r"expected a JSON object, found b'\[\"text\"\]'"),
        ("json", b'{"url": "u", "content": "c"}', r"no field text\. Its fields: content, url \(dataset_column=text\)"),
        ("json", b'{"text": 3.5}', "its field text: it is of type float: expected a text, or a list of ids"),
        ("json", b'{"text": [1, 2.5]}', "its field text: it has values of type float"),
        ("json", b'{"text": [[1], [2]]}', "its field text: it has 2 dims, and one is expected"),
        ("json", b'{"text": [1, -2]}', "the id -2 is not in the range"),
        ("json", b'{"text": [1, 99999999999999999999999]}', "it has values of type object"),
        ("example", b"hello", "it is no tf.train.Example, but b'hello'"),
        ("example", example(url="u", content="c"), r"no field text\. Its fields: content, url"),
        ("example", example(text=[0.5, 1.5]), "its field text: it has values of type float"),
        ("example", example(text=[3, -1]), "the id -1 is not in the range"),
        ("example", example(text=[3, 2**31]), "the id 2147483648 is not in the range"),
        (
            "example",
            example(text=b"\x89PNG\r\n\x1a\n"),
            r"its field text: it is not UTF-8 \(invalid start byte\), but b'.x89PNG",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # an Example's bytes differ from process to process
)
def test_what_is_no_document_is_an_error_that_names_the_record(tmp_path, record_format, record, message):
    good = {"text": b"fine", "json": b'{"text": "fine"}', "example": example(text="fine")}[record_format]
    bad = write(tmp_path / "x" / "b.array_record", [good, record])
    with pytest.raises(UserError, match=f"^{bad}, record 1: .*{message}"):
        source(bad, record_format)[1]
    write(tmp_path / "x" / "a.array_record", [record])
    with pytest.raises(UserError, match=message):  # the first one of all is read at the start
        source(tmp_path / "x", record_format)


def test_several_texts_in_one_field_are_an_error(tmp_path):
    message = tf_example_pb2.Example()
    message.features.feature["text"].bytes_list.value.extend([b"one", b"two"])
    with pytest.raises(UserError, match="has 2 texts: expected one"):
        source(write(tmp_path / "x", [message.SerializeToString()]), "example")


def test_nothing_there_is_an_error(tmp_path):
    for path in ("nowhere", "*.array_record"):
        with pytest.raises(UserError, match=r"^eval_dataset_path=.*no such file or folder"):
            source(tmp_path / path, is_eval=True)
    with pytest.raises(UserError, match="has no ArrayRecord file"):
        source(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="has no ArrayRecord file"):
        source(tmp_path)
    write(tmp_path / "a.array_record", [])
    write(tmp_path / "b.array_record", [])
    with pytest.raises(UserError, match="the 2 ArrayRecord files have no records"):
        source(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    for n in {0, 1, 2, 4}:
        write(tmp_path / f"x.array_record-{n:05}-of-00005", [b"text"])
    for path in (tmp_path, tmp_path / "x.array_record-*"):
        with pytest.raises(UserError, match=r"x\.array_record-00003-of-00005 is missing"):
            source(path)


@pytest.mark.parametrize("part", [0, 0.1, 0.5, 0.99, 1])
def test_a_truncated_file_is_named_at_the_start(tmp_path, part):
    rng = random.Random(0)
    write(tmp_path / "a.array_record", [b"text"])
    file = write(tmp_path / "b.array_record", [rng.randbytes(1000) for _ in range(300)])
    data = file.read_bytes()
    file.write_bytes(data[: min(int(part * len(data)), len(data) - 1)])
    with pytest.raises(UserError, match=r"b\.array_record is not a complete ArrayRecord file"):
        source(tmp_path)


def test_a_file_of_another_kind_is_named(tmp_path):
    file = tmp_path / "a.array_record"
    file.write_text("text\n" * 50_000)
    with pytest.raises(UserError, match=r"a\.array_record is not a complete ArrayRecord file"):
        source(file)


def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path):
    texts = [f"{n}: " + "ab" * 50 for n in range(1000)]
    file = write(tmp_path / "x", map(str.encode, texts), "group_size:1,uncompressed")
    data = bytearray(file.read_bytes())
    data[data.index(b"617: ") + 20] ^= 1
    file.write_bytes(data)
    damaged = source(file)
    with pytest.raises(UserError, match=f"^{file}, record 617 can't be read, the file is damaged: .*mismatch"):
        damaged[617]
    assert [damaged[i] for i in range(1000) if i != 617] == texts[:617] + texts[618:]


def test_a_damaged_index_is_an_error_that_names_the_file(tmp_path):
    file = write(tmp_path / "x", [b"%d" % n for n in range(5000)])
    data = bytearray(file.read_bytes())
    data[len(data[:-65_536].rstrip(b"\0")) - 200] ^= 1  # in the footer, which only the header of padding follows
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"^{file} is not a complete ArrayRecord file"):
        source(file)[4000]


def test_a_remote_path_is_an_error_that_says_what_to_do():
    with pytest.raises(UserError, match=r"dataset_path=s3://bucket/c4.*Mount the bucket"):
        source("s3://bucket/c4")


def test_a_tfds_folder_is_an_error_that_names_its_type(tmp_path):
    write(tmp_path / "c4-train.array_record-00000-of-00001", [b"text"])
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match="dataset_type=tfds"):
        source(tmp_path)
    assert items(source(tmp_path / "*-train.array_record*")) == ["text"]


@pytest.mark.parametrize("package", ["array_record.python.array_record_module", "tensorflow_datasets.proto"])
def test_a_package_that_is_not_installed_is_an_error_that_says_what_installs_it(tmp_path, config, monkeypatch, package):
    file = write(tmp_path / "x", [example(text="a")])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"is not installed.*bash setup\.sh data"):
        open_sources(config(dataset_type="array_record", dataset_path=str(file)), None)


def test_fingerprint_is_of_names_sizes_and_settings_and_not_of_the_place(tmp_path):
    def fingerprint(folder, names=("a", "b"), count=2, **settings):
        for name in names:
            write(tmp_path / folder / f"{name}.array_record", [b'{"text": "t", "other": "o"}'] * count)
        return source(tmp_path / folder, "json", **settings).fingerprint()

    first = fingerprint("first")
    assert (first["type"], first["files"], first["records"]) == ("array_record", 2, 4)
    assert first == fingerprint("second")
    assert first == source(tmp_path / "first" / "*", "json").fingerprint()
    others = [fingerprint("names", names=("a", "c")), fingerprint("count", count=3), fingerprint("c", column="other")]
    assert first not in others
    json.dumps(first)


def test_a_source_has_neither_a_list_of_keys_nor_groups(tmp_path):
    opened = source(write(tmp_path / "x", [b"text"]))
    assert opened.document_keys() is None
    assert opened.group_sizes() is None


def test_threads_read_what_one_thread_reads(tmp_path):
    texts = [f"{n}: " + "text " * (n % 300) for n in range(3000)]
    for shard in range(10):
        write(tmp_path / f"x{shard}.array_record", map(str.encode, texts[300 * shard : 300 * shard + 300]))
    opened = source(tmp_path)
    wanted = random.Random(0).choices(range(len(texts)), k=20_000)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(opened.__getitem__, wanted, chunksize=50)) == [texts[i] for i in wanted]


READ_MANY = """
import resource, sys, threading
from src.extras.readers.array_record import ArrayRecordSource
from src.config.dataset_spec import DatasetSpec
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
settings = {"dataset_path": sys.argv[1], "dataset_column": "", "array_record_format": "text"}
source = ArrayRecordSource(DatasetSpec("", 1, **settings))
assert [source[i] for i in range(len(source))] == [str(i) for i in range(len(source))]
stop = threading.Event()
def read():
    while not stop.is_set():
        source[len(source) // 2]
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads: thread.start()
threading.Timer(0.2, stop.set).start()
print(len(source), "records")
"""


@pytest.mark.parametrize(("soft", "hard"), [(100, 100), (100, 1000)])
def test_more_files_than_a_process_may_open_and_an_exit_with_files_open(tmp_path, soft, hard):
    for n in range(150):
        write(tmp_path / f"{n:03}.array_record", [str(n).encode()])
    done = subprocess.run(
        [sys.executable, "-c", READ_MANY, str(tmp_path), str(soft), str(hard)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "150 records\n", "")
