"""Two real processes: the global arrays they make are those of one, and their evaluations end together."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from src.data.readers.text import TextSource
from src.data.tokenizer import ByteTokenizer
from tests.data.one_source import alone, train_batches
from tests.data.two_processes import CONFIG, mixture

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    for n in range(25):
        (folder / f"{n}.txt").write_text(f"{n} " * rng.integers(1, 200))
    return str(folder)


@pytest.fixture(scope="module")
def processes(corpus, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    results = [tmp_path_factory.mktemp("results") / "result.json" for _ in range(2)]
    script = str(Path(__file__).with_name("two_processes.py"))
    started = [
        subprocess.Popen(
            [sys.executable, script, address, str(process_id), corpus, str(result)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for process_id, result in enumerate(results)
    ]
    try:
        assert [process.wait(timeout=120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [json.loads(result.read_text()) for result in results]


def of_one_process(data):
    return list(itertools.islice(train_batches(CONFIG, data, ByteTokenizer(), range(16), 16), 3))


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ("contiguous rows", [list(range(8)), list(range(8, 16))]),
        ("rows of both hosts in turn", [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
        ("tokens sharded too, rows shared", [list(range(8)), list(range(8, 16))]),
        ("all rows on both", [list(range(16)), list(range(16))]),
    ],
)
def test_global_batches_of_two_processes_are_those_of_one(processes, corpus, mesh, rows):
    expected = of_one_process(alone(TextSource(corpus, 64 * 1024)))
    for result, own_rows in zip(processes, rows, strict=True):
        assert result[f"{mesh}, rows"] == own_rows
        for k, batch in enumerate(expected):
            assert result[f"{mesh}, step {k}"] == {name: array.tolist() for name, array in batch.items()}


def test_so_are_those_of_a_mixture(processes, corpus):
    for k, batch in enumerate(of_one_process(mixture(corpus))):
        for result in processes:
            assert result[f"mixture, step {k}"] == {name: array.tolist() for name, array in batch.items()}


def test_evaluations_end_on_the_same_step_and_miss_nothing(processes, corpus):
    steps = [result["eval steps"] for result in processes]
    with_tokens = [result["eval steps with tokens"] for result in processes]
    assert steps[0] == steps[1] == max(with_tokens)
    assert min(with_tokens) < max(with_tokens)  # so one of them had to wait for the other
    total = sum(len(path.read_bytes()) + 1 for path in Path(corpus).iterdir())
    assert sum(result["eval tokens"] for result in processes) == total


def test_texts_that_a_tokenizer_changes_are_those_of_both(processes):
    for result in processes:
        (one,), (three,) = result["texts that process 1 reads"], result["texts of which both read one"]
        assert one.startswith("the tokenizer changes 1 of the texts, such as 'c  d' to 'c d': ")
        assert three.startswith("the tokenizer changes 3 of the texts, such as 'a  b' to 'a b': ")
