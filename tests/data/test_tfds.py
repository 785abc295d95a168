import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")

import tensorflow_datasets as tfds

from src.config.dataset_spec import SETTINGS, DatasetSpec
from src.extras.readers.tfds import TfdsSource
from src.system.errors import UserError
from tests.data.one_source import open_sources

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = {"train": 60, "validation": 7}


def png():
    """An image of one black pixel."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(4))),
        (b"IEND", b""),
    ]
    data = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(data)


class Stories(tfds.core.GeneratorBasedBuilder):
    """A dataset of two configurations, prepared without TensorFlow."""

    VERSION = tfds.core.Version("1.10.0")
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="en"), tfds.core.BuilderConfig(name="de")]

    def _info(self):
        features = {
            "text": tfds.features.Text(),
            "ids": tfds.features.Sequence(np.int64),
            "bytes": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
            "nested": {"title": tfds.features.Text()},
            "label": tfds.features.ClassLabel(names=["a", "b"]),
            "score": tfds.features.Tensor(shape=(None,), dtype=np.float32),
            "table": tfds.features.Tensor(shape=(2, None), dtype=np.int32),
            "packed": tfds.features.Tensor(shape=(None,), dtype=np.int32, encoding="zlib"),
            "image": tfds.features.Image(shape=(1, 1, 3)),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in SIZES}

    def _generate_examples(self, split):
        image = Path(self.data_dir).parent / "pixel.png"
        image.write_bytes(png())
        for n in range(SIZES[split]):
            yield (
                f"{split}{n}",
                {
                    "text": f"{self.builder_config.name} {split} {self.version} {n} é",
                    "ids": [n] * (n % 9),
                    "bytes": np.arange(n, dtype=np.uint8),
                    "nested": {"title": f"title {n}"},
                    "label": n % 2,
                    "score": [0.5],
                    "table": np.ones((2, n), np.int32),
                    "packed": np.arange(n, dtype=np.int32),
                    "image": str(image),
                },
            )


def prepare(folder, config="en"):
    builder = Stories(data_dir=folder, config=config, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    return builder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data folder with stories/en/1.10.0, and TFDS's builder of it."""
    folder = tmp_path_factory.mktemp("tfds")
    return folder, prepare(folder)


@pytest.fixture
def data_folder(prepared, tmp_path):
    """A copy of the data folder for the test alone, and the folder of the dataset in it."""
    shutil.copytree(prepared[0], tmp_path / "data")
    return tmp_path / "data", tmp_path / "data/stories/en/1.10.0"


def source(folder, name="stories/en:1.10.0", split="train", column="text", is_eval=False):
    settings = {
        **dict.fromkeys(SETTINGS, ""),
        "dataset_type": "tfds",
        "dataset_path": str(folder),
        "dataset_name": name,
        "split": split,
        "dataset_column": column,
    }
    return TfdsSource(DatasetSpec("", 65_536, is_eval, **settings))


def items(source):
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize(
    "split", ["train", "validation", "train[:10%]", "train[-7:]", "train[5:33]+validation[2:4]", "train[50%:]", "all"]
)
def test_a_split_is_what_tfds_reads(prepared, split):
    folder, builder = prepared
    theirs = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    assert items(source(folder, split=split)) == [example["text"].decode() for example in theirs]
    ids = items(source(folder, split=split, column="ids"))
    assert len(ids) == len(theirs)
    for ours, example in zip(ids, theirs, strict=True):
        np.testing.assert_array_equal(ours, example["ids"])
        assert ours.dtype == np.int32


@pytest.mark.parametrize(
    ("column", "read"),
    [
        ("nested/title", lambda example: example["nested"]["title"].decode()),
        ("bytes", lambda example: example["bytes"]),
    ],
)
def test_features_of_other_kinds(prepared, column, read):
    folder, builder = prepared
    theirs = builder.as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
    for ours, example in zip(items(source(folder, column=column)), theirs, strict=True):
        np.testing.assert_array_equal(ours, read(example))


def test_every_example_is_there_once(prepared):
    texts = items(source(prepared[0], split="train")) + items(source(prepared[0], split="validation"))
    assert sorted(texts) == sorted(f"en {split} 1.10.0 {n} é" for split, size in SIZES.items() for n in range(size))


def test_the_newest_version_is_taken_where_none_is_named(data_folder, monkeypatch):
    monkeypatch.setattr(Stories, "VERSION", tfds.core.Version("1.9.0"))
    prepare(data_folder[0])
    assert " 1.10.0 " in source(data_folder[0], "stories/en")[0]
    assert " 1.9.0 " in source(data_folder[0], "stories/en:1.9.0")[0]


def test_the_data_folder_is_tfds_own_where_none_is_named(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared[0]))
    assert items(source("")) == items(source(prepared[0]))


READ_ALONE = """
import sys
from src.config.dataset_spec import DatasetSpec
from src.extras.readers.tfds import TfdsSource
settings = dict(dataset_path=sys.argv[1], dataset_name="stories/en", split="train", dataset_column="text")
source = TfdsSource(DatasetSpec("", 1, **settings))
print(len(source), sorted(source[i] for i in range(len(source)))[0])
print([name for name in ("tensorflow", "torch", "jax") if name in sys.modules])
"""


def test_neither_tensorflow_nor_the_builder_s_code_is_needed(prepared):
    done = subprocess.run(
        [sys.executable, "-c", READ_ALONE, str(prepared[0])],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "60 en train 1.10.0 0 é\n[]\n", "")


def test_threads_read_what_one_thread_reads(prepared):
    opened = source(prepared[0])
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(opened.__getitem__, [i % 60 for i in range(6000)])) == items(opened) * 100


