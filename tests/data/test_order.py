import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from src.data.order import hash_keys, mix64, permute


def test_mix64_gives_the_published_splitmix64_sequences():
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    seed_0 = [mix64(golden * k & mask) for k in (1, 2, 3)]
    assert seed_0 == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    words = np.array([1234567 + golden * k & mask for k in (1, 2)], np.uint64)
    assert mix64(words).tolist() == [6457827717110365317, 3203168211198807973]


@given(n=st.integers(1, 2000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 100), source=st.integers(0, 3))
def test_permute_is_a_bijection(n, seed, epoch, source):
    assert sorted(permute(i, n, seed, source, epoch) for i in range(n)) == list(range(n))


def test_every_seed_source_and_epoch_has_its_own_order():
    orders = {
        tuple(permute(i, 50, seed, source, epoch) for i in range(50))
        for seed in range(6)
        for source in range(3)
        for epoch in range(6)
    }
    assert len(orders) == 6 * 3 * 6


def test_order_is_uniform_over_seeds():
    n, seeds = 6, 6000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        for i in range(n):
            counts[i, permute(i, n, seed, 0, 0)] += 1
    spread = np.sqrt(seeds / n * (1 - 1 / n))
    assert np.abs(counts - seeds / n).max() < 5 * spread


def test_neighbours_end_up_apart():
    n = 20_000
    order = np.array([permute(i, n, 1, 0, 0) for i in range(n)])
    # Of independent uniform places: correlation 0 and mean distance n / 3, with these standard errors.
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.abs(np.diff(order)).mean() / n - 1 / 3) < 0.01


def test_the_order_never_changes():
    """A checkpoint's data position means documents in this order: another would resume in the wrong place."""
    assert [permute(i, 10, 7, 0, 2) for i in range(10)] == [8, 0, 3, 4, 7, 9, 1, 5, 2, 6]
    assert permute(123_456_789, 1_000_000_007, 0, 0, 0) == 311664152


def test_keys_of_different_tuples_are_unrelated():
    assert not set(hash_keys("a", 1, 23)) & set(hash_keys("a", 12, 3))
