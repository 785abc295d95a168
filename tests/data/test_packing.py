import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from src.data.packing import Document, Lane, empty_batch, rows_needed
from src.errors import UserError

FAR = 1000

sizes_strategy = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) >= 2)


def consecutive(sizes):
    """Endless documents whose ids tell where they are from: document n has n * FAR, n * FAR + 1, ..."""
    return lambda n: Document(np.arange(sizes[n % len(sizes)], dtype=np.int32) + n * FAR)


def read(lane, rows, length):
    batch = empty_batch(rows, length)
    for row in range(rows):
        lane.fill(batch, row)
    return batch


def expected_pairs(sizes, first, stride):
    """The lane's tokens, each of whose targets is the next number."""
    return [n * FAR + k for n in range(first, len(sizes), stride) for k in range(sizes[n] - 1)]


@given(sizes_strategy, st.integers(1, 4), st.integers(1, 20), st.booleans())
def test_each_transition_of_each_document_is_predicted_once_and_in_order(sizes, stride, length, packing):
    for first in range(stride):
        lane = Lane(consecutive(sizes), first, stride, packing, end=len(sizes))
        batch = read(lane, rows_needed(sizes[first::stride], length, packing) + 1, length)
        real = batch["loss_mask"] == 1
        assert batch["tokens"][real].tolist() == expected_pairs(sizes, first, stride)
        assert (batch["targets"][real] == batch["tokens"][real] + 1).all()
        assert not real[-1].any()  # so rows_needed left no row out


@given(sizes_strategy, st.integers(1, 20), st.booleans())
def test_what_counts_of_a_document_counts_wherever_it_lies(sizes, length, packing):
    def documents(n):
        ids = consecutive(sizes)(n).ids
        return Document(ids, ids % 3 == 0) if n % 2 else Document(ids)

    batch = read(Lane(documents, 0, 1, packing, end=len(sizes)), rows_needed(sizes, length, packing), length)
    targets, document = batch["targets"], batch["tokens"] // FAR
    counts = (targets % 3 == 0) | (document % 2 == 0)
    assert (batch["loss_mask"] == np.where(batch["segment_ids"] > 0, counts, 0)).all()


@given(sizes_strategy, st.integers(1, 20), st.booleans())
def test_a_segment_is_a_run_of_one_document(sizes, length, packing):
    batch = read(Lane(consecutive(sizes), 0, 1, packing, end=len(sizes)), 12, length)
    for tokens, segments, positions, mask in zip(
        batch["tokens"], batch["segment_ids"], batch["positions"], batch["loss_mask"], strict=True
    ):
        assert ((segments > 0) == (mask == 1)).all()
        assert (segments[mask == 0] == 0).all()
        assert (np.sort(segments[mask == 1]) == segments[mask == 1]).all()
        names = sorted(set(segments[mask == 1].tolist()))
        assert names == list(range(1, len(names) + 1))
        assert len(names) <= (length if packing else 1)
        documents = []
        for name in names:
            here = segments == name
            assert positions[here].tolist() == list(range(here.sum()))
            assert (np.diff(tokens[here]) == 1).all()
            documents.append(tokens[here][0] // FAR)
        assert len(set(documents)) == len(documents)


@given(sizes_strategy, st.integers(1, 20), st.integers(0, 12))
def test_packed_rows_are_full_until_the_last(sizes, length, rows):
    mask = read(Lane(consecutive(sizes), 0, 1, True, end=len(sizes)), rows, length)["loss_mask"]
    total = len(expected_pairs(sizes, 0, 1))
    assert mask.sum(axis=1).tolist() == [min(max(total - row * length, 0), length) for row in range(rows)]


@given(sizes_strategy, st.integers(1, 20), st.booleans(), st.integers(0, 6))
def test_a_lane_goes_on_from_its_position(sizes, length, packing, stop):
    assume(max(sizes[k % len(sizes)] for k in range(1, 3 * len(sizes), 3)) >= 2)  # or the lane has nothing, forever
    lane = Lane(consecutive(sizes), 1, 3, packing)
    whole = read(lane, 9, length)
    first = Lane(consecutive(sizes), 1, 3, packing)
    read(first, stop, length)
    second = Lane(consecutive(sizes), 1, 3, packing, position=np.array(first.position, np.int32))
    rest = read(second, 9 - stop, length)
    for name in whole:
        assert (whole[name][stop:] == rest[name]).all()
    assert second.position == lane.position


def test_without_packing_a_row_is_one_document_or_a_part_of_one():
    batch = read(Lane(consecutive([4, 1, 9]), 0, 1, False, end=3), 4, 5)
    assert batch["tokens"].tolist() == [
        [0, 1, 2, 0, 0],
        [2000, 2001, 2002, 2003, 2004],
        [2005, 2006, 2007, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 0, 0], [0] * 5]


def test_a_packed_row():
    batch = read(Lane(consecutive([3, 0, 2, 9]), 0, 1, True, end=4), 1, 6)
    assert {name: array[0].tolist() for name, array in batch.items()} == {
        "tokens": [0, 1, 2000, 3000, 3001, 3002],
        "targets": [1, 2, 2001, 3001, 3002, 3003],
        "segment_ids": [1, 1, 2, 3, 3, 3],
        "positions": [0, 1, 0, 0, 1, 2],
        "loss_mask": [1, 1, 1, 1, 1, 1],
    }


@pytest.mark.parametrize("packing", [True, False])
def test_position_is_documents_taken_and_pairs_of_the_next(packing):
    lane = Lane(consecutive([3, 8, 8]), 0, 1, packing, end=math.inf)
    batch = empty_batch(2, 4)
    lane.fill(batch, 0)
    assert lane.position == ((1, 2) if packing else (1, 0))
    lane.fill(batch, 1)
    assert lane.position == ((1, 6) if packing else (1, 4))


def test_a_source_that_comes_to_have_no_text_is_an_error_and_not_a_wait_without_end():
    texts = [[1, 2, 3]] * 3
    lane = Lane(lambda n: Document(np.array(texts[n] if n < 3 else [], np.int32)), 0, 1, packing=True)
    batch = empty_batch(2, 4)
    lane.fill(batch, 0)
    with pytest.raises(UserError, match="the last 10,001 documents that a row read have no text"):
        lane.fill(batch, 1)
