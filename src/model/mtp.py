"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers that each predict one more token."""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from src.model.block import Block
from src.model.execution import Execution
from src.model.forward_context import ForwardContext
from src.model.norm import Norm
from src.model.params import Rngs, Tree, matmul, weight
from src.model.spec import LayerSpec, ModelSpec


class MtpLayer(nnx.Module):
    """Predicts one more token: joins hidden states with the next tokens' embeddings."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        self.embedding_norm = Norm(spec, (D,), dtype, rngs)
        self.hidden_norm = Norm(spec, (D,), dtype, rngs)
        self.projection = weight(rngs, (2 * D, D), ("embed", None), dtype, fan_in=(0,))
        self.block = Block(spec, model, rngs)
        self.final_norm = Norm(spec, (D,), dtype, rngs)

    @jax.named_scope("mtp")
    def __call__(
        self, hidden_BTD: Array, embedded_BTD: Array, context: ForwardContext, layer: Array
    ) -> tuple[Array, Tree]:
        """Maps hidden states and the embeddings of the tokens one position later, each [B, T, D], to hidden states.

        Also returns the report of its block, which is number `layer` of the model.
        """
        joined_BTD = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        x_BTD = matmul(joined_BTD, self.projection[...], "BTC,CD->BTD")
        x_BTD, _, report = self.block(x_BTD, context, None, layer)
        return x_BTD, {"block": report}


def mtp_layers(spec: ModelSpec, rngs: Rngs) -> nnx.List:
    """Makes the model's `mtp_num_layers` prediction layers, which have the settings of its last layer."""
    return nnx.List([MtpLayer(spec.layers[-1], spec, rngs) for _ in range(spec.mtp_num_layers)])


def run_mtp_layers(
    layers: Sequence[MtpLayer],
    hidden_BTD: Array,
    embedded: Iterable[Array],
    context: ForwardContext,
    execution: Execution,
    first_layer: int,
) -> tuple[list[Array], Tree]:
    """Runs the layers, numbered from `first_layer`, on the decoder's hidden states.

    Layer k = 1, 2, ... takes the embeddings [B, T, D] of the tokens k positions later. Returns each layer's hidden
    states for `Decoder.logits`, of which layer k's at position t predict token t + k + 1, and the layers' reports.
    """
    predicted, reports = [], {}
    for index, (layer, embedded_BTD) in enumerate(zip(layers, embedded, strict=True)):
        run_layer = execution.remat(functools.partial(layer, context=context), repeats=1)
        hidden_BTD, reports[index] = run_layer(hidden_BTD, embedded_BTD, layer=first_layer + index)
        predicted.append(layer.final_norm(hidden_BTD))
    return predicted, {"mtp": reports}
