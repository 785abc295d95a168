"""Writes a sequence as repeated patterns."""

import math
from collections.abc import Hashable, Sequence


def shortest_patterns(items: Sequence[Hashable]) -> tuple[tuple[int, int], ...]:
    """Returns (period, repeats) of one pattern after the other, which together are the sequence.

    They have the fewest items in all patterns, then are the fewest, then the longest first: 26 items of which every
    sixth differs are 4 x (5 + 1) and 2 x 1.
    """
    count, number_of = len(items), {item: number for number, item in enumerate(items)}
    if len(number_of) == 1:
        return ((1, count),)
    kinds = [number_of[item] for item in items]  # numbers compare faster
    # best[i] describes items[i:]: (items in patterns, number of patterns, ((period, repeats), the rest's))
    best: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, ())] * (count + 1)
    for start in range(count - 1, -1, -1):
        candidates = []
        for period in range(1, count - start + 1):
            repeats, end = 1, start + period
            while True:
                length, patterns, rest = best[end]
                candidates.append((length + period, patterns + 1, ((period, repeats), *rest)))
                if kinds[end : end + period] != kinds[start : start + period]:
                    break
                repeats, end = repeats + 1, end + period
        best[start] = min(candidates, key=lambda candidate: (*candidate[:2], -math.prod(candidate[2][0])))
    return best[0][2]
