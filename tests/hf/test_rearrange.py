import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.extras.hf.tensor_map import Rearrangement


class Counted:
    """A tensor in memory that counts the elements read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.elements = array, array.shape, array.dtype, 0

    def read(self, index):
        part = self.array[index].copy()
        self.elements += part.size
        return part


SIZES = {"D": 5, "N": 4, "K": 2, "H": 3, "F": 6, "A": 2, "E": 3}

# A pattern, and the whole weight in numpy's own words.
CASES = {
    "V D -> V D": lambda x: x,
    "(N H) D -> D N H": lambda x: x.T.reshape(5, 4, 3),
    "D (N H) -> N H D": lambda x: x.T.reshape(4, 3, 5),
    "(N*|K|K H) D -> D N H": lambda x: x[:12].T.reshape(5, 4, 3),
    "D (N|K*|K H) -> D K H": lambda x: x[:, 12:18].reshape(5, 2, 3),
    "(N|K|K* H) -> K H": lambda x: x[18:].reshape(2, 3),
    "F D -> E D A F": lambda x: x.T[None, :, None, :],
    "F -> A F": lambda x: x[None],
    "E D (F A) -> E D A F": lambda x: np.stack([x[..., 0::2], x[..., 1::2]], axis=2),
    "E D (A F) -> E D A F": lambda x: np.stack([x[..., :6], x[..., 6:]], axis=2),
}


def numbered(pattern):
    rearrangement = Rearrangement(pattern, {**SIZES, "V": 7})
    shape = rearrangement.file_shape
    return rearrangement, np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def whole(rearrangement):
    sizes = rearrangement.sizes
    return {letter: (0, 1 if letter in rearrangement.split else sizes[letter]) for letter in rearrangement.dims}


@pytest.mark.parametrize("pattern", CASES)
def test_reads_the_weight_that_numpy_makes_of_the_tensor(pattern):
    rearrangement, array = numbered(pattern)
    weight = rearrangement.read(Counted(array), whole(rearrangement))
    np.testing.assert_array_equal(weight, CASES[pattern](array))


@pytest.mark.parametrize("pattern", CASES)
def test_writing_a_weight_puts_back_what_was_read_and_nothing_else(pattern):
    rearrangement, array = numbered(pattern)
    written = np.full_like(array, -1)
    rearrangement.write(CASES[pattern](array), written)
    untouched = written == -1
    np.testing.assert_array_equal(written[~untouched], array[~untouched])
    assert untouched.sum() == array.size - CASES[pattern](array).size


@pytest.mark.parametrize("pattern", CASES)
@given(data=st.data())
def test_a_slice_read_is_the_slice_of_the_whole(pattern, data):
    rearrangement, array = numbered(pattern)
    wanted = {}
    for letter, (_, size) in whole(rearrangement).items():
        start = data.draw(st.integers(0, size - 1))
        wanted[letter] = (start, data.draw(st.integers(start + 1, size)))
    part = rearrangement.read(Counted(array), wanted)
    np.testing.assert_array_equal(part, CASES[pattern](array)[tuple(slice(*span) for span in wanted.values())])


@pytest.mark.parametrize(
    ("pattern", "wanted", "elements"),
    [
        ("(N H) D -> D N H", {"N": (1, 3)}, 2 * 3 * 5),  # whole heads: their rows alone
        ("(N H) D -> D N H", {"N": (2, 3), "H": (1, 2)}, 1 * 5),
        ("(N H) D -> D N H", {"N": (1, 3), "H": (0, 1)}, 2 * 3 * 5),  # a part of each head: the heads
        ("D (N|K*|K H) -> D K H", {"D": (0, 2)}, 2 * 2 * 3),  # none of the queries or values
        ("E D (F A) -> E D A F", {"E": (1, 2), "F": (2, 4)}, 1 * 5 * 2 * 2),
        ("E D (F A) -> E D A F", {"A": (0, 1)}, 3 * 5 * 12),  # interleaved: both
    ],
)
def test_little_else_than_a_slice_is_read(pattern, wanted, elements):
    rearrangement, array = numbered(pattern)
    tensor = Counted(array)
    rearrangement.read(tensor, {**whole(rearrangement), **wanted})
    assert tensor.elements == elements
