"""Compresses a list into repeated patterns."""

from collections.abc import Hashable, Sequence


def shortest_patterns(items: Sequence[Hashable]) -> tuple[tuple[int, int], ...]:
    """Writes the list as consecutive patterns, each (period, repeats).

    Minimises the sum of all periods, then the number of patterns, and then lets the first patterns cover as many items
    as possible: for 26 items of which every sixth differs, returns ((6, 4), (1, 2)).
    """
    count, number_of = len(items), {item: number for number, item in enumerate(items)}
    if len(number_of) == 1:
        return ((1, count),)
    kinds = [number_of[item] for item in items]  # numbers compare faster
    # best[i] describes items[i:]: (sum of periods, number of patterns, minus the items in the first, the patterns)
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
