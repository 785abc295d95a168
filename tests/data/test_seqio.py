"""The SeqIO scripts of docs/data.md, as they stand there, but for the name of the dataset.

They run where SeqIO and TensorFlow are: MINTEXT_SEQIO_PYTHON may name the Python of such an environment (the page says
how to make one). Without it they run beside stand-ins of the few functions that they call.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.config.dataset_spec import train_specs
from src.data.open import open_source
from src.data.tokenizer import make_tokenizer
from src.data.types import InputSpec
from tests.data.every_source import texts, write_tfds_as_tfrecord

PAGE = Path(__file__).parents[2] / "docs" / "data.md"

SEQIO = """
import types
import sentencepiece
import tensorflow_datasets as tfds

tasks = {}
preprocessors = types.SimpleNamespace()


def TfdsDataSource(name, tfds_data_dir):
    builder = tfds.builder_from_directory(f"{tfds_data_dir}/{name.replace(':', '/')}")
    assert builder.info.file_format.value == "tfrecord"  # TensorFlow reads no ArrayRecord files
    return lambda split: [{"text": text} for text in texts()]


def texts():
    from src.config.dataset_spec import DatasetSpec
    from src.extras.readers.tfds import TfdsSource

    source = TfdsSource(DatasetSpec("", 100, False, "tfds", "tensorflow_datasets", "documents", "train", "text"))
    return [source[i].encode() for i in range(len(source))]


class SentencePieceVocabulary:
    def __init__(self, file):
        self.model = sentencepiece.SentencePieceProcessor(model_file=file)
        self.bos_id, self.eos_id = self.model.bos_id(), self.model.eos_id()


class Feature:
    def __init__(self, vocabulary, add_eos):
        self.vocabulary, self.add_eos = vocabulary, add_eos


preprocessors.rekey = lambda rows, features, key_map: [{new: row[old] for new, old in key_map.items()} for row in rows]
preprocessors.tokenize = lambda rows, features: [
    {name: features[name].vocabulary.model.encode(text.decode()) for name, text in row.items()} for row in rows
]
preprocessors.append_eos = lambda rows, features: [
    {name: [*ids, features[name].vocabulary.eos_id] for name, ids in row.items()} for row in rows
]


class Task:
    def __init__(self, source, preprocessors, output_features):
        self.source, self.steps, self.output_features = source, preprocessors, output_features

    def get_dataset(self, sequence_length, split, shuffle):
        assert sequence_length is None and not shuffle
        rows = self.source(split)
        for step in self.steps:
            # As SeqIO does: with what a preprocessor asks for.
            rows = step(rows, features=self.output_features)
        return types.SimpleNamespace(as_numpy_iterator=lambda: iter(rows))


class TaskRegistry:
    add = staticmethod(lambda name, **facts: tasks.setdefault(name, Task(**facts)))


get_mixture_or_task = tasks.__getitem__
"""

TENSORFLOW = """
import os
import types
from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

io = types.SimpleNamespace(gfile=types.SimpleNamespace(makedirs=lambda folder: os.makedirs(folder, exist_ok=True)))
train = types.SimpleNamespace(
    Example=tf_example_pb2.Example, Features=tf_feature_pb2.Features, Feature=tf_feature_pb2.Feature,
    Int64List=tf_feature_pb2.Int64List,
)
"""


def listing(name):
    return re.search(rf"```python\n(# {name}\n.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def folder(tmp_path):
    """A folder with the scripts, the dataset, and a vocabulary; and the Python to run the scripts with."""
    pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")
    import sentencepiece

    write_tfds_as_tfrecord(tmp_path / "tensorflow_datasets", texts("tfds"), shards=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts("tfds")), model_prefix=str(tmp_path / "my"), vocab_size=300, model_type="bpe",
        byte_fallback=True, bos_id=1, eos_id=2, unk_id=0, minloglevel=2,
    )  # fmt: skip
    for name in ("my_export.py", "my_tasks.py", "my_seqio.py"):
        (tmp_path / name).write_text(listing(name).replace("c4/en:3.0.1", "documents:1.0.0"))
    if "MINTEXT_SEQIO_PYTHON" not in os.environ:
        (tmp_path / "seqio.py").write_text(SEQIO)
        (tmp_path / "tensorflow.py").write_text(TENSORFLOW)
    return tmp_path


def run(folder, *command):
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{PAGE.parents[1]}", "CUDA_VISIBLE_DEVICES": ""}
    python = os.environ.get("MINTEXT_SEQIO_PYTHON", sys.executable)
    done = subprocess.run([python, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_export_writes_is_read_as_the_same_documents(folder, config):
    run(folder, "my_export.py", "my_c4", "train", "my_c4/train")
    keys = {"dataset_type": "array_record", "dataset_column": "ids", "dataset_path": str(folder / "my_c4/train")}
    tokenizer_keys = {"tokenizer_type": "sentencepiece", "tokenizer_path": str(folder / "my.model"), "vocab_size": 300}
    made = config(**keys, **tokenizer_keys)
    tokenizer = make_tokenizer(made.data, made.model.vocab_size)
    source = open_source(train_specs(made.data)[0], InputSpec.of(made, tokenizer))
    found = sorted(source[i].tolist() for i in range(len(source)))
    assert found == sorted(tokenizer.encode(text).tolist() for text in texts("tfds"))


@pytest.mark.long
def test_the_factory_yields_the_same_documents(folder):
    ids = run(folder, "-c", "import my_seqio; print([list(map(int, d)) for d in my_seqio.documents(None, 'train')])")
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "my.model"))
    expected = [[1, *model.encode(text), 2] for text in texts("tfds")]
    assert sorted(eval(ids.strip().splitlines()[-1])) == sorted(expected)
