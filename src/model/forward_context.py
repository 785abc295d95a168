"""ForwardContext: what all blocks of one forward pass share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from src.model.params import Tree
from src.model.products import with_gradient
from src.parallel.mesh import Layout


@dataclass(frozen=True)
class ForwardContext:
    """The rows' positions and segments, and how to compute: arrays and settings shared by all blocks."""

    positions_BT: Array  # from 0 in each segment
    segment_ids_BT: Array  # from 1 in each row; 0 is padding; tokens attend within their own segment only
    layout: Layout
    kernel: str  # of src/model/attention_kernels
    packed: bool  # False: rows hold one segment, then padding, and a causal kernel needs no segments
    dropout_keys_BTW: Array | None = None  # of each token, as key data; None: no dropout
    decoding: bool = False  # each row is one token, whose past is in the cache
    log_internals: bool = False  # blocks report the size of what they return
    layer: Array | int = 0  # number of the block that runs, counted through the model
    early_gradients: bool = False  # `Execution.early_gradients`
    mlp_in_halves: bool = False  # `Execution.mlp_in_halves`

    # Between blocks more devices may share T than within: those that share heads and hidden units there (sequence
    # parallelism). Stating both placements makes one all-gather serve all projections forward, and one reduce-scatter
    # the sum of their gradients backward.

    def all_gather_sequence(self, x_BTD: Array) -> Array:
        """Gathers T before a block's projections, from its placement between blocks to that within."""
        return self._reshard(x_BTD, "norm_length", "length")

    def reduce_scatter_sequence(self, x_BTD: Array) -> Array:
        """Sums and shards T after a block's last projection, from its placement within blocks to that between."""
        return self._reshard(x_BTD, "length", "norm_length")

    def _reshard(self, x_BTD: Array, *axes: str) -> Array:
        for axis in axes:
            x_BTD = self.layout.constrain(x_BTD, "batch", axis, "activation_embed")
        return x_BTD

    def gradients_together(self, *arrays: Tree) -> tuple[Tree, ...]:
        """Returns `arrays`, pytrees; with `early_gradients` all their gradients are there before any is used."""
        return _gradients_together(*arrays) if self.early_gradients else arrays

    def activations(self, x_BTD: Array) -> Tree:
        """Reports a block's output: its sum of squares over the tokens that are no padding, [1, 1] as routers' sums."""
        if not self.log_internals:
            return {}
        squares_BT = jnp.sum(jnp.square(jax.lax.stop_gradient(x_BTD).astype(jnp.float32)), axis=-1)
        return {"activations": jnp.sum(squares_BT * (self.segment_ids_BT > 0))[None, None]}

    def dropout(self, x_BTD: Array, rate: float, site: Array | int) -> Array:
        """Applies inverted dropout (Srivastava et al. 2014, section 10) to [B, T, D] by the tokens' keys, if any.

        Masks follow the tokens: they are the same on every mesh and for every order of rows. `site` numbers the place
        in the model, so that each has its own mask.
        """
        if self.dropout_keys_BTW is None or rate == 0.0:
            return x_BTD

        def keep(key: Array) -> Array:
            return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BTD.shape[2:])

        keep_BTD = jax.vmap(jax.vmap(keep))(jax.random.wrap_key_data(self.dropout_keys_BTW))
        return jnp.where(keep_BTD, x_BTD / (1.0 - rate), 0.0).astype(x_BTD.dtype)


_gradients_together = with_gradient(
    lambda *arrays: (arrays, None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)
