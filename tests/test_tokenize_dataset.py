import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from src.config.dataset_spec import train_specs
from src.data.open import open_sources
from src.data.tokenizer import ByteTokenizer, make_tokenizer
from src.data.types import EvalSet, InputSpec
from src.extras.datasets import tokenize_dataset
from src.extras.datasets.tokenize_dataset import main
from src.extras.datasets.train_tokenizer import train
from src.extras.readers.tokens import TokenDocuments
from src.run.resolve_config import load
from src.system.errors import UserError
from tests import runs
from tests.data.one_source import eval_batches, train_batches

ROOT = Path(__file__).parents[1]


PROCESSES, SHARD_IDS = tokenize_dataset._processes, tokenize_dataset._MIN_SHARD_IDS


def one_thread(most):
    """In place of processes for the shards, which take a second to start."""
    tokenize_dataset._items_of_process.cache_clear()
    return concurrent.futures.ThreadPoolExecutor(1)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Of about a thousand ids, by one thread."""
    monkeypatch.setattr(tokenize_dataset, "_MIN_SHARD_IDS", 1000)
    monkeypatch.setattr(tokenize_dataset, "_processes", one_thread)


@pytest.fixture
def processes(small_shards, monkeypatch):
    """Shards are written by processes, as they are for users."""
    monkeypatch.setattr(tokenize_dataset, "_processes", PROCESSES)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list("abc é\n"), rng.integers(1, 200))) for _ in range(80)]


@pytest.fixture
def corpus(tmp_path, texts):
    """Three texts in files of their own, the others with an empty one between them as lines of JSON."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(texts[:3]):
        (folder / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts[3:40], "", *texts[40:]]]
    (folder / "rest.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def command(corpus, tmp_path):
    def make(**changes):
        keys = {"dataset_path": corpus, "tokenized_path": tmp_path / "out", "vocab_size": 258} | changes
        return ["configs/base.yml", *(f"{key}={value}" for key, value in keys.items() if value is not None)]

    return make


def documents_in(folder):
    tokens = TokenDocuments(train_specs(load(["configs/base.yml", f"dataset_path={folder}"]).data)[0])
    return [tokens[i].tolist() for i in range(len(tokens))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_are_the_texts_in_order_by_the_tokenizer(command, tmp_path, texts):
    main(command())
    assert documents_in(tmp_path / "out") == [[256, *text.encode(), 257] for text in texts]
    summary = json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert len(summary["shards"]) > 5
    assert summary["tokenizer"] == ByteTokenizer().fingerprint()
    assert (summary["dtype"], summary["vocab_size"]) == ("uint16", 258)
    names = {f"{n:06d}{end}" for n in range(len(summary["shards"])) for end in (".ids", ".pair_starts.npy")}
    assert set(contents(tmp_path / "out")) == {"tokens.json", *names}


def test_a_mixture_of_one_beside_evaluation_sets_is_written(command, corpus, tmp_path, texts):
    entries = {"datasets": f"[{{name: one, dataset_path: {corpus}}}]", "eval_datasets": "[{name: a, dataset_path: b}]"}
    main(command(dataset_path=None, **entries))
    assert documents_in(tmp_path / "out") == [[256, *text.encode(), 257] for text in texts]


def test_a_large_vocabulary_takes_32_bits(command, tmp_path, texts):
    main(command(vocab_size=65_537))
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["dtype"] == "uint32"
    assert documents_in(tmp_path / "out") == [[256, *text.encode(), 257] for text in texts]


def test_the_config_s_tokenizer_is_used(command, tmp_path, texts):
    model = tmp_path / "t.model"
    model.write_bytes(train(texts, 300))
    main(command(tokenizer_type="sentencepiece", tokenizer_path=model, vocab_size=300))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [[processor.bos_id(), *processor.encode(text), processor.eos_id()] for text in texts]
    assert documents_in(tmp_path / "out") == expected


def test_a_source_of_ids_is_written_as_it_is(command, tmp_path):
    ids = [[5, 6, 7], [8], [], [9, 4]]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": some}) + "\n" for some in ids))
    main(command(dataset_path=tmp_path / "ids.jsonl", dataset_column="ids", vocab_size=300))
    assert documents_in(tmp_path / "out") == [[5, 6, 7], [9, 4]]  # the others have nothing to predict
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["tokenizer"] is None


def test_an_id_beyond_the_vocabulary_is_an_error(command, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"ids": [5, 6]}\n{"ids": [5, 300]}\n')
    with pytest.raises(UserError, match="has id 300: vocab_size=300 is too small for these data"):
        main(command(dataset_path=tmp_path / "ids.jsonl", dataset_column="ids", vocab_size=300))


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_on_the_tokens_has_each_pair_of_the_texts_once(command, tmp_path, texts, packing):
    main(command())
    keys = {"dataset_type": "tokens", "dataset_path": tmp_path / "out", "tokenized_path": None}
    config = load([*command(**keys, max_target_length=32, packing=packing), "eval_interval=-1"])
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    data, _ = open_sources(InputSpec.of(config, tokenizer), config.evaluation)
    pairs = Counter()
    for batch in eval_batches(config, EvalSet("", data.sources[0], -1), tokenizer, range(4), 4):
        learned = batch["loss_mask"] == 1
        pairs.update(zip(batch["tokens"][learned].tolist(), batch["targets"][learned].tolist(), strict=True))
    encoded = [ByteTokenizer().encode(text).tolist() for text in texts]
    assert pairs == Counter(pair for ids in encoded for pair in itertools.pairwise(ids))


def test_nothing_is_held_out_before_the_run_does(command, tmp_path, texts):
    main(command(eval_interval=10))
    assert len(documents_in(tmp_path / "out")) == len(texts)


def test_the_last_line_says_which_keys_train_on_the_tokens(command, corpus, tmp_path, capsys):
    main(command(dataset_path=None, datasets=f"[{{name: one, dataset_path: {corpus}}}]"))
    line = capsys.readouterr().out.splitlines()[-1]
    keys = line.removeprefix("train on it: ").partition(",")[0].split()
    config = load([*command(dataset_path=None, tokenized_path=None), *keys, "max_target_length=64"])
    tokenizer = make_tokenizer(config.data, config.model.vocab_size)
    data, _ = open_sources(InputSpec.of(config, tokenizer), config.evaluation)
    batch = next(train_batches(config, data, tokenizer, range(2), 2))
    assert (batch["loss_mask"] == 1).all()


def test_a_model_is_trained_on_the_tokens(tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    main([runs.BASE, f"dataset_path={corpus}", f"tokenized_path={tmp_path / 'out'}", "vocab_size=258"])
    keys = {"dataset_type": "tokens", "dataset_path": tmp_path / "out", "base_output_directory": tmp_path}
    runs.run_here(**keys, steps=3)
    assert [step for step, _ in runs.losses(tmp_path / "run")] == [1, 2, 3]


def test_any_number_of_processes_writes_the_same_bytes(command, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    main(command())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    main(command(tokenized_path=tmp_path / "again"))
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_a_killed_command_goes_on_and_writes_the_same_bytes(tmp_path, capsys, monkeypatch):
    """SIGKILL when the first shard is finished and others are not."""
    monkeypatch.setattr(tokenize_dataset, "_MIN_SHARD_IDS", SHARD_IDS)  # as the process of its own has it
    line = json.dumps({"text": "some words of a document " * 4}) + "\n"
    (tmp_path / "corpus.jsonl").write_text(line * 45_000)
    argv = ["configs/base.yml", f"dataset_path={tmp_path / 'corpus.jsonl'}", "vocab_size=258"]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "src.tokenize_dataset", *argv, f"tokenized_path={out}"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    while not list(out.glob("0*.json")):
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    wait_for_the_end_of_session(process.pid)
    assert not (out / "tokens.json").exists()
    finished = {path.stem: (out / f"{path.stem}.ids").stat().st_mtime_ns for path in out.glob("0*.json")}
    assert finished

    main([*argv, f"tokenized_path={out}"])
    shards = json.loads((out / "tokens.json").read_text())["shards"]
    assert f"resuming: {len(finished)} of {len(shards)} shards are finished" in capsys.readouterr().out
    assert {name: (out / f"{name}.ids").stat().st_mtime_ns for name in finished} == finished
    main([*argv, f"tokenized_path={tmp_path / 'whole'}"])
    assert contents(out) == contents(tmp_path / "whole")


def wait_for_the_end_of_session(session):
    """Until its last process has ended: those that the killed one had started must end by themselves."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(session, 0)
            time.sleep(0.01)
        os.killpg(session, signal.SIGKILL)
        pytest.fail("a process outlived the command that had started it")


def test_a_shard_that_lost_a_part_is_written_again(command, tmp_path):
    main(command())
    expected = contents(tmp_path / "out")
    summary = json.loads(expected["tokens.json"])
    for number, shard in enumerate(summary.pop("shards")):
        (tmp_path / "out" / f"{number:06d}.json").write_text(json.dumps(shard))
    (tmp_path / "out" / "unfinished.json").write_text(json.dumps(summary))
    (tmp_path / "out" / "tokens.json").unlink()
    (tmp_path / "out" / "000003.ids").write_bytes(expected["000003.ids"][:-2])
    main(command())
    assert contents(tmp_path / "out") == expected


def test_a_finished_folder_is_left_as_it_is(command, tmp_path, capsys):
    main(command())
    expected = contents(tmp_path / "out")
    main(command())
    assert "is already finished" in capsys.readouterr().out
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"max_document_bytes": 100}, "source max_document_bytes 65536 there, 100 here"),
        ({"vocab_size": 300}, "vocab_size 258 there, 300 here"),
        ({"dataset_column": "other"}, "settings dataset_column 'text' there, 'other' here"),
        ({"tokenizer_type": "sentencepiece"}, "tokenizer type 'byte' there, 'sentencepiece' here"),
    ],
)
def test_a_folder_of_other_data_is_an_error(command, tmp_path, corpus, texts, changes, difference, finished):
    main(command())
    if not finished:
        (tmp_path / "out" / "tokens.json").rename(tmp_path / "out" / "unfinished.json")
    if "tokenizer_type" in changes:
        (tmp_path / "t.model").write_bytes(train(texts, 258 + 30))
        changes = changes | {"tokenizer_path": tmp_path / "t.model", "vocab_size": 288}
    if "dataset_column" in changes:
        for file in corpus.glob("*.jsonl"):
            file.write_text(file.read_text().replace('"text"', '"other"'))
    with pytest.raises(UserError) as error:
        main(command(**changes))
    assert difference in str(error.value)
    assert "name a new folder, or delete this one" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("unfinished.json", text) for text in ("[" * 100_000, "[1]", '{"a": 1')),
        *(("000000.json", text) for text in ("[" * 100_000, "[1]", '{"a": 1', '{"other": 1}')),
    ],
)
def test_a_damaged_note_of_an_earlier_start_is_an_error_that_names_it(
    command, corpus, tmp_path, name, text, monkeypatch
):
    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenize_dataset, "_write", dies)
        with pytest.raises(KeyboardInterrupt):
            main(command())
    (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name} is damaged \(.*\): delete it"):
        main(command())


def test_a_folder_with_other_files_is_an_error(command, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    (tmp_path / "out" / ".film.part").write_text("another program's")
    with pytest.raises(UserError, match=r"has other files \(thesis\.tex\): name a new folder"):
        main(command())
    assert sorted(contents(tmp_path / "out")) == [".film.part", "thesis.tex"]


def test_two_commands_do_not_write_one_folder(command, tmp_path):
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another process is writing"):
            main(command())
    finally:
        os.close(descriptor)


def test_an_item_that_can_not_be_read_is_an_error_that_names_its_file(command, processes, corpus, tmp_path):
    """It is met by another process, in the middle of a shard; the command goes on once it is mended."""
    good = (corpus / "rest.jsonl").read_bytes()
    lines = good.splitlines(keepends=True)
    lines[60] = b'{"text": 7} ' + b" " * (len(lines[60]) - 13) + b"\n"
    (corpus / "rest.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"rest\.jsonl, line 61: its field text: it is of type int"):
        main(command())
    assert not list((tmp_path / "out").glob(".*"))
    (corpus / "rest.jsonl").write_bytes(good)
    main(command())
    assert len(documents_in(tmp_path / "out")) == 80


def test_data_without_text_are_an_error(command, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(UserError, match="the data contains no text"):
        main(command(dataset_path=tmp_path / "empty.jsonl"))


def test_a_folder_that_can_not_be_written_is_an_error(command, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"tokenized_path={tmp_path}/file/out can't be written"):
        main(command(tokenized_path=tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenized_path": None}, "tokenized_path is empty: expected the folder"),
        ({"tokenized_path": "gs://bucket/out"}, "expected a local folder"),
        ({"dataset_type": "synthetic"}, "dataset_type=synthetic already has token ids"),
        ({"dataset_type": "tokens"}, "dataset_type=tokens already has token ids"),
        ({"use_sft": True}, "set use_sft=false"),
        (
            {"datasets": "[{name: a, dataset_path: x}, {name: b, dataset_path: y}]"},
            "datasets has a, b: .* one at a time",
        ),
    ],
)
def test_what_can_not_be_written_as_tokens_is_an_error(command, changes, message):
    if "datasets" in changes:
        changes = changes | {"dataset_path": None}
    with pytest.raises(UserError, match=message):
        main(command(**changes))


def test_help_is_answered(capsys):
    main(["--help"])
    assert "src.tokenize_dataset CONFIG " in capsys.readouterr().out
