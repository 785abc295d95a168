"""A hundred million documents: opening them, and going on from any step, takes little memory.

What a case takes is the peak of its process above what that had before; each set of sources has its own process.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data import memory
from tests.data.every_source import text_example, write_records, write_tfds, write_tokens

pytestmark = pytest.mark.skipif(not memory.is_known, reason="Linux says it")

ROOT = Path(__file__).parents[2]
DOCUMENTS = 100_000_000
SHARDS = 1_000
SHARD = DOCUMENTS // SHARDS
ROWS = 16

SCRIPT = """
import gc, json, sys, time
import numpy as np
from src.run import resolve_config
from tests.data.one_source import data_fingerprint
from tests.data.one_source import train_batches
from src.data.types import InputSpec, RowSource
from src.data.open import open_sources
from src.data.tokenizer import make_tokenizer
from tests.data import memory

modules, rows, cases = json.loads(sys.argv[1])
for module in modules:
    __import__(module)
for argv, rows_taken, taken in cases:
    config = resolve_config.load(argv)
    gc.collect()
    memory.forget_peak()
    before = memory.now()
    times = [time.perf_counter()]
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    data, _ = open_sources(InputSpec.of(config, tokenizer), config.evaluation)
    data_fingerprint(config, data, tokenizer, rows)
    times.append(time.perf_counter())
    position = None if taken is None else np.full((rows, len(data.sources), 2), (taken, 3), np.int32)
    batches = train_batches(config, data, tokenizer, range(rows), rows, rows_taken, position)
    batch = next(batches)
    times.append(time.perf_counter())
    batches.close()
    taken_bytes = memory.peak() - before
    assert (batch["loss_mask"][:, 0] == 1).all()
    counts = [source.row_count if isinstance(source, RowSource) else len(source) for source in data.sources]
    print(json.dumps({"counts": counts, "bytes": taken_bytes, "seconds": np.diff(times).tolist()}), flush=True)
    del data, batches, batch
"""


class Simulated:
    """As many documents, none of which is stored."""

    def __len__(self):
        return DOCUMENTS

    def __getitem__(self, i):
        return text(i)


def simulated(config, split):
    return Simulated()


def text(n):
    return f"document {n} " + "of many words " * (n % 40)


def link(folder, file, name):
    """The file under a thousand names."""
    for n in range(SHARDS):
        os.link(file, folder / name.format(n))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Writes a source of DOCUMENTS documents once, and returns the settings that name it."""
    folder = tmp_path_factory.mktemp("scale")
    written = {}

    def of(kind):
        if kind not in written:
            (folder / kind).mkdir()
            written[kind] = write(folder / kind, kind)
        return {"dataset_type": kind, **written[kind]}

    return of


