"""Parts of sources whose items are not known one by one: the last ones are held out."""

import numpy as np
import pytest

from src.data.group_shuffle import GroupShuffle
from src.data.open import train_validation_split
from src.data.readers.text import TextSource
from src.system.errors import UserError


class Groups:
    """Items that are their numbers, stored in groups."""

    def __init__(self, sizes):
        self._sizes = np.array(sizes)

    def __len__(self):
        return int(self._sizes.sum())

    def __getitem__(self, i):
        return np.array([i])

    def document_keys(self):
        return None

    def group_sizes(self):
        return self._sizes

    def fingerprint(self):
        return {"type": "groups"}


def test_the_last_items_are_held_out_and_groups_stay_together():
    train, held_out = train_validation_split(Groups([4, 0, 5, 3]), 0.2)
    assert [int(train[i][0]) for i in range(len(train))] == list(range(10))
    assert [int(held_out[i][0]) for i in range(len(held_out))] == [10, 11]
    assert train.group_sizes().tolist() == [4, 0, 5, 1]
    assert held_out.group_sizes().tolist() == [0, 0, 0, 2]
    assert train.document_keys() is None
    order = GroupShuffle(train.group_sizes(), 1, 0)
    epoch = [order(n) for n in range(10)]
    assert sorted(epoch) == list(range(10))
    groups = [0 if i < 4 else 1 if i < 9 else 2 for i in epoch]
    assert [group for n, group in enumerate(groups) if n == 0 or group != groups[n - 1]] in (
        [a, b, c] for a in range(3) for b in range(3) for c in range(3) if len({a, b, c}) == 3
    )


@pytest.mark.parametrize(
    ("count", "fraction", "held"), [(2, 0.0, 1), (2, 0.99, 1), (1000, 0.02, 20), (10**8, 0.5, 5 * 10**7)]
)
def test_at_least_one_item_is_on_each_side(count, fraction, held):
    train, held_out = train_validation_split(Groups([count]), fraction)
    assert (len(train), len(held_out)) == (count - held, held)
    assert held_out.group_sizes().tolist() == [held]


def test_one_item_can_t_be_parted():
    with pytest.raises(UserError, match="a single uncut document"):
        train_validation_split(Groups([1]), 0.5)


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    text = "".join(f"line {n:04}\n" for n in range(2000))
    (tmp_path / "input.txt").write_text(text)
    train, held_out = train_validation_split(TextSource(str(tmp_path / "input.txt"), 256), 0.1)
    parts = ["".join(part[i] for i in range(len(part))) for part in (train, held_out)]
    assert "".join(parts) == text
    assert len(parts[1]) == pytest.approx(0.1 * len(text), rel=0.1)
