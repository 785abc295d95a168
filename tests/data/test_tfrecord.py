"""TFDS datasets of TFRecord files, without TensorFlow: index, checks, and what damaged files are answered with."""

import json

import pytest

pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")

from src.config.dataset_spec import DatasetSpec
from src.extras.readers import tfrecord
from src.extras.readers.tfds import TfdsSource
from src.system.errors import UserError
from tests.data.every_source import texts, write_tfds_as_tfrecord

TEXTS = texts("tfds")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_tfds_as_tfrecord(tmp_path / "data", TEXTS, shards=4)


def source(dataset):
    return TfdsSource(DatasetSpec("", 100, False, "tfds", str(dataset.parents[1]), "documents", "train", "text"))


def items(opened):
    return [opened[i] for i in range(len(opened))]


def test_the_checksum_is_that_of_the_published_vector():
    # RFC 3720, B.4: the CRC-32C of 32 zeros is 8a9136aa; masked as in TensorFlow's core/lib/hash/crc32c.h.
    crc = 0x8A9136AA
    assert tfrecord._crc(bytes(32)) == ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def test_all_examples_are_read_and_the_index_is_kept(dataset, tmp_path, capsys, monkeypatch):
    assert sorted(items(source(dataset))) == sorted(TEXTS)
    assert "indexing 4 TFRecord files once" in capsys.readouterr().out
    assert len(list((tmp_path / "cache/mintext/tfrecord").iterdir())) == 4
    monkeypatch.setattr(tfrecord, "_CHUNK_BYTES", 0)  # nothing can be indexed
    assert sorted(items(source(dataset))) == sorted(TEXTS)
    assert not capsys.readouterr().out


def test_records_are_found_wherever_a_chunk_ends(dataset, monkeypatch):
    monkeypatch.setattr(tfrecord, "_CHUNK_BYTES", 37)
    assert sorted(items(source(dataset))) == sorted(TEXTS)


def test_without_a_place_to_keep_it_an_index_is_made_each_time(dataset, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert sorted(items(source(dataset))) == sorted(TEXTS)


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_a_file_that_is_cut_is_refused(dataset, lost):
    shard = next(dataset.glob("*00001-of-00004"))
    source(dataset)
    shard.write_bytes(shard.read_bytes()[:-lost])
    with pytest.raises(UserError, match=f"{shard} is not a complete TFRecord file .*restore it"):
        source(dataset)


def test_a_file_that_lacks_its_last_record_is_refused(dataset):
    shard = next(dataset.glob("*00001-of-00004"))
    (starts,) = tfrecord.indices([str(shard)], [shard.stat().st_size])
    shard.write_bytes(shard.read_bytes()[: int(starts[-2])])
    with pytest.raises(UserError, match=f"{shard} has 9 records, but dataset_info.json next to it says 10"):
        source(dataset)


@pytest.mark.parametrize(
    ("at", "message"), [(3, "not a complete TFRecord file"), (40, "the record's CRC does not match")]
)
def test_a_damaged_record_is_refused(dataset, at, message):
    opened = source(dataset)
    (starts,) = tfrecord.indices([str(shard := next(dataset.glob("*00000-of-00004")))], [shard.stat().st_size])
    data = bytearray(shard.read_bytes())
    data[int(starts[4]) + at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="CRC does not match"):
        items(opened)  # of an index that was made before
    (dataset.parents[2] / "cache").rename(dataset.parents[2] / "old")
    with pytest.raises(UserError, match=message):
        items(source(dataset))


@pytest.mark.parametrize("left", [0, 200])
def test_an_index_that_is_cut_is_made_again(dataset, tmp_path, left):
    source(dataset)
    for index in (tmp_path / "cache/mintext/tfrecord").iterdir():
        index.write_bytes(index.read_bytes()[:left])
    assert sorted(items(source(dataset))) == sorted(TEXTS)


def test_a_file_with_the_ends_and_size_of_the_one_that_was_indexed(tmp_path, monkeypatch):
    """Nothing tells the two apart before a record is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    long = [letter * (9_000 + n) for n, letter in enumerate("abcd")]
    (shard,) = (dataset := write_tfds_as_tfrecord(tmp_path / "data", long, shards=1)).glob("*-of-00001")
    source(dataset)
    (starts,) = tfrecord.indices([str(shard)], [shard.stat().st_size])
    data, (a, b, c) = shard.read_bytes(), map(int, starts[1:4])
    shard.write_bytes(data[:a] + data[b:c] + data[a:b] + data[c:])
    with pytest.raises(UserError, match=r"since it was indexed \(then delete .*tfrecord\)"):
        items(source(dataset))
    (tmp_path / "cache").rename(tmp_path / "deleted")
    assert sorted(items(source(dataset))) == long


def test_array_records_are_read_where_both_are_there(dataset, tmp_path):
    from tests.data.every_source import write_tfds

    info = json.loads((dataset / "dataset_info.json").read_text())
    write_tfds(tmp_path / "other", TEXTS, shards=4)
    for file in (tmp_path / "other/documents/1.0.0").glob("*array_record*"):
        file.rename(dataset / file.name)
    (dataset / "dataset_info.json").write_text(json.dumps({**info, "alternativeFileFormats": ["array_record"]}))
    assert sorted(items(source(dataset))) == sorted(TEXTS)
    assert not (tmp_path / "cache").exists()
