"""The feed-forward layer, gated or plain."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.costs import Costs
from src.model.forward_context import ForwardContext
from src.model.params import Rngs, matmul, weight
from src.model.spec import LayerSpec

ACTIVATIONS = {
    "linear": lambda x: x,
    "plus_one": lambda x: x + 1,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016, section 2
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


class FeedForward(nnx.Module):
    """Projects to one factor per activation, multiplies the activated factors, projects back.

    [silu, linear] is SwiGLU (Shazeer 2020); [gelu] is GPT's; [quick_gelu, plus_one] is gpt-oss's.
    """

    def __init__(self, spec: LayerSpec, out_scale: float, dtype: str, rngs: Rngs, mlp_dim: int = 0) -> None:
        self.spec = spec
        emb_dim, factors, mlp_dim = spec.emb_dim, len(spec.mlp_activations), mlp_dim or spec.mlp_dim
        self.wi = weight(rngs, (emb_dim, factors, mlp_dim), ("embed", None, "mlp"), dtype, fan_in=(0,))
        self.wo = weight(rngs, (mlp_dim, emb_dim), ("mlp", "embed"), dtype, fan_in=(0,), scale=out_scale)
        if spec.mlp_bias:
            self.wi_bias = weight(rngs, (factors, mlp_dim), (None, "mlp"), dtype, constant=0.0, decays=False)
            self.wo_bias = weight(rngs, (emb_dim,), (None,), dtype, constant=0.0, decays=False)

    @staticmethod
    def costs(spec: LayerSpec, mlp_dim: int = 0) -> Costs:
        """Counts what the layer makes beside its weights' products."""
        mlp_dim = mlp_dim or spec.mlp_dim
        width = (len(spec.mlp_activations) + 1) * mlp_dim  # the factors and their product
        return Costs(width, {"mlp": (mlp_dim,)}, {"wi": ("mlpwi",), "wo": ("mlpwo",)}, last="wo")

    def __call__(
        self, x_BTD: Array, context: ForwardContext, gate_BT1: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Maps [B, T, D] to [B, T, D], times each token's gate if there is one; reports nothing."""
        hidden_BTF = activated(self._factors(x_BTD, context), self.spec)
        if gate_BT1 is not None:  # here, as experts are weighted: its gradient does not need the last product
            hidden_BTF *= gate_BT1
        out_BTD = context.reduce_scatter_sequence(matmul(hidden_BTF, self.wo[...], "BTF,FD->BTD"))
        if self.spec.mlp_bias:
            out_BTD += self.wo_bias[...].astype(x_BTD.dtype)
        return checkpoint_name(out_BTD, "mlpwo"), {}

    def _factors(self, x_BTD: Array, context: ForwardContext) -> list[Array]:
        wi, indices = self.wi[...], range(len(self.spec.mlp_activations))
        if context.early_gradients and isinstance(wi, Array):
            # Arrays of their own, whose gradients no product computes again (docs/log.md).
            factors = context.gradients_together(*(matmul(x_BTD, wi[:, index], "BTD,DF->BTF") for index in indices))
        else:
            hidden_BTAF = matmul(x_BTD, wi, "BTD,DAF->BTAF")
            factors = [hidden_BTAF[..., index, :] for index in indices]
        if self.spec.mlp_bias:
            biases = self.wi_bias[...].astype(x_BTD.dtype)
            factors = [factor + biases[index] for index, factor in enumerate(factors)]
        return [context.layout.constrain(factor, "batch", "length", "mlp") for factor in factors]


def activated(factors: Sequence[Array], spec: LayerSpec) -> Array:
    """Multiplies the activated factors, [..., F] each; a remat policy keeps them by the name mlpwi."""
    factors = [checkpoint_name(factor, "mlpwi") for factor in factors]
    if limit := spec.mlp_activations_limit:  # the gate, the first factor, is clipped from above only
        gate, *linear = factors
        factors = [jnp.minimum(gate, limit), *(jnp.clip(x, -limit, limit) for x in linear)]
    activated_factors = (ACTIVATIONS[name](x) for name, x in zip(spec.mlp_activations, factors, strict=True))
    return functools.reduce(operator.mul, activated_factors)