def write(folder, kind):
    match kind:
        case "custom":
            return {"dataset_factory": "tests.data.test_scale:simulated"}
        case "array_record":
            pytest.importorskip("array_record", reason="bash setup.sh data installs it")
            file = write_records(folder / "one", (text(n).encode() for n in range(SHARD)))
            link(folder, file, "x.array_record-{:05}-of-01000")
            return {"dataset_path": f"{folder}/x.*", "array_record_format": "text"}
        case "tfds":
            pytest.importorskip("tensorflow_datasets", reason="bash setup.sh data installs it")
            write_tfds(folder, [text(0)])
            dataset = folder / "documents/1.0.0"
            file = write_records(folder / "one", (text_example(text(n)) for n in range(SHARD)))
            (old,) = dataset.glob("*array_record*")
            old.unlink()
            link(dataset, file, "documents-train.array_record-{:05}-of-01000")
            info = json.loads((dataset / "dataset_info.json").read_text())
            info["splits"][0]["shardLengths"] = [str(SHARD)] * SHARDS
            (dataset / "dataset_info.json").write_text(json.dumps(info))
            return {"dataset_path": str(folder), "dataset_name": "documents"}
        case "parquet":
            pa = pytest.importorskip("pyarrow", reason="bash setup.sh data installs it")
            pq = pytest.importorskip("pyarrow.parquet")
            table = pa.table({"text": [text(n) for n in range(SHARD)]})
            pq.write_table(table, folder / "one", row_group_size=SHARD // 10)
            link(folder, folder / "one", "{:03}.parquet")
            return {"dataset_path": f"{folder}/*.parquet"}
        case "tokens":  # of a thousand shards with the same documents of 100 ids, all 0
            write_tokens(folder, [[[0] * 100]])
            summary = json.loads((folder / "tokens.json").read_text())
            np.save(folder / "index.npy", np.arange(SHARD + 1) * 99)
            with open(folder / "ids", "wb") as file:
                file.truncate(2 * 100 * SHARD)
            (folder / "000000.ids").unlink()
            (folder / "000000.pair_starts.npy").unlink()
            link(folder, folder / "ids", "{:06}.ids")
            link(folder, folder / "index.npy", "{:06}.pair_starts.npy")
            sizes = {"ids_bytes": 2 * 100 * SHARD, "index_bytes": (folder / "index.npy").stat().st_size}
            facts = {"documents": SHARD, "ids": 100 * SHARD, "sha256": hashlib.sha256(bytes(200 * SHARD)).hexdigest()}
            facts["index_sha256"] = hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest()
            shard = {**summary["shards"][0], **facts, **sizes}
            (folder / "tokens.json").write_text(json.dumps({**summary, "shards": [shard] * SHARDS}))
            return {"dataset_path": str(folder)}
        case "synthetic":
            return {}


def start(settings, kinds, *cases):
    """What a process says that opens sources and makes a batch, for each case: see SCRIPT.

    cases: rows of the run before it, documents that each stream has taken, and more keys.
    """
    datasets = ", ".join(
        f"{{{', '.join(f'{name}: {value}' for name, value in {'name': kind, 'weight': 1, **settings(kind)}.items())}}}"
        for kind in kinds
    )
    argv = ["configs/base.yml", f"datasets=[{datasets}]", "max_target_length=256", "eval_interval=-1"]
    modules = {
        "array_record": ["array_record.python.array_record_module"],
        "tfds": ["array_record.python.array_record_module", "tensorflow_datasets.proto"],
        "parquet": ["pyarrow.parquet"],
        "custom": ["tests.data.test_scale"],
    }
    imports = [name for kind in kinds for name in modules.get(kind, [])]
    cases = [
        ([*argv, *(f"{key}={value}" for key, value in keys.items())], rows_taken, taken)
        for rows_taken, taken, keys in cases
    ]
    command = [sys.executable, "-c", SCRIPT, json.dumps([imports, ROWS, cases])]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    print(found.stdout)  # its seconds are for people: tests compare no times
    return [json.loads(line) for line in found.stdout.splitlines()]


KINDS = ["custom", "array_record", "tfds", "parquet", "tokens"]


BEGIN, GO_ON = (0, None, {}), (10**10, 123_456_789, {})
NO_POSITION = 987_654_321 * ROWS, None, {"packing": False, "long_documents": "truncate"}


MIXED = ["tokens", "array_record", "custom", "parquet", "tfds"]  # each alone takes no more


@pytest.mark.parametrize(
    "kinds", [*(pytest.param([kind], marks=pytest.mark.long) for kind in KINDS), MIXED], ids="+".join
)
def test_opening_and_going_on_from_a_position_take_little_memory(settings, kinds):
    rows = -(-DOCUMENTS * 99 // 256)
    # A source alone goes to any step without a position too, where it needs none; of all of them: below.
    cases = (BEGIN, GO_ON, NO_POSITION) if len(kinds) == 1 else (BEGIN, GO_ON)
    for case, found in zip(cases, start(settings, kinds, *cases), strict=True):
        cut = "tokens" if case is not NO_POSITION else ""  # ids without packing have a row for each document
        assert found["counts"] == [rows if kind == cut else DOCUMENTS for kind in kinds]
        assert found["bytes"] < 200 << 20


@pytest.mark.parametrize(
    "kind",
    ["tokens", "synthetic", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("array_record", "custom"))],
)  # the others: above
def test_what_needs_no_position_goes_to_any_step_without_one(settings, kind):
    packed = (*NO_POSITION[:2], {})
    cases = {"synthetic": [packed], "tokens": [packed, NO_POSITION]}.get(kind, [NO_POSITION])
    for found in start(settings, [kind], *cases):
        assert found["bytes"] < 200 << 20
