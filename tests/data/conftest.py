import hashlib

import numpy as np
import pytest

from src.config.schema import Config
from src.data.tokenizer import ByteTokenizer


class ListSource:
    """Texts in memory, which remembers what was read."""

    is_remote = False

    def __init__(self, texts):
        self.texts = list(texts)
        self.read = []

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        self.read.append(i)
        return self.texts[i]

    def document_keys(self):
        digests = [hashlib.sha256(text.encode()).digest()[:8] for text in self.texts]
        return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)

    def group_sizes(self):
        return None

    def fingerprint(self):
        return {"type": "list", "documents": len(self.texts)}


@pytest.fixture(scope="session")
def list_source():
    return ListSource


@pytest.fixture(scope="session")
def words():
    """Forty different documents of 1 to 300 characters."""
    rng = np.random.default_rng(0)
    return [f"{n}:" + "".join(rng.choice(list("abc é\n"), rng.integers(0, 300))) for n in range(40)]


@pytest.fixture(scope="session")
def config():
    """The keys that data modules read, with some changed."""
    defaults = {
        "dataset_type": "text",
        "dataset_path": "",
        "max_document_bytes": 64 * 1024,
        "dataset_name": "",
        "train_split": "train",
        "dataset_column": "text",
        "array_record_format": "example",
        "dataset_factory": "",
        "datasets": [],
        "eval_dataset_path": "",
        "eval_dataset_name": "",
        "eval_split": "validation",
        "eval_datasets": [],
        "eval_mode": "reset",
        "long_documents": "split",
        "batch_transform": "",
        "data_threads": 1,
        "eval_fraction": 0.1,
        "eval_interval": 10,
        "eval_steps": -1,
        "tokenizer_type": "byte",
        "tokenizer_path": "",
        "vocab_size": 258,
        "packing": True,
        "use_sft": False,
        "sft_train_on_completion_only": True,
        "data_shuffle_seed": 3,
        "max_target_length": 64,
    }

    def make(**changes):
        assert changes.keys() <= defaults.keys()
        return Config.of({**defaults, **changes})

    return make


@pytest.fixture(scope="session")
def stream_documents():
    """Reads the documents in some rows of one stream: [rows, T] arrays (and a tokenizer) -> lists of ids, bos to eos.

    Joins what lies on both sides of a cut, and leaves a last document that isn't at its end out.
    """

    def read(rows, tokenizer=ByteTokenizer):
        documents = []
        for tokens, targets, mask in zip(rows["tokens"], rows["targets"], rows["loss_mask"], strict=True):
            for token, target in zip(tokens[mask == 1], targets[mask == 1], strict=True):
                if token == tokenizer.bos:
                    documents.append([token])
                assert documents[-1][-1] == token
                documents[-1].append(target)
        return [document for document in documents if document[-1] == tokenizer.eos]

    return read
