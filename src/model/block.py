"""One layer of a decoder."""

import functools
import math
from dataclasses import replace

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.cache import Cache
from src.model.forward_context import ForwardContext
from src.model.norm import Norm
from src.model.params import Rngs, Tree, weight
from src.model.parts import feed_forward, mixer
from src.model.spec import LayerSpec, ModelSpec


class Block(nnx.Module):
    """One layer: a token mixer, then a feed-forward layer or experts, each with a norm before, after or both."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        # 2 L branches add up in the residual stream, so each starts smaller (Radford et al. 2019, section 2.3).
        out_scale = 1.0 / math.sqrt(2 * len(model.layers))
        before, after = spec.normalization_placement != "after", spec.normalization_placement != "before"
        norm = functools.partial(Norm, spec, (D,), dtype, rngs)
        self.dropout_rate, self.multiplier = spec.dropout_rate, spec.residual_multiplier
        self.has_scalar = spec.layer_scalar
        self.attention_norm = norm() if before else None
        self.attention = mixer(spec)(spec, out_scale, dtype, rngs)
        self.attention_out_norm = norm() if after else None
        self.feed_forward_norm = norm() if before else None
        self.feed_forward = feed_forward(spec)(spec, out_scale, dtype, rngs)
        self.feed_forward_out_norm = norm() if after else None
        if spec.layer_scalar:
            self.layer_scalar = weight(rngs, (1,), (None,), dtype, constant=1.0, decays=False, trained=False)

    def __call__(
        self, x_BTD: Array, context: ForwardContext, cache: Cache | None, layer: Array
    ) -> tuple[Array, Cache | None, Tree]:
        """Maps [B, T, D] to [B, T, D] as block number `layer` of the model.

        Also returns the new cache (None without a cache) and a report: the feed-forward layer's, and `activations`.
        """
        context = replace(context, layer=layer)
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        with jax.named_scope("attention"):
            normed_BTD = context.all_gather_sequence(_normalise(self.attention_norm, x_BTD))
            out_BTD, cache = self.attention(normed_BTD, context, cache)
            x_BTD = self._add(x_BTD, _normalise(self.attention_out_norm, out_BTD), context, 2 * layer)
        with jax.named_scope("feed_forward"):
            normed_BTD = context.all_gather_sequence(_normalise(self.feed_forward_norm, x_BTD))
            out_BTD, report = self.feed_forward(normed_BTD, context)
            x_BTD = self._add(x_BTD, _normalise(self.feed_forward_out_norm, out_BTD), context, 2 * layer + 1)
        if self.has_scalar:
            x_BTD *= jax.lax.stop_gradient(self.layer_scalar[...]).astype(x_BTD.dtype)
        return x_BTD, cache, {"feed_forward": report, **context.activations(x_BTD)}

    def _add(self, x_BTD: Array, out_BTD: Array, context: ForwardContext, site: Array) -> Array:
        out_BTD = out_BTD if self.multiplier == 1 else out_BTD * self.multiplier
        x_BTD = x_BTD + context.dropout(out_BTD, self.dropout_rate, site)
        return context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")


def _normalise(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
