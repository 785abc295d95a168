"""The same kind of documents as every source has them, written by the formats' own packages or by hand."""

import functools
import hashlib
import json
import struct

import numpy as np

DOCUMENTS = 40
KINDS = ("text", "jsonl", "tfds", "array_record", "parquet", "tokens", "custom", "iterable", "synthetic")


def texts(kind):
    """Different ones for each kind, of 1 to 60 words: shorter and longer than a row."""
    rng = np.random.default_rng(KINDS.index(kind))
    words = ["the", "of", "é", "and\n", "to", "in", "def", "return", "self", "(", ")", "is", "not", "über", "while"]
    return [f"{kind} {n} " + " ".join(rng.choice(words, rng.integers(0, 60))) for n in range(DOCUMENTS)]


def write(folder, kind, encode):
    """Writes the texts of a kind, in several files where it may; for `tokens` as ids, by `encode`.

    Returns the settings of an entry of `datasets` that reads them.
    """
    documents = texts(kind)
    folder.mkdir(parents=True)
    match kind:
        case "text":
            for n, text in enumerate(documents):
                (folder / f"{n}.txt").write_text(text)
            return {"dataset_type": "text", "dataset_path": str(folder)}
        case "jsonl":
            for n in range(3):
                lines = [json.dumps({"text": text}) + "\n" for text in documents[n::3]]
                (folder / f"{n}.jsonl").write_text("".join(lines))
            return {"dataset_type": "text", "dataset_path": str(folder)}
        case "tfds":
            write_tfds(folder, documents, shards=4)
            return {"dataset_type": "tfds", "dataset_path": str(folder), "dataset_name": "documents:1.0.0"}
        case "array_record":
            for n in range(3):
                write_records(folder / f"{n}.array_record", map(str.encode, documents[n::3]))
            return {"dataset_type": "array_record", "dataset_path": str(folder), "array_record_format": "text"}
        case "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            for n in range(2):  # of row groups of 8, 8 and 4
                pq.write_table(pa.table({"text": documents[n::2]}), folder / f"{n}.parquet", row_group_size=8)
            return {"dataset_type": "parquet", "dataset_path": str(folder)}
        case "tokens":
            write_tokens(folder, [[encode(text) for text in documents[start : start + 15]] for start in (0, 15, 30)])
            return {"dataset_type": "tokens", "dataset_path": str(folder)}
        case "custom" | "iterable":
            return {"dataset_type": "custom", "dataset_factory": f"tests.data.every_source:{kind}_documents"}
        case "synthetic":
            return {"dataset_type": "synthetic"}


def custom_documents(config, split):
    """A list has a length, and can be read in any order."""
    return texts("custom")


def iterable_documents(config, split):
    """A generator has no length, and gives its items once."""
    yield from texts("iterable")


def write_records(file, records, options="group_size:1"):
    """An ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    file.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(file), options)
    for record in records:
        writer.write(record)
    writer.close()
    return file


def text_example(text):
    """A serialized tf.train.Example with one feature, `text`."""
    from tensorflow_datasets.proto import tf_example_pb2

    example = tf_example_pb2.Example()
    example.features.feature["text"].bytes_list.value.append(text.encode())
    return example.SerializeToString()


def write_tfds(folder, documents, shards=1):
    """A dataset `documents`, as TFDS prepares one."""
    import tensorflow_datasets as tfds

    builder = _builder()(data_dir=folder, file_format="array_record")
    builder.documents = documents
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))


def write_tfds_as_tfrecord(folder, documents, shards=1):
    """The same dataset of TFRecord files, as TFDS writes it where TensorFlow is; returns their folder."""
    import google_crc32c
    from array_record.python.array_record_module import ArrayRecordReader

    def checksum(data):
        crc = google_crc32c.value(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    write_tfds(folder, documents, shards)
    dataset = folder / "documents" / "1.0.0"
    for file in dataset.glob("*.array_record-*"):
        reader = ArrayRecordReader(str(file))
        with open(file.with_name(file.name.replace("array_record", "tfrecord")), "wb") as output:
            for record in reader.read_all():
                length = struct.pack("<Q", len(record))
                output.write(length + checksum(length) + record + checksum(record))
        file.unlink()
    info = json.loads((dataset / "dataset_info.json").read_text())
    (dataset / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": "tfrecord"}))
    return dataset


@functools.cache  # TFDS takes no second one of this name
def _builder():
    import tensorflow_datasets as tfds

    class Documents(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        __module__ = "documents"  # of none that TFDS could find, for which it would need importlib_resources

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from ((n, {"text": text}) for n, text in enumerate(self.documents))

    return Documents


def write_tokens(folder, shards, dtype="uint16", /, **changes):
    """A folder of tokens as the format is documented: shards are lists of documents, these lists of ids.

    changes: of facts in tokens.json. In format 1 it has no digests of the indexes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = []
    for number, documents in enumerate(shards):
        pairs = [len(document) - 1 for document in documents]
        data = b"".join(
            np.array(document).astype(np.dtype(dtype).newbyteorder("<")).tobytes() for document in documents
        )
        (folder / f"{number:06d}.ids").write_bytes(data)
        index = folder / f"{number:06d}.pair_starts.npy"
        np.save(index, np.array([sum(pairs[:d]) for d in range(len(pairs) + 1)]))
        digest = {"index_sha256": hashlib.sha256(index.read_bytes()).hexdigest()} if changes.get("format") != 1 else {}
        facts.append(
            {
                "documents": len(documents),
                "ids": sum(map(len, documents)),
                "largest_id": max((max(document) for document in documents), default=0),
                "sha256": hashlib.sha256(data).hexdigest(),
                "ids_bytes": len(data),
                "index_bytes": index.stat().st_size,
                **digest,
            }
        )
    summary = {"format": 2, "dtype": dtype, "vocab_size": 70_000, "tokenizer": None, "source": {}, "settings": {}}
    (folder / "tokens.json").write_text(json.dumps({**summary, "items_per_shard": 9, "shards": facts, **changes}))
    return folder
