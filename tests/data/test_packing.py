import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from src.data.eval_batches import rows_needed
from src.data.packing import PackingStream, concatenate, empty_batch, one_per_row
from src.data.stream_positions import documents_consumed, remap_position
from src.data.types import Document
from src.extras.conversation_packing import WINDOW, best_fit
from src.system.errors import UserError

FAR = 1000

CUTS = st.sampled_from([concatenate, one_per_row])
sizes_strategy = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) >= 2)


def consecutive(sizes):
    """Endless documents whose ids tell where they are from: document n has n * FAR, n * FAR + 1, ..."""
    return lambda n: [Document(np.arange(sizes[n % len(sizes)], dtype=np.int32) + n * FAR)]


def read(stream, rows, length):
    batch = empty_batch(rows, length)
    for row in range(rows):
        stream.fill(batch, row)
    return batch


def expected_pairs(sizes, first, stride):
    """The stream's tokens, each of whose targets is the next number."""
    return [n * FAR + k for n in range(first, len(sizes), stride) for k in range(sizes[n] - 1)]


@given(sizes_strategy, st.integers(1, 4), st.integers(1, 20), CUTS)
def test_each_transition_of_each_document_is_predicted_once_and_in_order(sizes, stride, length, layout):
    for first in range(stride):
        stream = PackingStream(consecutive(sizes), first, stride, layout, end=len(sizes))
        batch = read(stream, rows_needed([[size] for size in sizes[first::stride]], length, layout) + 1, length)
        real = batch["loss_mask"] == 1
        assert batch["tokens"][real].tolist() == expected_pairs(sizes, first, stride)
        assert (batch["targets"][real] == batch["tokens"][real] + 1).all()
        assert not real[-1].any()  # so rows_needed left no row out


@given(sizes_strategy, st.integers(1, 20), CUTS)
def test_what_counts_of_a_document_counts_wherever_it_lies(sizes, length, layout):
    def documents(n):
        ids = consecutive(sizes)(n)[0].ids
        return [Document(ids, ids % 3 == 0) if n % 2 else Document(ids)]

    batch = read(
        PackingStream(documents, 0, 1, layout, end=len(sizes)),
        rows_needed([[size] for size in sizes], length, layout),
        length,
    )
    targets, document = batch["targets"], batch["tokens"] // FAR
    counts = (targets % 3 == 0) | (document % 2 == 0)
    assert (batch["loss_mask"] == np.where(batch["segment_ids"] > 0, counts, 0)).all()


