"""Writes a sequence as repeated patterns."""

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
    # best[i] describes items[i:]: (items in patterns, number of patterns, minus what the first covers, the patterns)
    best: list[tuple[int, int, int, tuple[tuple[int, int], ...]]] = [(0, 0, 0, ())] * (count + 1)
    for start in range(count - 1, -1, -1):
        candidates = []
        for period in range(1, count - start + 1):
            for end in range(start + period, count + 1, period):
                if kinds[end - period : end] != kinds[start : start + period]:
                    break
                length, patterns, _, rest = best[end]
                first = (period, (end - start) // period)
                candidates.append((length + period, patterns + 1, start - end, (first, *rest)))
        best[start] = min(candidates)
    return best[0][3]
