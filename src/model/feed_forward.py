"""The feed-forward layer, gated or plain."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

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
    """Projects to one factor per activation, multiplies the activated factors, and projects back.

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
        """Declares the layer's activations, and the arrays that remat policies save."""
        mlp_dim = mlp_dim or spec.mlp_dim
        width = (len(spec.mlp_activations) + 1) * mlp_dim  # the factors and their product
        return Costs(width, {"mlp": (mlp_dim,)}, {"wi": ("mlpwi",), "wo": ("mlpwo",)}, output_weight="wo")

    def __call__(
        self, x_BTD: Array, context: ForwardContext, gate_BT1: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Maps [B, T, D] to [B, T, D], times each token's gate if there is one; its report is empty."""
        bias_AF = self.wi_bias[...] if self.spec.mlp_bias else None
        project = self._project
        if context.mlp_in_halves:
            from src.model.mlp_halves import project_in_halves

            project = functools.partial(project_in_halves, project, self.spec)
        out_BTD = project(x_BTD, gate_BT1, self.wi[...], self.wo[...], bias_AF, context)
        out_BTD = context.reduce_scatter_sequence(out_BTD)
        if self.spec.mlp_bias:
            bias_D = self.wo_bias[...].astype(x_BTD.dtype)
            out_BTD += bias_D if gate_BT1 is None else gate_BT1 * bias_D
        return checkpoint_name(out_BTD, "mlpwo"), {}

    def _project(
        self,
        x_BTD: Array,
        gate_BT1: Array | None,
        wi: Any,
        wo: Any,
        bias_AF: Array | None,
        context: ForwardContext,
        is_half: bool = False,
    ) -> Array:
        indices = range(len(self.spec.mlp_activations))
        if context.separate_factors or (context.grad_barriers and isinstance(wi, Array)):
            kernels = [wi[..., index, :] for index in indices]
            if is_half:  # without a barrier, the weights' gradients are delayed, and the factors held for them
                x_BTD, *kernels = context.grad_barrier(x_BTD, *kernels)
            # Factors are separate arrays, so that on TPUs their gradients need no recomputed matmul, and on GPUs they
            # are not interleaved first (docs/log.md).
            factors = context.grad_barrier(*(matmul(x_BTD, kernel, "BTD,DF->BTF") for kernel in kernels))
        else:
            hidden_BTAF = matmul(x_BTD, wi, "BTD,DAF->BTAF")
            factors = [hidden_BTAF[..., index, :] for index in indices]
        if bias_AF is not None:
            factors = [factor + bias_AF[index].astype(x_BTD.dtype) for index, factor in enumerate(factors)]
        factors = [context.layout.constrain(factor, "batch", "length", "mlp") for factor in factors]
        activate = jax.checkpoint(activated, static_argnums=1) if context.recomputes_activated else activated
        hidden_BTF = activate(factors, self.spec)
        if gate_BT1 is not None:  # before the last matmul, as for experts: the gate's gradient does not need its output
            hidden_BTF *= gate_BT1
        return matmul(hidden_BTF, wo, "BTF,FD->BTD")


def activated(factors: Sequence[Array], spec: LayerSpec) -> Array:
    """Clips (if there is a limit), activates and multiplies factors, [..., F] each, which remat policies call mlpwi."""
    factors = [checkpoint_name(factor, "mlpwi") for factor in factors]
    if limit := spec.mlp_activations_limit:  # the gate, the first factor, is clipped from above only
        gate, *linear = factors
        factors = [jnp.minimum(gate, limit), *(jnp.clip(x, -limit, limit) for x in linear)]
    activated_factors = (ACTIVATIONS[name](x) for name, x in zip(spec.mlp_activations, factors, strict=True))
    return functools.reduce(operator.mul, activated_factors)