@given(sizes_strategy, st.integers(1, 20), CUTS)
def test_a_segment_is_a_run_of_one_document(sizes, length, layout):
    batch = read(PackingStream(consecutive(sizes), 0, 1, layout, end=len(sizes)), 12, length)
    for tokens, segments, positions, mask in zip(
        batch["tokens"], batch["segment_ids"], batch["positions"], batch["loss_mask"], strict=True
    ):
        assert ((segments > 0) == (mask == 1)).all()
        assert (segments[mask == 0] == 0).all()
        assert (np.sort(segments[mask == 1]) == segments[mask == 1]).all()
        names = sorted(set(segments[mask == 1].tolist()))
        assert names == list(range(1, len(names) + 1))
        assert len(names) <= (length if layout is concatenate else 1)
        documents = []
        for name in names:
            here = segments == name
            assert positions[here].tolist() == list(range(here.sum()))
            assert (np.diff(tokens[here]) == 1).all()
            documents.append(tokens[here][0] // FAR)
        assert len(set(documents)) == len(documents)


@given(sizes_strategy, st.integers(1, 20), st.integers(0, 12))
def test_packed_rows_are_full_until_the_last(sizes, length, rows):
    mask = read(PackingStream(consecutive(sizes), 0, 1, concatenate, end=len(sizes)), rows, length)["loss_mask"]
    total = len(expected_pairs(sizes, 0, 1))
    assert mask.sum(axis=1).tolist() == [min(max(total - row * length, 0), length) for row in range(rows)]


@given(sizes_strategy, st.integers(1, 20), st.sampled_from([concatenate, one_per_row, best_fit]), st.integers(0, 6))
def test_a_stream_goes_on_from_its_position(sizes, length, layout, stop):
    assume(max(sizes[k % len(sizes)] for k in range(1, 3 * len(sizes), 3)) >= 2)  # or the stream has nothing, forever
    stream = PackingStream(consecutive(sizes), 1, 3, layout)
    uninterrupted = read(stream, 9, length)
    first = PackingStream(consecutive(sizes), 1, 3, layout)
    read(first, stop, length)
    second = PackingStream(consecutive(sizes), 1, 3, layout, position=np.array(first.position, np.int32))
    rest = read(second, 9 - stop, length)
    for name in uninterrupted:
        assert (uninterrupted[name][stop:] == rest[name]).all()
    assert second.position == stream.position


def test_without_packing_a_row_is_one_document_or_a_part_of_one():
    batch = read(PackingStream(consecutive([4, 1, 9]), 0, 1, one_per_row, end=3), 4, 5)
    assert batch["tokens"].tolist() == [
        [0, 1, 2, 0, 0],
        [2000, 2001, 2002, 2003, 2004],
        [2005, 2006, 2007, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [0] * 5]


def test_a_packed_row():
    batch = read(PackingStream(consecutive([3, 0, 2, 9]), 0, 1, concatenate, end=4), 1, 6)
    assert {name: array[0].tolist() for name, array in batch.items()} == {
        "tokens": [0, 1, 2000, 3000, 3001, 3002],
        "targets": [1, 2, 2001, 3001, 3002, 3003],
        "segment_ids": [1, 1, 2, 3, 3, 3],
        "positions": [0, 1, 0, 0, 1, 2],
        "loss_mask": [1, 1, 1, 1, 1, 1],
    }


@pytest.mark.parametrize("layout", [concatenate, one_per_row])
def test_position_is_documents_taken_and_pairs_of_the_next(layout):
    stream = PackingStream(consecutive([3, 8, 8]), 0, 1, layout, end=math.inf)
    batch = empty_batch(2, 4)
    stream.fill(batch, 0)
    assert stream.position == ((1, 2) if layout is concatenate else (1, 0))
    stream.fill(batch, 1)
    assert stream.position == ((1, 6) if layout is concatenate else (1, 4))


@pytest.mark.parametrize("layout", [concatenate, best_fit])
def test_a_source_that_comes_to_have_no_text_is_an_error_and_not_a_wait_without_end(layout):
    texts = [[1, 2, 3]] * 3
    stream = PackingStream(lambda n: [Document(np.array(texts[n] if n < 3 else [], np.int32))], 0, 1, layout)
    batch = empty_batch(2, 4)
    stream.fill(batch, 0)
    with pytest.raises(UserError, match="the last 10,001 documents that a row read have no text"):
        stream.fill(batch, 1)


# ---- Rows that cut no item that fits

items_strategy = st.lists(
    st.one_of(st.lists(st.integers(2, 12), min_size=1, max_size=1), st.lists(st.integers(0, 30), max_size=4)),
    min_size=1,
    max_size=60,
).filter(lambda items: any(size > 1 for item in items for size in item))


def several(items):
    """Endless items; id k of document d of item n is (n * 10 + d) * FAR + k."""
    return lambda n: [
        Document(np.arange(size, dtype=np.int32) + (n * 10 + d) * FAR) for d, size in enumerate(items[n % len(items)])
    ]


def segments_of(batch, row):
    """(item, document, first pair, pairs) of each segment of a row."""
    found = []
    for name in range(1, batch["segment_ids"][row].max() + 1):
        tokens = batch["tokens"][row][batch["segment_ids"][row] == name]
        assert (np.diff(tokens) == 1).all()
        assert (batch["targets"][row][batch["segment_ids"][row] == name] == tokens + 1).all()
        assert batch["positions"][row][batch["segment_ids"][row] == name].tolist() == list(range(len(tokens)))
        document, first = divmod(int(tokens[0]), FAR)
        found.append((*divmod(document, 10), first, len(tokens)))
    return found


@given(items_strategy, st.integers(3, 24), st.integers(1, 3))
def test_what_fits_a_row_is_whole_in_one_and_each_pair_comes_once(items, length, stride):
    for first in range(stride):
        mine = items[first::stride]
        rows = rows_needed(mine, length, best_fit)
        batch = read(PackingStream(several(items), first, stride, best_fit, end=len(items)), rows + 1, length)
        assert not batch["segment_ids"][rows].any()
        assert (batch["segment_ids"][:rows, 0] == 1).all()  # so rows_needed counts none that is empty
        where, pieces = {}, {}
        for row in range(rows):
            for item, document, begin, pairs in segments_of(batch, row):
                where.setdefault(item, set()).add(row)
                pieces.setdefault((item, document), []).append((begin, pairs))
        for n in range(first, len(items), stride):
            fits = sum(max(size - 1, 0) for size in items[n]) <= length
            if fits:
                assert len(where.get(n, ())) <= 1
            for d, size in enumerate(items[n]):
                found = pieces.pop((n, d), [])
                assert sum(pairs for _, pairs in found) == max(size - 1, 0)
                assert [begin for begin, _ in found] == list(range(0, max(size - 1, 0), length))
        assert not pieces


@given(items_strategy, st.integers(3, 24), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_such_a_stream_goes_on_from_its_position_wherever_it_stopped(items, length, stops):
    whole_run = read(PackingStream(several(items), 0, 1, best_fit), sum(stops) + 6, length)
    position, parts = (0, 0), []
    for rows in [*stops, 6]:
        stream = PackingStream(several(items), 0, 1, best_fit, np.array(position, np.int32))
        parts.append(read(stream, rows, length))
        position = stream.position
        assert np.array(position, np.int32).tolist() == list(position)
    for name in whole_run:
        assert (np.concatenate([part[name] for part in parts]) == whole_run[name]).all()


def test_a_document_is_read_once():
    items, found = several([[n % 7 + 2] for n in range(50)] + [[40]]), []
    stream = PackingStream(lambda n: found.append(n) or items(n), 0, 1, best_fit)
    read(stream, 40, 12)
    assert found == list(range(len(found)))


def test_a_row_takes_the_oldest_item_then_the_longest_that_fits():
    # Pairs: 6, 3, 5, 4, 2, 1. T = 10.
    batch = read(PackingStream(consecutive([7, 4, 6, 5, 3, 2]), 0, 1, best_fit, end=6), 3, 10)
    assert (batch["tokens"][0] // FAR).tolist() == [0] * 6 + [3] * 4
    assert (batch["tokens"][1] // FAR).tolist() == [1] * 3 + [2] * 5 + [4] * 2
    assert batch["segment_ids"][2].tolist() == [1] + [0] * 9


def test_a_position_of_a_stream_that_cut_documents_goes_on_at_the_same_pair():
    sizes = [9, 9, 30, 4]
    old = PackingStream(consecutive(sizes), 0, 1, concatenate)
    read(old, 2, 6)  # 12 pairs: a document of 8, and 4 of the next one
    assert old.position == (1, 4)
    batch = read(PackingStream(consecutive(sizes), 0, 1, best_fit, old.position), 1, 6)
    assert batch["tokens"][0].tolist()[:4] == [FAR + k for k in range(4, 8)]
    # And of one in the other layouts what stands out of order comes again.
    stream = PackingStream(consecutive([7, 3, 8, 5]), 0, 1, best_fit)
    read(stream, 1, 10)
    assert stream.position == (1, -2)
    assert (
        read(PackingStream(consecutive([7, 3, 8, 5]), 0, 1, concatenate, stream.position), 1, 10)["tokens"][0][0] == FAR
    )
    assert documents_consumed(np.array([stream.position, (5, 3)], np.int32)).tolist() == [2, 5]
    assert remap_position(np.array([stream.position, (5, 3)], np.int32), 2).tolist() == [[4, 0], [3, 0]]


def first_fit(sizes, length):
    """How many rows first fit needs, which looks at all rows for each item and may go on with any of them for good."""
    rows = []
    for size in sizes:
        at = next((n for n, room in enumerate(rows) if room >= size), None)
        if at is None:
            rows.append(length - size)
        else:
            rows[at] -= size
    return len(rows)


@pytest.mark.parametrize("mean", [150, 400, 900])
def test_rows_are_about_as_full_as_first_fit_makes_them(mean):
    length, rng = 2048, np.random.default_rng(mean)
    sizes = np.clip(rng.lognormal(np.log(mean), 0.7, 2000), 2, length + 1).astype(int).tolist()
    least = sum(size - 1 for size in sizes) / length
    mine = least / rows_needed([[size] for size in sizes], length, best_fit)
    unbounded = least / first_fit([size - 1 for size in sizes], length)
    print(f"mean {mean}: filled {mine:.2%}, first fit over all rows {unbounded:.2%}, looking {WINDOW} ahead")
    assert mine > unbounded - 0.03


def test_what_a_position_cannot_count_is_an_error():
    sizes = [(1,), (10_000,), (1,)]  # the last one is placed before the second, which takes 5,000 rows
    pieces, position = best_fit(lambda n: sizes[n] if n < 3 else None, (0, 0), 2)
    assert ([item for item, *_ in pieces], position) == ([0, 2], (1, -1))
    position = (1, position[1] - (4094 << WINDOW - 1))
    pieces, position = best_fit(lambda n: sizes[n] if n < 3 else None, position, 2)
    assert [piece[2:] for piece in pieces] == [(2 * 4094, 2)]
    assert position == (1, -(4095 << WINDOW - 1 | 1))
    with pytest.raises(UserError, match=r"more than 4,095 rows of max_target_length=2"):
        best_fit(lambda n: sizes[n] if n < 3 else None, position, 2)


@pytest.mark.parametrize("layout", [concatenate, one_per_row, best_fit])
def test_a_position_within_a_document_that_is_now_shorter_goes_on_with_the_next(layout):
    sizes = [[3], [4], [2]]
    pieces, position = layout(lambda item: sizes[item] if item < len(sizes) else None, (0, 40), 9)
    assert all(pairs > 0 for *_, pairs in pieces)
    assert pieces[0][:2] == (1, 0)
    assert position[0] >= 1
