import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.data.mixture import Mixture
from src.data.readers.synthetic import SyntheticSource
from src.data.readers.text import TextSource
from src.data.stream_positions import remap_position
from src.data.types import Document, TrainData
from src.system.errors import TransientError, UserError
from tests.data.batches import TOKENIZER, B, assert_same, hosts_of, joined, rows_of, take
from tests.data.one_source import alone, data_fingerprint, eval_batches, held_out, train_batches


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_any_number_of_hosts_makes_the_same_batches(config, list_source, words, packing, hosts):
    settings = config(packing=packing)
    whole = joined(settings, list_source(words), 1, 20)
    assert_same(joined(settings, list_source(words), hosts, 20), whole)


@settings(max_examples=25, deadline=None)
@given(
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    hosts=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4),
    packing=st.booleans(),
    length=st.sampled_from([7, 64, 500]),
)
def test_stopped_anywhere_and_resumed_on_other_hosts_the_batches_go_on(
    config, list_source, words, stops, hosts, packing, length
):
    settings = config(packing=packing, max_target_length=length)
    whole = joined(settings, list_source(words), hosts[0], sum(stops))
    resumed, position = [], None
    for steps, count in zip(stops, hosts[1:], strict=False):
        resumed += joined(settings, list_source(words), count, steps, len(resumed) * B, position)
        position = resumed[-1]["data_position"]
    assert_same(resumed, whole)


class Rows:
    """Rows of one document each, which say their number."""

    def __init__(self, count, length):
        self.row_count = count
        self._length = length

    def row(self, i):
        return [Document(np.full(self._length + 1, i, np.int32))]

    def fingerprint(self):
        return {"type": "rows", "rows": self.row_count}


def mixed(list_source, words, length, weights=(5, 2, 1)):
    """Three sources: two of documents, stored alone and in groups, and one of rows."""
    grouped = list_source([f"grouped {word}" for word in words[:30]])
    grouped.group_sizes = lambda: np.array([4, 16, 0, 10])
    sources = (list_source(words), grouped, Rows(17, length))
    return TrainData(("single", "grouped", "rows"), sources, weights)


@settings(max_examples=25, deadline=None)
@given(
    stops=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    hosts=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4),
    packing=st.booleans(),
    long_documents=st.sampled_from(["split", "truncate"]),
    length=st.sampled_from([7, 64, 500]),
    threads=st.sampled_from([1, 3]),
)
def test_a_mixture_stopped_anywhere_and_resumed_on_other_hosts_goes_on(
    config, list_source, words, stops, hosts, packing, long_documents, length, threads
):
    keys = {"packing": packing, "long_documents": long_documents, "max_target_length": length}
    data = mixed(list_source, words, length)
    whole = joined(config(**keys), data, hosts[0], sum(stops))
    resumed, position = [], None
    for steps, count in zip(stops, hosts[1:], strict=False):
        resumed += joined(config(**keys, data_threads=threads), data, count, steps, len(resumed) * B, position)
        position = resumed[-1]["data_position"]
    assert_same(resumed, whole)


def test_documents_of_a_mixture_come_once_an_epoch_by_their_streams_ordinals(
    config, list_source, words, stream_documents
):
    settings = config(max_target_length=50)
    data = mixed(list_source, words, 50, weights=(1, 1, 1))
    batches = joined(settings, data, 2, 900)
    mixture = Mixture(data.weights)
    of_source = [[] for _ in data.sources]  # the rows of each stream and source, in order
    for k, batch in enumerate(batches):
        for row in range(B):
            source, _ = mixture.assign(k * B + row, B, settings.data.data_shuffle_seed)
            of_source[source].append((row, {name: array[row] for name, array in batch.items()}))
    for source, texts in enumerate([words, [f"grouped {word}" for word in words[:30]]]):
        finished = {}
        for stream in range(B):
            mine = [content for row, content in of_source[source] if row == stream]
            stacked = {name: np.stack([content[name] for content in mine]) for name in mine[0]}
            for k, ids in enumerate(stream_documents(stacked)):
                finished[stream + k * B] = TOKENIZER.decode(ids)
        for epoch in range(3):
            assert Counter(finished[epoch * len(texts) + n] for n in range(len(texts))) == Counter(texts)
    rows = [int(content["tokens"][0]) for _, content in of_source[2]]
    # Ten epochs of 17 rows; within a step rows are assigned at random, so one may be of the epoch before or after.
    first_epochs = Counter(rows[: 17 * 10])
    assert max(first_epochs.values()) <= 11
    assert min(first_epochs.values()) >= 9
    assert len(first_epochs) == 17


