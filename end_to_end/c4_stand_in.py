"""Writes a dataset of C4's form as TFDS copies of it are, TFRecord files: `python c4_stand_in.py DOCUMENTS FOLDER`.

It runs where TensorFlow and tensorflow-datasets are. DOCUMENTS is a folder of JSONL with a field `text`; every
twentieth document is of the split `validation`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds


class C4(tfds.core.GeneratorBasedBuilder):
    """c4/en:3.0.1, with other documents."""

    VERSION = tfds.core.Version("3.0.1")
    BUILDER_CONFIGS = (tfds.core.BuilderConfig(name="en"),)
    documents: list[str]

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"text": tfds.features.Text(), "url": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        return {"train": self._generate_examples(False), "validation": self._generate_examples(True)}

    def _generate_examples(self, held_out: bool) -> Iterator[tuple[int, dict[str, str]]]:
        for number, text in enumerate(self.documents):
            if (number % 20 == 0) == held_out:
                yield number, {"text": text, "url": f"https://example.org/{number}"}


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).iterdir())
    builder = C4(data_dir=sys.argv[2], file_format="tfrecord")
    builder.documents = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