@pytest.mark.parametrize(
    ("name", "there"), [("c4/en:3.0.1", r"There: stories/en:1\.10\.0"), ("stories", r"There: stories/en:1\.10\.0")]
)
def test_a_name_that_is_not_prepared_is_an_error_that_says_what_prepares_it(prepared, name, there):
    command = f"tfds build {name.partition(':')[0]} --file_format=array_record --data_dir={prepared[0]}$"
    with pytest.raises(
        UserError, match=rf"^eval_dataset_name={name} is not prepared in eval_dataset_path=.*{there}.*{command}"
    ):
        source(prepared[0], name, is_eval=True)


def test_an_empty_data_folder_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"No dataset is\. .*tfds build c4/en --"):
        source(tmp_path, "c4/en:3.0.1")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "own"))
    with pytest.raises(UserError, match=f"not prepared in {tmp_path}/own, TFDS's own data folder"):
        source("", "c4/en:3.0.1")


def test_a_dataset_of_another_format_is_an_error_that_says_what_converts_it(data_folder):
    info = json.loads((data_folder[1] / "dataset_info.json").read_text())
    (data_folder[1] / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": "riegeli"}))
    command = f"tfds convert_format --dataset_version_dir={data_folder[1]} --out_file_format=array_record"
    with pytest.raises(UserError, match=f"is stored as riegeli .*{command}"):
        source(data_folder[0])
    # As that command leaves it.
    both = {**info, "fileFormat": "tfrecord", "alternativeFileFormats": ["array_record"]}
    (data_folder[1] / "dataset_info.json").write_text(json.dumps(both))
    assert len(items(source(data_folder[0]))) == 60


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"eval_split=test: Unknown split 'test'.* train \(60 examples\), validation \(7 examples\)"),
        ("train[", r"eval_split=train\[: .*The splits of stories/en/1\.10\.0: train"),
        ("train[50:80]", r"slice \[50:80\] incompatible with 60 examples"),
        ("train[:0]", r"eval_split=train\[:0\] has no example"),
        ("", "eval_split=: "),
    ],
)
def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(prepared, split, message):
    with pytest.raises(UserError, match=f"^{message}" if message.startswith("eval") else message):
        source(prepared[0], split=split, is_eval=True)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("content", r"has no such feature\. Its features: text, ([\w/]+, ){3}[\w/]+ and 4 more$"),
        ("nested", "has no such feature"),
        ("label", "neither a text nor a plain list of ids, but ClassLabel"),
        ("score", r"neither a text nor a plain list of ids, but Tensor\(shape=\(None,\), dtype=float32\)"),
        ("table", "neither a text nor a plain list of ids"),
        ("packed", "neither a text nor a plain list of ids"),
        ("image", r"neither a text nor a plain list of ids, but Image\(shape=\(1, 1, 3\), dtype=uint8\)"),
    ],
)
def test_a_column_that_is_no_document_is_an_error(prepared, column, message):
    with pytest.raises(UserError, match=f"^dataset_column={column}.*{message}"):
        source(prepared[0], column=column)


def test_a_missing_shard_is_named(data_folder):
    (data_folder[1] / "stories-train.array_record-00002-of-00004").unlink()
    with pytest.raises(UserError, match=r"1 of 4 files are missing in .*: stories-train\.array_record-00002-of-00004"):
        source(data_folder[0])
    assert len(source(data_folder[0], split="validation")) == 7


def test_a_truncated_shard_is_named(data_folder):
    shard = data_folder[1] / "stories-train.array_record-00002-of-00004"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(UserError, match=f"{shard} is not a complete ArrayRecord file"):
        source(data_folder[0])


def test_a_shard_of_another_dataset_is_named(data_folder):
    shards = [data_folder[1] / f"stories-{split}.array_record-00000-of-00004" for split in SIZES]
    shutil.copy(shards[1], shards[0])
    with pytest.raises(UserError, match=f"{shards[0]} has . records, but dataset_info.json next to it says 1."):
        source(data_folder[0])


@pytest.mark.parametrize("file", ["features.json", "dataset_info.json"])
def test_damaged_metadata_are_an_error_that_names_the_folder(data_folder, file):
    (data_folder[1] / file).write_text("{")
    with pytest.raises(UserError, match=f"TFDS can't read {data_folder[1]}"):
        source(data_folder[0])


def test_a_remote_path_is_an_error_that_says_what_to_do():
    with pytest.raises(UserError, match=r"dataset_path=s3://bucket/tfds.*Mount the bucket"):
        source("s3://bucket/tfds")


def test_a_package_that_is_not_installed_is_an_error_that_says_what_installs_it(prepared, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    keys = {"dataset_type": "tfds", "dataset_path": str(prepared[0]), "dataset_name": "stories/en"}
    with pytest.raises(UserError, match=r"dataset_type=tfds.* is not installed.*bash setup\.sh data"):
        open_sources(config(**keys), None)


def test_fingerprint_is_of_dataset_split_and_files_and_not_of_the_place(prepared, data_folder):
    first = source(prepared[0]).fingerprint()
    assert first == source(data_folder[0]).fingerprint()
    assert (first["type"], first["dataset"], first["split"]) == ("tfds", "stories/en/1.10.0", "train")
    assert (first["records"], first["files"]) == (60, 4)
    prepare(data_folder[0], config="de")
    others = [
        source(data_folder[0], "stories/de"),
        source(prepared[0], split="train[:30]"),
        source(prepared[0], column="ids"),
    ]
    assert first not in [other.fingerprint() for other in others]
    json.dumps(first)