@pytest.mark.parametrize("keys", [{}, {"packing": False, "long_documents": "truncate"}])
def test_what_needs_no_state_goes_to_any_step_without_the_ones_before(config, list_source, words, keys):
    settings = config(**keys)
    source = Rows(10**8, 64) if not keys else list_source(words)
    far = 10**9
    (batch,) = joined(settings, source, 2, 1, far)
    (again,) = joined(settings, source, 4, 1, far)
    assert_same([batch], [again])
    if not keys:
        everything = joined(settings, Rows(40, 64), 1, 5)
        assert sorted(int(row[0]) for batch in everything for row in batch["tokens"]) == list(range(40))
    else:
        steps = 5 * len(words) // B
        from_the_start = joined(settings, source, 1, steps + 1)
        assert_same(joined(settings, source, 1, 1, steps * B), from_the_start[steps:])


def test_truncated_documents_are_rows_of_their_beginnings(config, list_source, words):
    settings = config(packing=False, long_documents="truncate", max_target_length=20)
    batches = joined(settings, list_source(words), 1, len(words) // B)
    found = Counter(
        tuple(row[mask == 1])
        for batch in batches
        for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)
    )
    assert found == Counter(tuple(TOKENIZER.encode(word)[:-1][:20]) for word in words)


@pytest.mark.parametrize("source_of", [lambda make, words: make(words), lambda make, words: Rows(37, 64)])
def test_rolling_evaluations_go_on_where_the_last_one_ended(config, list_source, words, source_of):
    settings = config(eval_mode="rolling")
    source = source_of(list_source, words)
    stream = joined(config(data_shuffle_seed=3), source, 1, 12)
    for batch in stream:
        del batch["data_position"]
    rolling = eval_batches(settings, held_out(source, 3), TOKENIZER, range(B), B)
    assert_same(list(rolling) + list(rolling), stream[:6])
    position = json.loads(json.dumps(rolling.position()))
    resumed = [eval_batches(settings, held_out(source, 3), TOKENIZER, rows, B, position) for rows in hosts_of(2)]
    halves = [list(part) + list(part) for part in resumed]
    joined_halves = [
        {name: np.concatenate([half[k][name] for half in halves]) for name in halves[0][k]} for k in range(6)
    ]
    assert_same(joined_halves, stream[6:])
    reset = eval_batches(config(), held_out(source, 3), TOKENIZER, range(B), B)
    assert_same(list(reset) + list(reset), stream[:3] + stream[:3])


def test_a_rolling_evaluation_of_another_batch_goes_on_after_as_many_documents(config, list_source, words):
    settings = config(eval_mode="rolling")
    rolling = eval_batches(settings, held_out(list_source(words), 12), TOKENIZER, range(B), B)
    list(rolling)
    position = rolling.position()
    taken = sum(documents for documents, _ in position["lanes"])
    wider = eval_batches(settings, held_out(list_source(words), 12), TOKENIZER, range(2 * B), 2 * B, position)
    assert taken > B
    assert [documents for documents, _ in wider.position()["lanes"]] == [
        len(range(n, taken, 2 * B)) for n in range(2 * B)
    ]
    assert wider.position()["rows_taken"] == 12 * B


