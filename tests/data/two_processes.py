"""One of two processes with four CPU devices each, for test_hosts.py: writes what it made of the same data, as JSON.

Usage: python two_processes.py ADDRESS PROCESS_ID CORPUS RESULT
"""

import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from src.config.schema import Config
from src.data.host_arrays import host_rows, to_global
from src.data.readers.synthetic import SyntheticSource
from src.data.readers.text import TextSource
from src.data.tokenizer import ByteTokenizer
from src.data.types import TrainData
from src.extras.evaluation.scoring import TextBytes
from tests.data.one_source import alone, eval_batches, held_out, train_batches

B = 16
CONFIG = Config.of({"max_target_length": 64, "data_shuffle_seed": 3, "vocab_size": 258})


class OneSpace(ByteTokenizer):
    """Makes two spaces one."""

    def encode(self, text):
        return super().encode(text.replace("  ", " "))

    def byte_ends(self, text):
        return super().byte_ends(text.replace("  ", " "))


# What each process reads, in two evaluations.
TEXTS = {
    "that process 1 reads": (["a b"], ["c  d", "e f"]),
    "of which both read one": (["c  d", "a  b"], ["e  f", "c  d"]),
}


def mixture(corpus):
    """Three sources: texts, the same cut into short pieces, and rows that need no position."""
    sources = (TextSource(corpus, 64 * 1024), TextSource(corpus, 100), SyntheticSource(256, 64, seed=1))
    return TrainData(("whole", "pieces", "random"), sources, (5, 2, 1))


def gather(batch):
    """The whole arrays, on every process."""
    return {name: multihost_utils.process_allgather(array, tiled=True) for name, array in batch.items()}


def main(address, process_id, corpus, result_path):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(address, num_processes=2, process_id=int(process_id))
    source, tokenizer = TextSource(corpus, 64 * 1024), ByteTokenizer()
    result = {}
    by_process = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    meshes = {
        "contiguous rows": (by_process.reshape(8, 1), ("batch", "length")),
        "rows of both hosts in turn": (by_process.reshape(2, 4).T.reshape(8, 1), ("batch", "length")),
        "tokens sharded too, rows shared": (by_process.reshape(2, 2, 2).reshape(4, 2), ("batch", "length")),
        "all rows on both": (by_process.reshape(2, 4).T.reshape(4, 2), ("batch", "length")),
    }
    for name, (devices, axes) in meshes.items():
        mesh = Mesh(devices, axes)
        tokens = NamedSharding(mesh, PartitionSpec("batch", "length"))
        position = NamedSharding(mesh, PartitionSpec("batch"))
        rows = host_rows(position, (B, 1, 2))
        batches = train_batches(CONFIG, alone(source), tokenizer, rows, B)
        for k, batch in enumerate(itertools.islice(batches, 3)):
            shardings = dict.fromkeys(batch, tokens) | {"data_position": position}
            whole = to_global(batch, shardings, rows, B)
            gathered = gather(whole)
            result[f"{name}, step {k}"] = {key: array.tolist() for key, array in gathered.items()}
        batches.close()
        result[f"{name}, rows"] = rows.tolist()
    mesh = Mesh(*meshes["rows of both hosts in turn"])
    place = NamedSharding(mesh, PartitionSpec("batch"))
    rows = host_rows(place, (B, 64))
    batches = train_batches(CONFIG, mixture(corpus), tokenizer, rows, B)
    for k, batch in enumerate(itertools.islice(batches, 3)):
        gathered = gather(to_global(batch, dict.fromkeys(batch, place), rows, B))
        result[f"mixture, step {k}"] = {key: array.tolist() for key, array in gathered.items()}
    batches.close()
    rows = np.arange(8) + 8 * jax.process_index()
    evaluation = eval_batches(CONFIG, held_out(source), tokenizer, rows, B)
    local = list(evaluation)
    result["eval steps"] = len(local)
    result["eval steps with tokens"] = sum(bool(batch["loss_mask"].any()) for batch in local)
    result["eval tokens"] = float(sum(batch["loss_mask"].sum() for batch in local))
    for name, texts in TEXTS.items():
        counted = TextBytes(OneSpace())
        for text in texts[jax.process_index()]:
            counted.document(text)
        result[f"texts {name}"] = counted.notes()
    Path(result_path).write_text(json.dumps(result))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
