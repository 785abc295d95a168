"""Data on paths that fsspec opens: the memory of this process, and a server with the semantics of Cloud Storage."""

import errno
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from src.config.dataset_spec import train_specs
from src.data.open import open_source
from src.data.readers import files, find_files
from src.data.readers.text import TextSource
from src.data.types import InputSpec
from src.extras.conversations import ConversationSource
from src.extras.readers import array_record
from src.system import storage_errors
from src.system.errors import TransientError, UserError
from tests import runs
from tests.data import every_source
from tests.data.batches import TOKENIZER, assert_same, joined
from tests.gcs_server import GcsServer

KIB = 1024


class Bucket(GcsServer):
    """The bucket `data`, which counts what is read: `reads` has a pair of name and range for each request."""

    def __init__(self):
        super().__init__("data")
        self.reads = []
        send = self.RequestHandlerClass.send_contents

        def counted(handler, contents, generation):
            self.reads.append((handler.parse()[0], handler.headers.get("Range")))
            send(handler, contents, generation)

        self.RequestHandlerClass = type("Handler", (self.RequestHandlerClass,), {"send_contents": counted})

    def fill(self, contents):
        """Replaces all objects."""
        self.objects = {name: (content, n) for n, (name, content) in enumerate(contents.items(), start=1)}
        self.reads.clear()


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("gcsfs")
    server = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", server.url)  # Of the client in the package array_record.
        patch.setenv("GCE_METADATA_ROOT", server.url.removeprefix("http://"))  # No search for credentials outside.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        clients = fsspec.get_filesystem_class("gs")
        clients.clear_instance_cache()  # Those of another test's server.
        yield server
        clients.clear_instance_cache()
    server.close()


@pytest.fixture(params=["memory", "gs", "file", "local"])
def put(request, tmp_path):
    """Puts files somewhere and returns the path of their folder, for each kind of path."""

    def write(contents):
        contents = {name: data if isinstance(data, bytes) else data.encode() for name, data in contents.items()}
        if request.param == "memory":
            fsspec.filesystem("memory").rm("/", recursive=True)
            fsspec.filesystem("memory").pipe({f"/top/{name}": data for name, data in contents.items()})
            return "memory://top"
        if request.param == "gs":
            request.getfixturevalue("bucket").fill({f"a dir/{name}": data for name, data in contents.items()})
            return "gs://data/a dir"
        for name, data in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return f"file://{tmp_path}" if request.param == "file" else str(tmp_path)

    return write


def items(source):
    return [source[i] for i in range(len(source))]


def text_source(path, **keys):
    return TextSource(path, 64 * KIB, **keys)


FILES = {"b.txt": "B", "a/z.md": "Z é", "a/y/x": "X", ".hidden": "no", ".git/config": "no", "empty": "", "c.py": "C"}


def test_a_folder_a_glob_and_a_file_are_the_same_on_every_kind_of_path(put):
    path = put(FILES)
    for place in (path, f"{path}/", f"{path}/**"):
        listing = find_files.list_files(place, "dataset_path")
        assert list(listing.sizes.items()) == [("a/y/x", 1), ("a/z.md", 4), ("b.txt", 1), ("c.py", 1), ("empty", 0)]
        for file, size in zip(listing.paths, listing.sizes.values(), strict=True):
            assert len(files.read(file, 0, size + bool(size))) == size
    assert items(text_source(path)) == ["X", "Z é", "B", "C"]
    assert items(text_source(f"{path}/*.txt")) == ["B"]
    assert items(text_source(f"{path}/a/**/x")) == ["X"]
    assert items(text_source(f"{path}/?.py")) == ["C"]
    assert items(text_source(f"{path}/a/z.md")) == ["Z é"]
    assert [files.read(f"{path}/a/z.md", *span) for span in ((0, 1), (2, 4), (2, 2), (2, 100))] == [
        b"Z", "é".encode(), b"", "é".encode(),
    ]  # fmt: skip


