import itertools
import json
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.data.loader import EvalBatches, data_fingerprint, train_batches
from src.data.sources import TrainData
from src.data.synthetic import SyntheticSource
from src.data.text import TextSource
from src.data.tokenizer import ByteTokenizer
from src.errors import UserError
from tests.data.one_source import alone, held_out

B = 8
TOKENIZER = ByteTokenizer()


def take(batches, count):
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def hosts_of(count):
    """The rows of each of `count` hosts."""
    return np.split(np.arange(B), count)


def joined(config, data, hosts, steps, rows_taken=0, position=None):
    """`steps` batches of [B, ...], from that many hosts, each of which makes its own rows alone."""
    if not isinstance(data, TrainData):
        data = alone(data)
    parts = []
    for rows in hosts_of(hosts):
        here = None if position is None else position[rows]
        parts.append(take(train_batches(config, data, TOKENIZER, rows, B, rows_taken, here), steps))
    return [{name: np.concatenate([part[k][name] for part in parts]) for name in parts[0][k]} for k in range(steps)]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype
            assert batch[name].tobytes() == other[name].tobytes(), name


def rows_of(batches, row):
    return {name: np.stack([batch[name][row] for batch in batches]) for name in batches[0]}


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


def test_synthetic_data_resume_too_and_fill_every_row(config):
    settings = config(dataset_type="synthetic")
    source = SyntheticSource(settings.vocab_size, settings.max_target_length, settings.data_shuffle_seed)
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
def test_every_epoch_has_each_document_once(config, list_source, words, lane_documents, packing, length):
    epochs = 3
    settings = config(packing=packing, max_target_length=length)
    batches = joined(settings, list_source(words), 1, 4000 // length * epochs)
    finished = {}  # ordinal -> text
    for row in range(B):
        for k, ids in enumerate(lane_documents(rows_of(batches, row))):
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


def test_documents_without_text_are_passed_over(config, list_source, lane_documents):
    source = list_source(["", "a" * 100, "", "b" * 100, ""])
    batches = joined(config(), source, 1, 20)
    seen = Counter(TOKENIZER.decode(ids) for row in range(B) for ids in lane_documents(rows_of(batches, row)))
    assert seen.keys() == {"a" * 100, "b" * 100}


def test_a_host_reads_only_its_own_documents(config, list_source, words):
    sources = [list_source(words) for _ in range(2)]
    for source, rows in zip(sources, hosts_of(2), strict=True):
        batches = train_batches(config(max_target_length=2000), alone(source), TOKENIZER, rows, B)
        source.read.clear()  # what was read to see that the data fill a row
        take(batches, 1)
    first_epoch = [source.read[:4] for source in sources]  # each lane's first document
    assert not set(first_epoch[0]) & set(first_epoch[1])


def test_data_that_do_not_fill_one_row_are_an_error(config, list_source):
    settings = config(max_target_length=64)
    enough = list_source(["x" * 31, "", "y" * 31])  # 32 pairs each: bos to x, ..., y to eos
    take(train_batches(settings, alone(enough), TOKENIZER, range(B), B), 2)
    with pytest.raises(UserError, match=r"63 tokens.*max_target_length=64"):
        train_batches(settings, alone(list_source(["x" * 31, "", "y" * 30])), TOKENIZER, range(B), B)


def test_an_error_in_the_thread_is_raised_at_its_batch(config, tmp_path):
    lines = [json.dumps({"text": f"{n}" * 200}) for n in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join([*lines, '{"text": broken}']))
    batches = train_batches(config(), alone(TextSource(str(tmp_path), 64 * 1024)), TOKENIZER, range(B), B)
    made = []
    with pytest.raises(UserError, match=r"d\.jsonl, line 41: not JSON"):
        made.extend(batches)
    assert made


def test_batches_are_made_ahead_and_the_thread_ends_on_close(config, list_source, words):
    settings = config(max_target_length=100)
    first = joined(settings, list_source(words), 1, 1)[0]["data_position"][:, 0]
    threads = set(threading.enumerate())
    source = list_source(words)
    batches = train_batches(settings, alone(source), TOKENIZER, range(B), B)
    source.read.clear()  # what was read to see that the data fill a row
    next(batches)
    (thread,) = set(threading.enumerate()) - threads
    batches.close()
    assert not thread.is_alive()
    read_for_the_first = first[:, 0] + (first[:, 1] > 0)
    assert len(source.read) > read_for_the_first.sum()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 60])
def test_one_epoch_of_evaluation_has_each_document_once(config, list_source, words, lane_documents, packing, rows):
    evaluation = EvalBatches(config(packing=packing), held_out(list_source([*words, ""])), TOKENIZER, range(rows), rows)
    batches = list(evaluation)
    seen = Counter(TOKENIZER.decode(ids) for row in range(rows) for ids in lane_documents(rows_of(batches, row)))
    assert seen == Counter(words)
    assert sum(batch["loss_mask"].sum() for batch in batches) == sum(len(text.encode()) + 1 for text in words)
    assert batches[-1]["loss_mask"].any()
    assert len(batches) == evaluation.steps()


def test_every_evaluation_is_the_same_and_counts_only_once(config, list_source, words):
    source = list_source(words)
    evaluation = EvalBatches(config(), held_out(source), TOKENIZER, range(B), B)
    first = list(evaluation)
    source.read.clear()
    assert_same(list(evaluation), first)
    assert len(source.read) == len(words)


def test_a_fixed_number_of_evaluation_batches_repeats_short_data(config, list_source, words):
    epoch = list(EvalBatches(config(), held_out(list_source(words)), TOKENIZER, range(B), B))
    few = list(EvalBatches(config(), held_out(list_source(words), 2), TOKENIZER, range(B), B))
    assert_same(few, epoch[:2])
    many = list(EvalBatches(config(), held_out(list_source(words), 50), TOKENIZER, range(B), B))
    assert len(many) == 50
    assert all((batch["loss_mask"] == 1).all() for batch in many)


def test_evaluation_data_without_text_or_end_are_an_error(config, list_source):
    with pytest.raises(UserError, match=r"no text.*eval_dataset_path"):
        EvalBatches(config(), held_out(list_source(["", ""])), TOKENIZER, range(B), B)
    with pytest.raises(UserError, match="eval_steps"):
        EvalBatches(config(), held_out(SyntheticSource(10, 64, 0)), None, range(B), B)


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