def test_one_epoch_of_rows_ends_with_the_last(config):
    batches = list(eval_batches(config(), held_out(Rows(19, 64)), TOKENIZER, range(B), B))
    assert len(batches) == 3
    seen = [
        int(row[0])
        for batch in batches
        for row, mask in zip(batch["tokens"], batch["loss_mask"], strict=True)
        if mask.any()
    ]
    assert sorted(seen) == list(range(19))


def test_a_batch_size_may_change_without_documents_coming_again(config, list_source, words):
    """After n documents the streams of another number of rows go on with documents n, n + 1, ..."""
    taken = np.array([[3, 20], [2, 0], [4, 1]], np.int32)  # nine documents by three lanes
    moved = remap_position(taken, 4)
    assert moved.tolist() == [[3, 0], [2, 0], [2, 0], [2, 0]]
    assert sorted(row + 4 * k for row in range(4) for k in range(moved[row, 0])) == list(range(9))


def test_synthetic_data_resume_too_and_fill_every_row(config):
    settings = config(dataset_type="synthetic")
    source = SyntheticSource(
        settings.model.vocab_size, settings.batch.max_target_length, settings.data.data_shuffle_seed
    )
    whole = joined(settings, source, 1, 6)
    resumed = joined(settings, source, 2, 3)
    assert_same(resumed + joined(settings, source, 4, 3, 3 * B, resumed[-1]["data_position"]), whole)
    for batch in whole:
        assert (batch["loss_mask"] == 1).all()
        assert (batch["segment_ids"] == 1).all()
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert len({batch["tokens"].tobytes() for batch in whole}) == 6


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("length", [13, 200])
def test_every_epoch_has_each_document_once(config, list_source, words, stream_documents, packing, length):
    epochs = 3
    settings = config(packing=packing, max_target_length=length)
    batches = joined(settings, list_source(words), 1, 4000 // length * epochs)
    finished = {}  # ordinal -> text
    for row in range(B):
        for k, ids in enumerate(stream_documents(rows_of(batches, row))):
            finished[row + k * B] = TOKENIZER.decode(ids)
    orders = []
    for epoch in range(epochs):
        orders.append([finished[epoch * len(words) + n] for n in range(len(words))])
        assert Counter(orders[epoch]) == Counter(words)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != words


def test_batches_have_the_documented_shapes_and_types(config, list_source, words):
    (batch,) = take(train_batches(config(), alone(list_source(words)), TOKENIZER, range(3, 6), B), 1)
    for name in ("tokens", "targets", "segment_ids", "positions"):
        assert (batch[name].shape, batch[name].dtype) == ((3, 64), np.int32)
    assert (batch["loss_mask"].shape, batch["loss_mask"].dtype) == ((3, 64), np.float32)
    assert (batch["data_position"].shape, batch["data_position"].dtype) == ((3, 1, 2), np.int32)


def test_the_seed_changes_the_order(config, list_source, words):
    first, second = (joined(config(data_shuffle_seed=seed), list_source(words), 1, 1) for seed in (1, 2))
    assert (first[0]["tokens"] != second[0]["tokens"]).any()


def test_documents_without_text_are_passed_over(config, list_source, stream_documents):
    source = list_source(["", "a" * 100, "", "b" * 100, *[""] * 4])
    batches = joined(config(), source, 1, 20)
    seen = Counter(TOKENIZER.decode(ids) for row in range(B) for ids in stream_documents(rows_of(batches, row)))
    assert seen.keys() == {"a" * 100, "b" * 100}


def test_a_host_reads_only_its_own_documents(config, list_source, words):
    sources = [list_source(words) for _ in range(2)]
    for source, rows in zip(sources, hosts_of(2), strict=True):
        batches = train_batches(config(max_target_length=2000), alone(source), TOKENIZER, rows, B)
        source.read.clear()  # what was read to see that the data fill a row
        take(batches, 1)
    first_epoch = [source.read[:4] for source in sources]  # each stream's first document
    assert not set(first_epoch[0]) & set(first_epoch[1])


def test_data_that_do_not_fill_one_row_are_an_error(config, list_source):
    settings = config(max_target_length=64)
    enough = list_source(["x" * 31, "", "y" * 31])  # 32 pairs each: bos to x, ..., y to eos
    take(train_batches(settings, alone(enough), TOKENIZER, range(B), B), 2)
    with pytest.raises(UserError, match=r"63 tokens.*max_target_length=64"):
        train_batches(settings, alone(list_source(["x" * 31, "", "y" * 30])), TOKENIZER, range(B), B)


def test_an_error_in_the_thread_is_raised_at_its_batch(config, tmp_path):
    lines = [json.dumps({"text": f"{n}" * 200}) for n in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join([*lines, '{"text": "good"}']))
    source = TextSource(str(tmp_path), 64 * 1024)
    (tmp_path / "d.jsonl").write_text("\n".join([*lines, '{"text": broken}']))  # as of data that were not all checked
    batches = train_batches(config(), alone(source), TOKENIZER, range(B), B)
    made = []
    with pytest.raises(UserError, match=r"d\.jsonl, line 41: not JSON"):
        made.extend(batches)
    assert made


def test_batches_are_made_ahead_and_threads_end_on_close(config, list_source, words):
    settings = config(max_target_length=100)
    first = joined(settings, list_source(words), 1, 1)[0]["data_position"][:, 0]
    threads = set(threading.enumerate())
    source = list_source(words)
    batches = train_batches(settings, alone(source), TOKENIZER, range(B), B)
    source.read.clear()  # what was read to see that the data fill a row
    next(batches)
    started = set(threading.enumerate()) - threads
    read_for_the_first = first[:, 0] + (first[:, 1] > 0)
    while len(source.read) <= read_for_the_first.sum():  # without being asked for a second one
        time.sleep(0.01)
    batches.close()
    assert not any(thread.is_alive() for thread in started)


def test_closing_waits_for_the_row_that_is_being_made_and_no_longer(config, list_source, words):
    gate, at_gate, documents = threading.Event(), threading.Event(), 3 * B + 1

    class Gated(list_source):
        def __getitem__(self, i):
            text = super().__getitem__(i)
            if len(self.read) >= documents:
                at_gate.set()
                gate.wait(30)
            return text

    source = Gated(words)
    settings = config(packing=False, long_documents="truncate", max_target_length=1)
    batches = train_batches(settings, alone(source), TOKENIZER, range(B), B)
    next(batches)
    assert at_gate.wait(30)
    closing = threading.Thread(target=batches.close)
    closing.start()
    closing.join(0.2)  # it waits for the row, and has said so by then
    gate.set()
    closing.join(30)
    assert len(source.read) == documents


def test_after_a_store_fails_or_batches_are_closed_nothing_more_is_read_of_it(config, list_source, words):
    class Store(list_source):
        is_remote, fails = True, False

        def __getitem__(self, i):
            time.sleep(0.002)
            if self.fails:
                raise TransientError("the store does not answer")
            return super().__getitem__(i)

    rows, source, before = 4 * 128, Store(words * 20), set(threading.enumerate())  # four times as many as its threads
    batches = train_batches(config(max_target_length=300), alone(source), TOKENIZER, range(rows), rows)
    next(batches)
    source.fails = True
    with pytest.raises(TransientError, match="the store does not answer"):
        list(batches)
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(5)  # what it was reading
    assert not any(thread.is_alive() for thread in started)

    source.fails = False
    batches = train_batches(config(max_target_length=300), alone(source), TOKENIZER, range(rows), rows)
    next(batches)
    batches.close()
    time.sleep(0.1)
    count = len(source.read)
    time.sleep(0.3)
    assert len(source.read) == count


def test_threads_need_not_keep_step(config, list_source, words):
    """A document that takes long holds up its own thread's rows, and not those of the other for some batches."""
    one_document_a_row = {"packing": False, "long_documents": "truncate"}
    settings = config(**one_document_a_row, data_threads=2)
    source = list_source(words)
    batches = train_batches(settings, alone(source), TOKENIZER, range(B), B)
    read_by, ahead, slow = Counter(), threading.Event(), []

    class Slow(list):
        def __getitem__(self, i):
            thread = threading.current_thread()
            slow.append(thread)
            read_by[thread] += 1
            if thread is slow[0]:
                assert ahead.wait(timeout=60)
            elif read_by[thread] == 3 * B // 2:  # its half of three batches
                ahead.set()
            return super().__getitem__(i)

    source.texts = Slow(source.texts)
    assert_same(take(batches, 5), joined(config(**one_document_a_row), list_source(words), 1, 5))
    assert len(read_by) == 2


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 60])
def test_one_epoch_of_evaluation_has_each_document_once(config, list_source, words, stream_documents, packing, rows):
    evaluation = eval_batches(
        config(packing=packing), held_out(list_source([*words, ""])), TOKENIZER, range(rows), rows
    )
    batches = list(evaluation)
    seen = Counter(TOKENIZER.decode(ids) for row in range(rows) for ids in stream_documents(rows_of(batches, row)))
    assert seen == Counter(words)
    assert sum(batch["loss_mask"].sum() for batch in batches) == sum(len(text.encode()) + 1 for text in words)
    assert batches[-1]["loss_mask"].any()
    assert len(batches) == evaluation.steps()