def test_fingerprint_and_order_do_not_depend_on_where_the_data_lie(put, tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    contents = {"d/a.jsonl": "\n".join(json.dumps({"text": f"{n}"}) for n in range(50)), "b.txt": "B"}
    for name, content in contents.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(content)
    local, other = text_source(str(here)), text_source(put(contents))
    assert other.fingerprint() == local.fingerprint()
    assert (other.document_keys() == local.document_keys()).all()
    assert items(other) == items(local)


def test_a_long_document_is_read_in_pieces(put):
    text = "".join(f"line {n} é\n" for n in range(20_000))
    source = text_source(put({"d.txt": text, "e.jsonl": json.dumps({"text": text})}))
    pieces = items(source)
    assert len(pieces) > 8
    assert "".join(pieces) == text * 2


def test_conversations(put, config):
    lines = [json.dumps({"prompt": f"p{n}", "completion": f"c{n}"}) for n in range(20)]
    path = put({"a.jsonl": "\n".join(lines[:10]), "b/c.jsonl": "\n".join(["", *lines[10:], ""]), "empty.jsonl": ""})
    inputs = InputSpec.of(config(), None)
    source = ConversationSource(path, "dataset_path", inputs)
    assert [conversation.messages[1]["content"] for conversation in items(source)] == [f"c{n}" for n in range(20)]
    path = put({"b/c.jsonl": "\n".join([*lines, '{"prompt": "p"}'])})
    with pytest.raises(UserError, match=r'c\.jsonl, line 21: there is no "completion"'):
        ConversationSource(path, "dataset_path", inputs)


@pytest.mark.parametrize(
    ("contents", "place", "message"),
    [
        ({}, "/nowhere", "dataset_path=PATH: there is no such file or folder"),
        ({}, "/*.txt", "dataset_path=PATH: there is no such file or folder, and no file that matches"),
        ({"x.parquet": "PAR1"}, "/x.parquet", r"dataset_path=PATH: .*x\.parquet is data of type parquet"),
        ({"x/dataset_info.json": "{}", "x/features.json": "{}"}, "", "top/x|a dir/x|/x is a TFDS dataset"),
        ({"x-0-of-2.txt": "x", "x-001-of-003.txt": "x"}, "", r"x-000-of-003\.txt, x-002-of-003\.txt are missing"),
        ({"a.txt": "caf\udce9"}, "", r"a\.txt is not a text file.*not UTF-8"),
        ({"a.jsonl": '{"text": "ok"}\n{"text": \n'}, "/a.jsonl", r"a\.jsonl, line 2: not JSON"),
    ],
)
def test_errors_name_the_file(put, contents, place, message):
    contents = {name: content.encode(errors="surrogateescape") for name, content in contents.items()}
    path = put({"other/ok.md": b"x", **contents}) + place
    with pytest.raises(UserError, match=message.replace("PATH", path.replace("*", r"\*").removeprefix("^"))):
        items(text_source(path))


@pytest.fixture
def parquet(config):
    """A Parquet file of 1.2 MB, of which its texts are 0.1, and what opens one in a folder."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from src.extras.readers.parquet import ParquetSource

    noise = np.random.default_rng(0)
    texts = [f"text {n} " + noise.bytes(50).hex() for n in range(1000)]
    content = io.BytesIO()
    table = pa.table({"other": [noise.bytes(1000) for _ in texts], "text": texts})
    pq.write_table(table, content, row_group_size=100)

    def opened(path):
        return ParquetSource(*train_specs(config(dataset_type="parquet", dataset_path=path).data))

    return SimpleNamespace(content=content.getvalue(), texts=texts, open=opened)


def test_parquet_is_read_by_several_threads(put, parquet):
    source = parquet.open(put({"x.parquet": parquet.content}))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(source.__getitem__, range(1000))) == parquet.texts


def test_of_remote_parquet_the_footer_and_the_column_are_read(bucket, parquet):
    bucket.fill({"d/x.parquet": parquet.content})
    source = parquet.open("gs://data/d")
    assert len(bucket.reads) == 1
    assert items(source) == parquet.texts
    spans = [tuple(map(int, span.removeprefix("bytes=").split("-"))) for _, span in bucket.reads]
    assert len(spans) == 1 + 10 * 2  # The footer, and for each row group the footer again and the column.
    assert sum(last - first + 1 for first, last in spans) < len(parquet.content)


def test_what_a_store_says_of_a_parquet_file_is_told(bucket, parquet):
    bucket.fill({"d/x.parquet": parquet.content})
    source = parquet.open("gs://data/d")
    bucket.objects.clear()
    with pytest.raises(UserError, match=r"^gs://data/d/x\.parquet can't be read: "):
        source[0]


def test_remote_text_is_not_read_at_opening_but_for_the_first_file(bucket):
    bucket.fill({f"d/{n}.txt": f"text {n}".encode() for n in range(30)})
    source = text_source("gs://data/d")
    assert [name for name, _ in bucket.reads] == ["d/0.txt"]
    assert sorted(items(source)) == sorted(f"text {n}" for n in range(30))
    assert len(bucket.reads) == 31  # a request for each document


def test_remote_lines_are_found_by_reading_each_file_once(bucket, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1000)
    content = "\n".join(json.dumps({"text": "x" * n}) for n in range(100)).encode()
    bucket.fill({"d/a.jsonl": content, "d/b.jsonl": content})
    source = text_source("gs://data/d")
    spans = [span for name, span in bucket.reads if name == "d/b.jsonl"]
    assert spans == [f"bytes={begin}-{min(begin + 1000, len(content)) - 1}" for begin in range(0, len(content), 1000)]
    assert [len(text) for text in items(source)] == [*range(100), *range(100)]


def test_an_object_that_stands_for_a_folder_is_no_file(bucket):
    bucket.fill({"d/": b"", "d/e/": b"", "d/e/a.txt": b"A"})
    assert find_files.list_files("gs://data/d", "dataset_path") == files.Listing("gs://data/d", {"e/a.txt": 1})


def test_files_that_are_new_are_found(bucket):
    for n in (1, 2):
        bucket.fill({f"d/{i}.txt": b"x" for i in range(n)})
        assert len(text_source("gs://data/d")) == n


def test_what_is_gone_when_it_is_read_is_named(bucket):
    bucket.fill({"d/0.txt": b"0", "d/1.txt": b"1"})
    source = text_source("gs://data/d")
    del bucket.objects["d/1.txt"]
    with pytest.raises(UserError, match=r"^gs://data/d/1\.txt can't be read: "):
        source[1]


def test_a_bucket_that_is_not_there_is_an_error(bucket):
    with pytest.raises(UserError, match=r"^dataset_path=gs://other/d"):
        text_source("gs://other/d")


class Unavailable(Exception):
    """As gcsfs raises it."""

    code = "503"


@pytest.fixture
def failures(monkeypatch):
    """Errors with which the first reads from memory:// fail; nothing waits."""
    errors = []
    client = fsspec.get_filesystem_class("memory")
    cat_file = client.cat_file
    monkeypatch.setattr(storage_errors.time, "sleep", lambda seconds: None)

    def failing(self, *args, **kwargs):
        if errors:
            raise errors.pop()
        return cat_file(self, *args, **kwargs)

    monkeypatch.setattr(client, "cat_file", failing)
    fsspec.filesystem("memory").pipe({"/data/a.txt": b"A", "/data/b.txt": b"B"})
    return errors


@pytest.mark.parametrize("error", [Unavailable("busy"), OSError(errno.EIO, "I/O error"), TimeoutError("late")])
def test_a_store_that_fails_for_a_time_is_asked_again(failures, error):
    failures.extend([error] * 4)
    assert items(text_source("memory://data")) == ["A", "B"]
    assert failures == []


def test_a_store_that_stays_away_is_worth_another_try_and_one_that_refuses_is_not(failures):
    source = text_source("memory://data")
    failures.extend([Unavailable("busy")] * 5)
    with pytest.raises(TransientError, match=r"^memory://data/b\.txt can't be read, after several attempts: busy"):
        source[1]
    failures.extend([PermissionError(errno.EACCES, "Permission denied"), Unavailable("busy")])
    with pytest.raises(UserError, match=r"^memory://data/b\.txt can't be read: Permission denied"):
        source[1]


def test_a_disk_that_fails_for_a_time_is_read_again(tmp_path, monkeypatch, capsys):
    """One line says so, of however many attempts in a minute."""
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")  # which Linux answers with EIO
    waited = []
    monkeypatch.setattr(storage_errors.time, "sleep", waited.append)
    monkeypatch.setattr(storage_errors, "_quiet_until", [0.0])
    with pytest.raises(TransientError, match=r"a\.txt can't be read, after several attempts: Input/output error"):
        files.read(str(tmp_path / "a.txt"), 0, 10)
    assert waited == [1.0, 2.0, 4.0, 8.0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("a disk or store failed; trying again (OSError: ")
    assert "Input/output error" in line


@pytest.mark.parametrize(("path", "package"), [("s3://bucket/d", "s3fs"), ("gs://bucket/d", "gcsfs")])
def test_a_missing_package_is_named(monkeypatch, path, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, path.partition(":")[0], raising=False)
    with pytest.raises(UserError, match=f"^eval_dataset_path={path}: .*{package}.*pip install"):
        text_source(path, key="eval_dataset_path")


def test_a_protocol_that_nothing_reads_is_an_error():
    with pytest.raises(UserError, match=r"^dataset_path=gd://x can't be read: Protocol not known: gd"):
        text_source("gd://x")


def test_a_run_on_a_bucket_is_the_run_on_a_folder(bucket, tmp_path):
    corpus = runs.write_corpus(tmp_path / "corpus")
    bucket.fill({f"corpus/{name}": (corpus / name).read_bytes() for name in sorted(os.listdir(corpus))})
    for name, path in (("here", corpus), ("there", "gs://data/corpus")):
        runs.run_here(base_output_directory=tmp_path, run_name=name, dataset_path=path, steps=3, data_threads=2)
    assert runs.losses(tmp_path / "there") == runs.losses(tmp_path / "here")


def write_records_of(kind, folder):
    """Makes a folder of ArrayRecord files, or a TFDS dataset of them or of TFRecord files; the settings to read it."""
    write = {"tfrecord": every_source.write_tfds_as_tfrecord, "tfds": every_source.write_tfds}.get(kind)
    if write is None:
        return every_source.write(folder, kind, None)
    write(folder, every_source.texts("tfds"), shards=3)
    return {"dataset_type": "tfds", "dataset_name": "documents", "dataset_path": str(folder)}


@pytest.mark.parametrize("copied_bytes", [0, 1 << 28], ids=["by requests", "copied"])
@pytest.mark.parametrize("kind", ["array_record", "tfds", "tfrecord"])
def test_records_on_a_bucket_are_those_of_a_folder(bucket, tmp_path, config, kind, copied_bytes, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")
    monkeypatch.setattr(array_record, "COPIED_BYTES", copied_bytes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    local = config(**(settings := write_records_of(kind, folder)))
    bucket.fill({str(path.relative_to(tmp_path)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    remote = config(**{**settings, "dataset_path": "gs://data/data"}, data_threads=3)
    here, there = (open_source(train_specs(made.data)[0], InputSpec.of(made, TOKENIZER)) for made in (local, remote))
    assert there.fingerprint() == here.fingerprint()
    assert (there.is_remote, here.is_remote) == (not copied_bytes, False)
    bucket.reads.clear()
    assert there[5] == here[5]
    assert len(bucket.reads) <= (0 if copied_bytes else 2)  # the file's index, and the record
    assert_same(joined(remote, there, 2, 6), joined(local, here, 1, 6))


@pytest.mark.parametrize("kind", ["array_record", "tfds"])
def test_records_that_a_store_does_not_give_are_named(bucket, tmp_path, config, kind, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")
    monkeypatch.setattr(array_record, "COPIED_BYTES", 0)
    folder = tmp_path / "data"
    settings = write_records_of(kind, folder)

    def opened(path="gs://data/data"):
        made = config(**{**settings, "dataset_path": path})
        return open_source(train_specs(made.data)[0], InputSpec.of(made, TOKENIZER))

    contents = {str(path.relative_to(tmp_path)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    bucket.fill(contents)
    with pytest.raises(UserError, match=r"gs://data/other.*no such file|not prepared in dataset_path=gs://data/other"):
        opened("gs://data/other")
    shards = sorted(name for name in contents if "array_record" in name)
    bucket.fill({**contents, shards[1]: contents[shards[1]][:-3000]})
    with pytest.raises(UserError, match=rf"{shards[1]} is not a complete ArrayRecord file"):
        opened()
    bucket.fill(contents)
    source = opened()
    for shard in shards:
        del bucket.objects[shard]
    with pytest.raises(UserError, match=r"record \d+ can't be read|can't be read"):
        [source[i] for i in range(len(source))]
