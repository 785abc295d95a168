"""Batches that grow: their sizes, and that their rows are those of batches of one size, in the same order."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from src.config.schema import BatchKeys
from src.data.batch_schedule import BatchSchedule
from src.data.loader import train_batches
from src.data.types import DataPosition, Document
from tests.data.batches import TOKENIZER, B, joined
from tests.data.one_source import alone, inputs
from tests.data.test_loader import mixed

# 3 batches of 2 rows, 2 of 4, 1 of 6, then of 8: 20 rows before those.
RAMP = ((2, 3), (4, 2), (6, 1))
SIZES = [2, 2, 2, 4, 4, 6, *[8] * 7]


def schedule_of(full, start, increment, samples, devices=1):
    keys = BatchKeys(
        per_device_batch_size=full,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=start,
        per_device_batch_size_increment=increment,
        global_rampup_samples=samples,
    )
    return BatchSchedule.of(keys, lambda rows, key: round(rows * devices))


# ---- Sizes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 2000), st.sampled_from([1, 4, 64]))
def test_sizes_are_those_of_maxtext_which_adds_up_samples_until_the_next_is_due(
    start, increment, count, samples, devices
):
    full = start + count * increment
    schedule = schedule_of(full, start, increment, samples, devices)
    size, since, taken = start * devices, 0, 0
    for step in range(300):
        assert (schedule.size(step), schedule.rows_before(step)) == (size, taken)
        taken, since = taken + size, since + size
        if since >= samples / count:  # RampupBatchManager.update in MaxText's rampup_batch.py, of August 2026
            size, since = min(size + increment * devices, full * devices), 0


def test_a_ramp_written_out_by_hand():
    schedule = schedule_of(8, 2, 2, 18)
    assert schedule.ramp == RAMP
    assert [schedule.size(step) for step in range(13)] == SIZES
    assert [schedule.rows_before(step) for step in (0, 1, 3, 5, 6, 8)] == [0, 2, 6, 14, 20, 36]
    assert [step for step in range(13) if schedule.changes_at(step)] == [3, 5, 6]
    text = "2 rows to step 3, 4 rows to step 5, 6 rows to step 6, 8 from step 7 on, after 20 rows"
    assert schedule.describe(13) == text
    assert schedule.describe(6) == text + ", which this run does not reach"


def test_a_ramp_of_95_sizes_names_the_first():
    schedule = schedule_of(1536, 16, 16, 4_000_000)
    assert len(schedule.ramp) == 95
    assert schedule.ramp[0] == (16, 2632)  # 4,000,000 / 95 / 16 = 2,631.6
    assert schedule.describe(10**6).startswith("16 rows to step 2,632, 32 rows to step 3,948, ")


def test_without_a_ramp_every_batch_is_full():
    schedule = BatchSchedule(8)
    assert (schedule.size(0), schedule.rows_before(5), schedule.fingerprint()) == (8, 40, {})
    assert not any(map(schedule.changes_at, range(9)))


# ---- Rows


class Numbers:
    """Endless rows, the n-th of which has the number n alone."""

    row_count = None

    def row(self, i):
        return [Document(np.full(8, i, np.int32))]

    def fingerprint(self):
        return {}


def ramped(config, data, hosts, shards, steps, position=None):
    """(rows by their number in the run, streams' positions after them) of so many hosts, which have shards each."""
    schedule = BatchSchedule(B, RAMP, shards)
    taken, found, positions = sum(SIZES[: steps[0]]), {}, None
    for part in np.split(schedule.streams(), hosts):
        start = DataPosition(position, taken)
        batches = train_batches(inputs(config, TOKENIZER), data, part, B, start, schedule, steps[0])
        for step, batch in zip(steps, batches, strict=False):
            first = sum(SIZES[:step])
            in_batch = np.arange(first, first + SIZES[step])
            by_shard = [number for shard in range(shards) for number in in_batch if number % shards == shard]
            for index, row in enumerate(batch.rows):
                number = by_shard[row]
                assert number not in found, "two hosts have it"
                found[number] = {name: array[index] for name, array in batch.arrays.items()}
        batches.close()
        positions = np.empty((B, *batch.stream_positions.shape[1:]), np.int32) if positions is None else positions
        positions[part] = batch.stream_positions
    return found, positions


def test_the_steps_of_a_ramp_take_rows_one_after_the_other(config):
    batches = train_batches(
        inputs(config(max_target_length=7), TOKENIZER), alone(Numbers()), range(B), B, schedule=BatchSchedule(B, RAMP)
    )
    numbers = [batch.arrays["tokens"][:, 0].tolist() for batch in itertools.islice(batches, 8)]
    batches.close()
    assert numbers[:6] == [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17, 18, 19]]
    assert numbers[6:] == [list(range(20, 28)), list(range(28, 36))]


def test_devices_have_the_rows_of_the_same_streams_at_every_size():
    schedule = BatchSchedule(8, RAMP, shards=2)
    assert schedule.streams().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    numbers, streams = schedule.batch(6, 4)
    assert numbers.tolist() == [6, 8, 7, 9]
    assert streams.tolist() == [6, 0, 7, 1]


@settings(max_examples=25, deadline=None)
@given(
    stop=st.integers(1, len(SIZES) - 1),
    meshes=st.lists(st.sampled_from([(1, 1), (1, 2), (2, 2)]), min_size=2, max_size=2),
    packing=st.booleans(),
    long_documents=st.sampled_from(["split", "truncate"]),
    threads=st.sampled_from([1, 3]),
    weights=st.sampled_from([(5, 2, 1), (1, 1, 1)]),
)
def test_a_ramp_stopped_anywhere_and_resumed_on_another_mesh_has_the_rows_of_a_run_without_one(
    config, list_source, words, stop, meshes, packing, long_documents, threads, weights
):
    keys = {"packing": packing, "long_documents": long_documents, "max_target_length": 64, "data_threads": threads}
    data, settings = mixed(list_source, words, 64, weights), config(**keys)
    rows, position = ramped(settings, data, *meshes[0], steps=range(stop))
    more, _ = ramped(settings, data, *meshes[1], steps=range(stop, len(SIZES)), position=position)
    assert sorted(rows | more) == list(range(sum(SIZES)))
    assert not rows.keys() & more.keys()
    expected = joined(settings, data, 1, -(-sum(SIZES) // B))
    for number, row in (rows | more).items():
        for name, array in row.items():
            np.testing.assert_array_equal(array, expected[number // B][name][number % B], err_msg=f"{number} {name}")
