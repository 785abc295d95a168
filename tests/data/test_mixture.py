import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.config.dataset_spec import whole_numbers
from src.data.mixture import Mixture
from src.system.errors import UserError

WEIGHTS = st.lists(st.one_of(st.integers(0, 60), st.sampled_from([0.1, 0.25, 0.335])), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS.filter(any))
def test_of_any_first_rows_each_source_has_its_share_to_within_one(weights):
    mixture = Mixture(weights)
    shares = [Fraction(str(weight)) / sum(Fraction(str(weight)) for weight in weights) for weight in weights]
    counts = [0] * len(weights)
    for row in range(500):
        source, before = mixture.at(row)
        assert before == counts[source]  # so that rows of a source are numbered without a gap
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (row + 1) * share) < 1


def test_a_row_far_into_the_run_is_computed_as_the_first_ones_are():
    mixture = Mixture([7, 2, 1])
    first = [mixture.at(row) for row in range(10)]
    far = 10**15
    assert [mixture.at(10 * far + row) for row in range(10)] == [
        (source, [7, 2, 1][source] * far + before) for source, before in first
    ]


@settings(max_examples=40, deadline=None)
@given(WEIGHTS.filter(any), st.integers(1, 40), st.integers(0, 10**6))
def test_rows_of_a_batch_are_assigned_out_all_once(weights, global_batch, step):
    mixture, rows = Mixture(weights), range(step * global_batch, (step + 1) * global_batch)
    assigned = [mixture.assign(row, global_batch, seed=1) for row in rows]
    assert sorted(assigned) == sorted(map(mixture.at, rows))


def test_each_row_of_the_batch_gets_every_source_although_period_and_batch_have_a_common_divisor():
    mixture = Mixture([1, 1])
    steps = 400
    counts = sum(np.array([mixture.assign(8 * k + row, 8, 0)[0] for row in range(8)]) for k in range(steps))
    deviation = math.sqrt(steps) / 2
    assert (abs(counts - steps / 2) < 5 * deviation).all()
    assert (counts > 0).all()


def test_weights_are_read_by_their_digits():
    assert whole_numbers([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_numbers([3, 6.0]) == [1, 2]
    assert whole_numbers([1e-3, 0.999]) == [1, 999]


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1, -2], "none below 0"), ([0, 0.0], "one above"), ([0.1234567, 0.8765433], "fewer digits")],
)
def test_weights_that_make_no_mixture(weights, message):
    with pytest.raises(UserError, match=message):
        Mixture(weights)
