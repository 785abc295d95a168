"""Compares two training steps, and names what differs and the first place that does."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from src.extras.verify.rows import Row, attempted, largest, verdict
from src.extras.verify.subject import Result

# Parts of the weights' paths in the order in which a forward pass uses them; other weights are a mixer's.
ORDER = ("embedding", "attention_norm", "attention.", "attention.out", "feed_forward_norm", "router", "wi", "wo")
ORDER += ("final_norm", "mtp", "output")
LAST, AFTER = ORDER.index("wo"), (-1, 99)  # the last rank of a layer; the groups of weights before and after layers
LEAST_LOSS = 1e-3  # a user's loss may be zero but for rounding
# Of the largest entry of a weight's gradient, and of all gradients: smaller entries may be rounding.
STRONG, NONE = 0.01, 1e-6
MOST_REPEATS = 8  # of a shrunk group of layers: a longer first dim is not the layers'


def largest_entry(arrays: Mapping[str, np.ndarray]) -> float:
    """The largest magnitude in all arrays."""
    return max(float(np.max(np.abs(each))) for each in arrays.values())


def strong(gradient: np.ndarray, of_all: float) -> np.ndarray:
    """Masks the entries of a weight's gradient that are not rounding; `of_all` is the largest entry of all."""
    return np.abs(gradient) > max(STRONG * float(np.max(np.abs(gradient))), NONE * of_all)


def norm(gradients: Mapping[str, np.ndarray]) -> float:
    """The norm of all gradients together."""
    return float(np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values())))


def clipped(gradients: Mapping[str, np.ndarray], threshold: float) -> dict[str, np.ndarray]:
    """Scales all gradients to the norm `threshold` if their norm is larger, unless `threshold` is 0."""
    factor = min(1.0, (threshold or np.inf) / norm(gradients))
    return {path: factor * gradient for path, gradient in gradients.items()}


def differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Yields each array's largest difference, relative to its largest value or a thousandth of the largest of all.

    Some gradients are zero but for rounding: a bias of all keys moves no softmax.
    """
    most = largest_entry(expected)
    for path, wanted in expected.items():
        scale = max(float(np.max(np.abs(wanted))), 1e-3 * most)
        yield path, float(np.max(np.abs(np.float64(found[path]) - np.float64(wanted)))) / scale


def compared(name: str, found: Result, expected: Result, bound: float, parting: Callable[[], str] = str) -> Row:
    """Compares two steps: token counts exactly, then losses, gradients and routers' biases.

    Names the quantity that differs most. If a loss differs, `parting` names where the forward passes part; if only
    gradients differ, the weight nearest to the loss is where the backward pass goes wrong first.
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
        alike = np.ptp(ratios) < 0.01
        notes += [
            f"every gradient is {np.mean(ratios):.2f} times what it should be" if alike else "every gradient differs"
        ]
    return verdict(name, sizes[largest(sizes)], bound, ", ".join(notes))


def _nearest(found: Result, expected: Result, bound: float) -> str:
    """Names the wrong gradient, of a layer if the weight is stacked, that the backward pass computes first."""
    places = {}
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
                places[f"{path}[{layer}]" if len(pairs) > 1 else path] = (int(group), layer, int(place), rank, size)
    return max(places, key=places.__getitem__, default="none by itself")
