"""The decoder: an embedding, segments of layer patterns, a final norm; hidden states out, logits on request."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model.attention import Attention
from src.model.context import Context
from src.model.embeddings import sinusoidal
from src.model.feedforward import FeedForward
from src.model.kernels import MASKED
from src.model.norms import Norm
from src.model.segments import Execution, run_segment
from src.model.spec import LayerSpec, ModelSpec, Segment, segments
from src.model.weights import matmul, stack, weight


class Block(nnx.Module):
    """One layer: attention, then a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: nnx.Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        # 2 L branches add up in the residual stream: each starts smaller (Radford et al. 2019, section 2.3).
        out_scale = 1.0 / math.sqrt(2 * len(model.layers))
        self.dropout_rate = spec.dropout_rate
        self.attention_norm = Norm(spec.norm, D, dtype, rngs)
        self.attention = Attention(spec.attention, D, out_scale, dtype, rngs)
        self.feed_forward_norm = Norm(spec.norm, D, dtype, rngs)
        self.feed_forward = FeedForward(spec.feed_forward, D, out_scale, dtype, rngs)

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: Any, layer: jax.Array
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Block number `layer` of the model: [B, T, D] to [B, T, D], the cache, and what it reports of itself."""
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        attended_BTD, cache = self.attention(self.attention_norm(x_BTD), context, cache)
        x_BTD = x_BTD + dropout(attended_BTD, self.dropout_rate, context, 2 * layer)
        x_BTD = context.layout.constrain(x_BTD, "batch", "length", "activation_embed")
        fed_BTD = self.feed_forward(self.feed_forward_norm(x_BTD), context.layout)
        x_BTD = x_BTD + dropout(fed_BTD, self.dropout_rate, context, 2 * layer + 1)
        return context.layout.constrain(x_BTD, "batch", "length", "activation_embed"), cache, {}


class Decoder(nnx.Module):
    """The whole model of a `ModelSpec`."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.plan = segments(spec.layers)
        V, D, dtype = spec.padded_vocab_size, spec.emb_dim, spec.weight_dtype
        # As an input its values are of size 1, as a norm's output is; tied, it is also a projection that sums over D.
        self.embedding = weight(rngs, (V, D), ("vocab", "embed"), dtype, fan_in=(1,) if spec.tied_output else ())
        if spec.position_table == "learned":
            rows = spec.position_table_size
            self.position_embedding = weight(rngs, (rows, D), ("position", "embed"), dtype, fan_in=(1,))
        self.segments = nnx.List([self._segment_weights(segment, rngs) for segment in self.plan])
        self.final_norm = Norm(spec.final_norm, D, dtype, rngs)
        if not spec.tied_output:
            self.output = weight(rngs, (D, V), ("embed", "vocab"), dtype, fan_in=(0,))

    def _segment_weights(self, segment: Segment, rngs: nnx.Rngs) -> nnx.Module:
        def pattern(rngs: nnx.Rngs) -> nnx.List:
            return nnx.List([Block(layer, self.spec, rngs) for layer in segment.pattern])

        return pattern(rngs) if segment.shared else stack(pattern, rngs, segment.repeats)

    def __call__(
        self, tokens_BT: jax.Array, context: Context, execution: Execution
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Token ids [B, T] to hidden states [B, T, D] after the final norm, and the layers' reports."""
        # Gathered over fsdp before it is looked up, as every weight is: else XLA replicates the result.
        table_VD = context.layout.constrain(self.embedding[...].astype(self.spec.dtype), "vocab", "activation_embed")
        x_BTD = table_VD[tokens_BT]
        if self.spec.position_table == "learned":
            table_SD = self.position_embedding[...].astype(x_BTD.dtype)
            x_BTD += context.layout.constrain(table_SD, "position", "activation_embed")[context.positions_BT]
        elif self.spec.position_table == "sinusoidal":
            x_BTD += sinusoidal(context.positions_BT, self.spec.emb_dim).astype(x_BTD.dtype)
        x_BTD = dropout(x_BTD, self.spec.dropout_rate, context, 2 * len(self.spec.layers))
        x_BTD = context.layout.constrain(x_BTD, "batch", "length", "activation_embed")
        reports, first_layer = {}, 0
        for index, (segment, blocks) in enumerate(zip(self.plan, self.segments, strict=True)):
            x_BTD, _, report = run_segment(segment, blocks, x_BTD, context, None, first_layer, execution)
            reports[f"segment_{index}"] = report
            first_layer += len(segment.pattern) * segment.repeats
        return self.final_norm(x_BTD), reports

    def logits(self, hidden_BTD: jax.Array, context: Context) -> jax.Array:
        """Hidden states [B, T, D] to float32 logits [B, T, V]; those past the vocabulary's end are about -1e38."""
        if self.spec.tied_output:
            logits_BTV = matmul(hidden_BTD, self.embedding[...], "BTD,VD->BTV")
        else:
            logits_BTV = matmul(hidden_BTD, self.output[...], "BTD,DV->BTV")
        logits_BTV = context.layout.constrain(logits_BTV, "batch", "length", "vocab").astype(jnp.float32)
        cap = self.spec.final_logits_soft_cap
        if cap:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        in_vocabulary = jnp.arange(self.spec.padded_vocab_size) < self.spec.vocab_size
        return jnp.where(in_vocabulary, logits_BTV, MASKED)


def dropout(x: jax.Array, rate: float, context: Context, place: jax.Array | int) -> jax.Array:
    """Inverted dropout; `place` numbers where in the model it stands, so that each place has its own mask."""
    if context.dropout_key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(context.dropout_key, place), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)
