"""Fewer documents than rows: rows that share one begin at different places of it, and all else is as it was."""

import collections
import itertools
import json

import numpy as np
import pytest

from src.data.few_documents import spread
from src.data.order import Shuffle
from src.data.tokenizer import ByteTokenizer, make_tokenizer
from src.data.types import Document, InputSpec, TrainData
from src.extras.conversations import ConversationSource
from src.run.summary import few_documents
from tests.data import every_source
from tests.data.batches import B, assert_same, joined, take
from tests.data.one_source import alone, eval_batches, held_out, open_sources, train_batches

LENGTH = 64  # T, as in the fixture `config`


def distinct(rows):
    return len({row.tobytes() for row in rows})


@pytest.fixture
def numbers(config, list_source):
    """A config, and a source of ids that are all different, with documents of so many targets."""

    def make(*sizes, **keys):
        ends = np.cumsum([size + 1 for size in sizes])
        documents = [np.arange(end - size - 1, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]
        return config(vocab_size=30_000, **keys), list_source(documents)

    return make


@pytest.mark.parametrize("rows", range(2, 25))
def test_streams_that_share_a_document_are_at_least_half_of_an_even_share_apart(config, rows):
    size = 10_007
    ids = np.arange(size + 1, dtype=np.int32)
    for count in range(1, rows):
        order, read = Shuffle(count, 0, 0), spread(lambda _: [Document(ids)], count, rows, InputSpec.of(config(), None))
        for wave in range(2 * count + 2):  # the documents that all streams begin if their documents are of one length
            places = collections.defaultdict(list)
            for ordinal in range(wave * rows, (wave + 1) * rows):
                places[order(ordinal)].append(int(read(ordinal)[0].ids[0]))
            for begun in places.values():
                begun.sort()
                gaps = np.diff([*begun, begun[0] + size])
                assert gaps.min() + 1 >= size / (2 * len(begun)), (rows, count, wave)


def test_each_target_of_a_document_comes_once_with_what_belongs_to_it(config):
    rng = np.random.default_rng(0)
    whole = Document(*(rng.integers(0, high, 501).astype(kind) for high, kind in ((200, "i4"), (2, "?"), (5, "i4"))))
    read = spread(lambda _: [whole], 2, 8, InputSpec.of(config(), None))
    in_parts = 0
    for ordinal in range(24):
        parts = read(ordinal)
        in_parts += len(parts) == 2
        assert parts[0].ids[-1] == whole.ids[-1]
        assert parts[-1].ids[0] == whole.ids[0]
        counted = [pair for part in parts[::-1] for pair in zip(*(array[1:] for array in part), strict=True)]
        assert counted == list(zip(*(array[1:] for array in whole), strict=True))
        assert [token for part in parts[::-1] for token in part.ids[:-1]] == whole.ids[:-1].tolist()
    assert in_parts == 18  # of 4 places one is the beginning


def test_documents_that_fit_a_row_stay_whole(config):
    for size, parts in ((LENGTH, 1), (LENGTH + 1, 2)):
        read = spread(lambda _, size=size: [Document(np.arange(size + 1))], 1, 8, InputSpec.of(config(), None))
        assert [len(read(ordinal)) for ordinal in range(8)] == [1, *[parts] * 7]


@pytest.mark.parametrize("kind", ["text", "jsonl", "array_record", "parquet", "custom"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_batch_are_different_texts(config, tmp_path, monkeypatch, kind, count):
    for name, needed in (("array_record", "array_record"), ("parquet", "pyarrow")):
        if kind == name:
            pytest.importorskip(needed, reason="bash setup.sh data installs it")
    rng = np.random.default_rng(0)
    books = ["".join(rng.choice(list("abcdefgh é\n"), 4_000 + 700 * n)) for n in range(count)]
    monkeypatch.setattr(every_source, "texts", lambda kind: books)
    settings = config(eval_interval=-1, **every_source.write(tmp_path / "data", kind, None))
    data, _ = open_sources(settings, make_tokenizer(settings.data, settings.model.vocab_size))
    for batch in take(train_batches(settings, data, ByteTokenizer(), np.arange(B), B), 40):
        assert distinct(batch["tokens"]) == B


def test_the_rows_of_a_small_source_of_a_mixture_are_different(numbers):
    settings, one = numbers(3_000)
    _, many = numbers(*[150] * 20)
    data = TrainData(("one", "many"), (one, many), (3.0, 1.0))
    for batch in take(train_batches(settings, data, None, np.arange(B), B), 10):
        assert distinct(batch["tokens"]) == B


@pytest.mark.parametrize("packing", [True, False])
def test_each_stream_reads_each_document_once_before_one_comes_again(numbers, packing):
    sizes = [1_000, 640, 1_111]
    settings, source = numbers(*sizes, packing=packing)
    batches = take(train_batches(settings, alone(source), None, np.arange(B), B), 120)
    targets = [
        np.concatenate([batch["targets"][row][batch["loss_mask"][row] == 1] for batch in batches]) for row in range(B)
    ]
    order = Shuffle(3, settings.data.data_shuffle_seed, 0)
    for stream, mine in enumerate(targets):
        at = 0
        for ordinal in itertools.count(stream, B):
            document = source.texts[order(ordinal)]
            if at + len(document) - 1 > len(mine):
                break
            assert sorted(mine[at : at + len(document) - 1]) == document[1:].tolist()
            at += len(document) - 1
        assert ordinal > stream + 2 * B


def test_without_packing_an_epoch_has_the_same_rows_in_another_order(numbers):
    settings, source = numbers(1_000, packing=False)
    batches = take(train_batches(settings, alone(source), None, np.arange(B), B), 16)
    assert distinct(batches[0]["tokens"]) == B
    for row in range(B):
        begins = sorted(int(batch["tokens"][row][0]) for batch in batches)
        assert begins == list(range(0, 1_000, LENGTH))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_hosts_and_stops_change_nothing(numbers, hosts, packing):
    settings, source = numbers(700, 90, 1_234, packing=packing)
    whole = joined(settings, source, 1, 40, tokenizer=None)
    made = joined(settings, source, hosts, 13, tokenizer=None)
    made += joined(settings, source, 1, 27, 13 * B, made[-1]["data_position"], tokenizer=None)
    assert_same(made, whole)


def test_an_evaluation_of_one_epoch_begins_at_the_start(numbers):
    settings, source = numbers(500, 300)
    batches = list(eval_batches(settings, held_out(source, -1), None, np.arange(4), 4))
    first = batches[0]
    assert sorted(first["tokens"][:2, 0].tolist()) == [0, 501]
    assert not first["loss_mask"][2:].any()
    targets = np.concatenate([batch["targets"][batch["loss_mask"] == 1] for batch in batches])
    assert sorted(targets.tolist()) == [*range(1, 501), *range(502, 802)]


@pytest.mark.parametrize("mode", ["reset", "rolling"])
def test_an_evaluation_of_some_batches_has_different_rows(numbers, mode):
    settings, source = numbers(2_000, 3_000, eval_mode=mode)
    batches = eval_batches(settings, held_out(source, 3), None, np.arange(B), B)
    for batch in [*batches, *batches]:
        assert distinct(batch["tokens"]) == B


def test_conversations_begin_at_their_start(config, write):
    record = {"prompt": "q" * 100, "completion": "a" * 100}
    settings = config(use_sft=True, dataset_path="one.jsonl")
    inputs = InputSpec.of(settings, ByteTokenizer())
    source = ConversationSource(str(write("one.jsonl", json.dumps(record))), "dataset_path", inputs)
    (batch,) = take(train_batches(settings, alone(source), ByteTokenizer(), np.arange(B), B), 1)
    assert (batch["tokens"] == [256, *b"q" * (LENGTH - 1)]).all()


# ---- What the header says


def said(settings, data, rows=B, steps=1_000, rules=2):
    return few_documents(InputSpec.of(settings, None, rules), data, rows, steps)


def test_the_header_says_how_many_documents_there_are_for_how_many_rows(numbers):
    settings, source = numbers(2_000, 500, 3_500)
    shared = "3 documents for 8 rows: rows that share one begin at different places in it"
    assert said(settings, alone(source)) == [shared]
    assert said(settings, alone(source), rules=1) == ["3 documents for 8 rows"]
    assert said(settings, alone(source), rows=3) == []
    mixture = TrainData(("book", "web"), (source, numbers(*[500] * 8)[1]), (1.0, 1.0))
    assert said(settings, mixture) == [f"book: {shared}"]
    truncated, _ = numbers(1, packing=False, long_documents="truncate")
    assert said(truncated, alone(source)) == []


def test_the_header_says_where_a_row_reads_only_a_few_documents(numbers):
    settings, source = numbers(*[1_000] * 20)
    assert said(settings, alone(source), steps=46) == []  # 2,944 tokens, but a short trial
    assert said(settings, alone(source), steps=100) == []  # 6.4 documents
    _, long = numbers(*[3_000] * 3, 3_400)
    (line,) = said(settings, alone(long), steps=100, rows=4)  # 6,400 tokens of documents of 3,100
    assert line.startswith("a row reads 2.1 documents of about 3,100 tokens in the whole run")
    assert "max_document_bytes" in line
    assert "src.tokenize_dataset" in line
    half = TrainData(("a", "b", "c"), (source, long, long), (1.0, 1.0, 0.0))
    assert [line.partition(" of about")[0] for line in said(settings, half, steps=180, rows=4)] == [
        "b: a row reads 1.9 documents"
    ]
