"""Compares two training steps; names the quantity that differs most, and where the difference begins."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from src.extras.verify.rows import Row, attempted, largest, verdict
from src.extras.verify.subject import Result
from src.system.errors import first_few

# Substrings of weights' paths, in the order of the forward pass. A path with none of them is ranked like a mixer's.
ORDER = ("embedding", "attention_norm", "attention.", "attention.out", "feed_forward_norm", "router", "wi", "wo")
ORDER += ("final_norm", "mtp", "output")
LAST, AFTER = ORDER.index("wo"), (-1, 99)  # rank of a layer's last weight; groups of weights before and after layers
LEAST_LOSS = 1e-3  # differences are relative to at least this: a user's loss may be zero up to rounding
# A gradient's entries may be rounding below STRONG times its largest entry, or NONE times the largest of all gradients.
STRONG, NONE = 0.01, 1e-6
MOST_REPEATS = 8  # few groups of a shrunk config have more layers: a longer first dim does not count as layers


def largest_entry(arrays: Mapping[str, np.ndarray]) -> float:
    """Returns the largest absolute value in any of the arrays."""
    return max(float(np.max(np.abs(each))) for each in arrays.values())


def strong(gradient: np.ndarray, of_all: float) -> np.ndarray:
    """Returns the mask of a gradient's entries that are too large to be rounding.

    `of_all` is the `largest_entry` of all gradients.
    """
    return np.abs(gradient) > max(STRONG * float(np.max(np.abs(gradient))), NONE * of_all)


def norm(gradients: Mapping[str, np.ndarray]) -> float:
    """Returns the global L2 norm of the gradients."""
    return float(np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values())))


def clipped(gradients: Mapping[str, np.ndarray], threshold: float) -> dict[str, np.ndarray]:
    """Scales all gradients by one factor so that their global norm is at most `threshold`; 0 does not limit it."""
    total = norm(gradients)
    factor = threshold / total if threshold and total > threshold else 1.0
    return {path: factor * gradient for path, gradient in gradients.items()}


def differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Yields each path and the largest difference of its arrays, relative to the largest expected value in the array.

    That scale is at least a thousandth of the largest value in all expected arrays, because some gradients are zero up
    to rounding: adding the same bias to all keys does not change a softmax. If all expected values are 0, any
    difference is infinite.
    """
    most = largest_entry(expected)
    for path, wanted in expected.items():
        scale = max(float(np.max(np.abs(wanted))), 1e-3 * most)
        difference = float(np.max(np.abs(np.float64(found[path]) - np.float64(wanted))))
        yield path, difference / scale if scale else math.inf if difference else 0.0


def compared(name: str, found: Result, expected: Result, bound: float, parting: Callable[[], str] = str) -> Row:
    """Compares two steps: token counts exactly; losses, grad_norm, gradients and routers' new biases within `bound`.

    Differences are relative. A failed row names the quantity that differs most. If a loss differs, the row also has the
    text of `parting()`, which says where the forward passes begin to differ; otherwise it names the wrong gradients
    that the backward pass computes first. If all gradients are wrong by the same factor, it has that factor.
    """
    counts = [result.metrics["tokens"] for result in (found, expected)]
    if counts[0] != counts[1]:
        return verdict(name, abs(counts[0] - counts[1]), 0, f"{counts[0]:.0f} tokens, not {counts[1]:.0f}")
    losses = [metric for metric in expected.metrics if metric.endswith("loss")]
    values = {metric: (found.metrics[metric], expected.metrics[metric]) for metric in (*losses, "grad_norm")}
    sizes = {metric: abs(one - other) / max(abs(other), LEAST_LOSS) for metric, (one, other) in values.items()}
    gradients = dict(differences(found.gradients, expected.gradients))
    sizes |= {f"gradient of {path}": size for path, size in gradients.items()}
    if expected.stats:
        sizes |= {f"new value of {path}": size for path, size in differences(found.stats, expected.stats)}
    wrong = [quantity for quantity, size in sizes.items() if not size <= bound]
    if not wrong:
        return verdict(name, sizes[largest(sizes)], bound)

    notes = [f"{largest(sizes)}; {len(wrong)} of {len(sizes)} quantities differ"]
    if forward := [metric for metric in losses if metric in wrong]:
        notes += [f"{', '.join(forward)} too", *filter(None, [attempted(parting)])]
    elif any(not size <= bound for size in gradients.values()):
        notes += [f"nearest to the loss: {_nearest(found, expected, bound)}"]
    if all(not size <= bound for size in gradients.values()):
        pairs = [(expected.gradients[path], found.gradients[path]) for path in gradients]
        ratios = [np.vdot(right, wrong) / np.sum(right**2) for right, wrong in pairs]
        alike = np.ptp(ratios) < 0.01 and abs(np.mean(ratios) - 1) > 0.01
        notes += [
            f"every gradient is {np.mean(ratios):.2f} times what it should be" if alike else "every gradient differs"
        ]
    return verdict(name, sizes[largest(sizes)], bound, ", ".join(notes))


def _nearest(found: Result, expected: Result, bound: float) -> str:
    """Names the wrong gradients that the backward pass computes first, with the layer's index if layers are stacked.

    It names several if they have the same rank, as the gradients of queries, keys and values do.
    """
    places: dict[tuple[int, ...], list[str]] = {}
    for path, wanted in expected.gradients.items():
        layers = len(wanted) if path.startswith("segments.") and wanted.ndim > 1 else 1
        pairs = [(found.gradients[path], wanted)]
        if layers <= MOST_REPEATS and layers > 1:
            pairs = list(zip(found.gradients[path], wanted, strict=True))
        for layer, (one, other) in enumerate(pairs):
            (_, size) = next(differences({path: one}, {path: other}))
            rank = max((index for index, part in enumerate(ORDER) if part in path), default=2)
            _, group, place, *_ = path.split(".") if path.startswith("segments.") else ("", AFTER[rank > LAST], 0)
            if not size <= bound:
                name = f"{path}[{layer}]" if len(pairs) > 1 else path
                places.setdefault((int(group), layer, int(place), rank), []).append(name)
    return first_few(places[max(places)]) if places else "none by itself"
