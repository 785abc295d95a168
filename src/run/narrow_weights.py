"""Estimates how many 16-bit weights are too large to be changed by updates as large as the learning rate."""

import jax
import numpy as np

from src.step.plan import StepPlan
from src.step.state import TrainState


class NarrowWeights:
    """Checks a sample of the weights trained in 16 bits, at the start and after the step `until`.

    `messages` are lines for the user at the start: none unless an update of the learning rate's size would leave more
    than a tenth of the weights unchanged.
    """

    def __init__(self, plan: StepPlan, state: TrainState, until: int) -> None:
        self._until, self._copy = until, plan.layout.sharding(())
        self._sizes = [w.size for w in _narrow(state)]
        self._before, rate = self._sample(state), plan.step.learning_rate
        wide = [(w, w.astype(np.float32)) for w in self._before]
        kept = self._share([((x + rate).astype(w.dtype) == w) & ((x - rate).astype(w.dtype) == w) for w, x in wide])
        self.messages = [
            f"weight_dtype={plan.step.weight_dtype}: {kept:.1%} of the weights are so large that an update of "
            f"learning_rate={rate:g} is rounded off. weight_dtype=float32, or a larger rate, would change them"
        ] * (kept > 0.1)

    def after(self, step: int, state: TrainState) -> list[str]:
        """Returns a line on how many weights have changed, if `step` is `until` and there were messages; else []."""
        if step != self._until or not self.messages:
            return []
        moved = self._share([a != b for a, b in zip(self._before, self._sample(state), strict=True)])
        return [f"step {step}: {moved:.1%} of the weights (in a sample) have changed so far"]

    def _sample(self, state: TrainState) -> list[np.ndarray]:
        """Samples at most 31 evenly spaced indices along each dim of each weight."""

        def places(w: jax.Array) -> jax.Array:
            return w[tuple(slice(None, None, max(size // 16, 1)) for size in w.shape)]

        return jax.device_get(jax.jit(lambda ws: list(map(places, ws)), out_shardings=self._copy)(_narrow(state)))

    def _share(self, chosen: list[np.ndarray]) -> float:
        return float(np.average([each.mean() for each in chosen], weights=self._sizes)) if chosen else 0.0


def _narrow(state: TrainState) -> list[jax.Array]:
    return [w for w in jax.tree.leaves(state.weights.trainable) if w.dtype.itemsize < 4]