def test_every_evaluation_is_the_same_and_counts_only_once(config, list_source, words):
    source = list_source(words)
    evaluation = eval_batches(config(), held_out(source), TOKENIZER, range(B), B)
    first = list(evaluation)
    source.read.clear()
    assert_same(list(evaluation), first)
    assert len(source.read) == len(words)


def test_a_fixed_number_of_evaluation_batches_repeats_short_data(config, list_source, words):
    epoch = list(eval_batches(config(), held_out(list_source(words)), TOKENIZER, range(B), B))
    few = list(eval_batches(config(), held_out(list_source(words), 2), TOKENIZER, range(B), B))
    assert_same(few, epoch[:2])
    many = list(eval_batches(config(), held_out(list_source(words), 50), TOKENIZER, range(B), B))
    assert len(many) == 50
    assert all((batch["loss_mask"] == 1).all() for batch in many)


def test_evaluation_data_without_text_or_end_are_an_error(config, list_source):
    with pytest.raises(UserError, match=r"no text.*eval_dataset_path"):
        eval_batches(config(), held_out(list_source(["", ""])), TOKENIZER, range(B), B)
    with pytest.raises(UserError, match="eval_steps"):
        eval_batches(config(), held_out(SyntheticSource(10, 64, 0)), None, range(B), B)


def test_data_fingerprint_names_what_differs(config, list_source, words):
    def differing(other_config=None, source=None, tokenizer=TOKENIZER, global_batch=B):
        before = data_fingerprint(config(), alone(list_source(words)), TOKENIZER, B)
        after = data_fingerprint(other_config or config(), alone(source or list_source(words)), tokenizer, global_batch)
        assert json.loads(json.dumps(after)) == after
        return {key for key in before | after if before.get(key) != after.get(key)}

    assert differing() == set()
    assert differing(config(packing=False)) == {"packing"}
    assert differing(config(max_target_length=32)) == {"max_target_length"}
    assert differing(config(data_shuffle_seed=4)) == {"data_shuffle_seed"}
    assert differing(global_batch=16) == {"global batch"}
    assert differing(source=list_source(words[1:])) == {"source documents"}
    assert "source type" in differing(source=SyntheticSource(10, 64, 0), tokenizer=None)
