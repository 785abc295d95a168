"""The keys that initial weights are drawn with."""

import jax


class Rngs:
    """Makes a key for each weight in turn, the ones of `nnx.Rngs`; without a key weights are declared, not drawn.

    `nnx.Rngs` counts in a traced array: each count takes JAX longer than the drawing, and declarations draw nothing.
    """

    def __init__(self, key: jax.Array | None = None) -> None:
        self.key = key
        self.count = 0

    def params(self) -> jax.Array:
        """Returns the next weight's key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)
