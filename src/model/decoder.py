"""The decoder: an embedding, segments of layer patterns, a final norm; hidden states out, logits on request."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from src.model import cache
from src.model.attention import Attention
from src.model.attention_kernels.choose import MASKED
from src.model.dropout import dropout
from src.model.embeddings import looked_up, sinusoidal
from src.model.feed_forward import FeedForward
from src.model.forward_context import Context
from src.model.latent_attention import LatentAttention
from src.model.layers import Execution, run_segment
from src.model.moe.layer import Experts
from src.model.norm import Norm
from src.model.params import Tree, matmul, stack, weight
from src.model.spec import ExpertsSpec, LayerSpec, ModelSpec, longest


class Block(nnx.Module):
    """One layer: attention, then a feed-forward layer or experts, each normalised before, after or both."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: nnx.Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        # 2 L branches add up in the residual stream: each starts smaller (Radford et al. 2019, section 2.3).
        out_scale = 1.0 / math.sqrt(2 * len(model.layers))
        self.dropout_rate = spec.dropout_rate
        attention = LatentAttention if spec.attention.latent else Attention
        feed_forward = Experts if isinstance(spec.feed_forward, ExpertsSpec) else FeedForward
        self.attention_norm = Norm(spec.norm, (D,), dtype, rngs) if spec.norm_before else None
        self.attention = attention(spec.attention, spec.norm, D, out_scale, dtype, rngs)
        self.attention_out_norm = Norm(spec.norm, (D,), dtype, rngs) if spec.norm_after else None
        self.feed_forward_norm = Norm(spec.norm, (D,), dtype, rngs) if spec.norm_before else None
        self.feed_forward = feed_forward(spec.feed_forward, D, out_scale, dtype, rngs)
        self.feed_forward_out_norm = Norm(spec.norm, (D,), dtype, rngs) if spec.norm_after else None

    def __call__(
        self, x_BTD: jax.Array, context: Context, cache: cache.Cache | None, layer: jax.Array
    ) -> tuple[jax.Array, cache.Cache | None, Tree]:
        """Block number `layer` of the model: [B, T, D] to [B, T, D], the cache, and what it reports of itself."""
        x_BTD = checkpoint_name(x_BTD, "decoder_layer_input")
        attended_BTD, cache = self.attention(context.gathered(_normalised(self.attention_norm, x_BTD)), context, cache)
        attended_BTD = _normalised(self.attention_out_norm, attended_BTD)
        x_BTD = x_BTD + dropout(attended_BTD, self.dropout_rate, context, 2 * layer)
        x_BTD = context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")
        fed_BTD, report = self.feed_forward(context.gathered(_normalised(self.feed_forward_norm, x_BTD)), context)
        fed_BTD = _normalised(self.feed_forward_out_norm, fed_BTD)
        x_BTD = x_BTD + dropout(fed_BTD, self.dropout_rate, context, 2 * layer + 1)
        x_BTD = context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")
        return x_BTD, cache, {"feed_forward": report}


class PredictionLayer(nnx.Module):
    """One more token ahead: joins hidden states with the next tokens' embeddings (DeepSeek-V3, section 2.2)."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: nnx.Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        self.embedding_norm = Norm(spec.norm, (D,), dtype, rngs)
        self.hidden_norm = Norm(spec.norm, (D,), dtype, rngs)
        self.projection = weight(rngs, (2 * D, D), ("embed", None), dtype, fan_in=(0,))
        self.block = Block(spec, model, rngs)
        self.final_norm = Norm(spec.norm, (D,), dtype, rngs)

    def __call__(
        self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, context: Context, layer: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Hidden states [B, T, D] and the embeddings of the tokens one further ahead, to hidden states."""
        joined_BTD = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        x_BTD = matmul(joined_BTD, self.projection[...], "BTC,CD->BTD")
        x_BTD, _, report = self.block(x_BTD, context, None, layer)
        return x_BTD, {"block": report}


class Decoder(nnx.Module):
    """The whole model of a `ModelSpec`."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.plan = spec.plan
        V, D, dtype = spec.padded_vocab_size, spec.emb_dim, spec.weight_dtype
        # As an input its values are of size 1, as a norm's output is; tied, it is also a projection that sums over D.
        self.embedding = weight(rngs, (V, D), ("vocab", "embed"), dtype, fan_in=(1,) if spec.tied_output else ())
        if spec.position_table == "learned":
            rows = spec.position_table_size
            self.position_embedding = weight(rngs, (rows, D), ("position", "embed"), dtype, fan_in=(1,))
        self.segments = nnx.List([self._segment_weights(index, rngs) for index in range(len(self.plan))])
        self.final_norm = Norm(spec.final_norm, (D,), dtype, rngs)
        if not spec.tied_output:
            self.output = weight(rngs, (D, V), ("embed", "vocab"), dtype, fan_in=(0,))
        last = spec.layers[-1]
        self.mtp = nnx.List([PredictionLayer(last, spec, rngs) for _ in range(spec.prediction_layers)])

    def _segment_weights(self, index: int, rngs: nnx.Rngs) -> nnx.Module:
        segment = self.plan[index]

        def pattern(rngs: nnx.Rngs) -> nnx.List:
            return nnx.List([Block(layer, self.spec, rngs) for layer in segment.pattern])

        if segment.shared:
            return pattern(rngs)
        return stack(pattern, rngs, segment.repeats, "layers" if index == longest(self.plan) else "other_layers")

    def __call__(
        self, tokens_BT: jax.Array, context: Context, execution: Execution, caches: Any = None
    ) -> tuple[jax.Array, Any, Tree]:
        """Token ids [B, T] to hidden states [B, T, D] after the final norm.

        Args:
            tokens_BT: the ids.
            context: what every block is told.
            execution: how the layers run.
            caches: as `empty_caches` makes them; None in training.

        Returns:
            The hidden states, the caches with these tokens in them, and the layers' reports, nested as weights are.
        """
        x_BTD = self._embed(tokens_BT, context)
        if self.spec.position_table == "learned":
            table_SD = self.position_embedding[...].astype(x_BTD.dtype)
            x_BTD += context.layout.constrain(table_SD, "position", "activation_embed")[context.positions_BT]
        elif self.spec.position_table == "sinusoidal":
            x_BTD += sinusoidal(context.positions_BT, self.spec.emb_dim).astype(x_BTD.dtype)
        x_BTD = dropout(x_BTD, self.spec.dropout_rate, context, 2 * self._all_layers())
        x_BTD = context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")
        reports, new_caches, first_layer = {}, [], 0
        for index, (segment, blocks) in enumerate(zip(self.plan, self.segments, strict=True)):
            segment_caches = None if caches is None else caches[index]
            x_BTD, segment_caches, reports[index] = run_segment(
                segment, blocks, x_BTD, context, segment_caches, first_layer, execution, index == longest(self.plan)
            )
            new_caches.append(segment_caches)
            first_layer += len(segment.pattern) * segment.repeats
        return self.final_norm(x_BTD), None if caches is None else new_caches, {"segments": reports}

    def predict_ahead(
        self, hidden_BTD: jax.Array, ahead: Sequence[jax.Array], context: Context, execution: Execution
    ) -> tuple[list[jax.Array], Tree]:
        """What the extra prediction layers make of the decoder's hidden states [B, T, D].

        Args:
            hidden_BTD: from `__call__`.
            ahead: of each layer the tokens [B, T] that stand 1, 2, ... further on than the states' own.
            context: as in `__call__`.
            execution: as in `__call__`.

        Returns:
            Hidden states for `logits`: entry k - 1 at position t predicts token t + k + 1, of a row's same segment.
            And the layers' reports.
        """
        predicted, reports = [], {}
        for index, (layer, tokens_BT) in enumerate(zip(self.mtp, ahead, strict=True)):
            embedded_BTD = self._embed(tokens_BT, context)
            run_layer = execution.remat(functools.partial(layer, context=context), repeats=1)
            hidden_BTD, reports[index] = run_layer(hidden_BTD, embedded_BTD, layer=len(self.spec.layers) + index)
            predicted.append(layer.final_norm(hidden_BTD))
        return predicted, {"mtp": reports}

    def logits(self, hidden_BTD: jax.Array, context: Context) -> jax.Array:
        """Hidden states [B, T, D] to float32 logits [B, T, V]; those past the vocabulary's end are about -1e38."""
        hidden_BTD = context.gathered(hidden_BTD)
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

    def _embed(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        # Gathered over fsdp before it is looked up, as every weight is: else XLA replicates the result.
        table_VD = context.layout.constrain(self.embedding[...].astype(self.spec.dtype), "vocab", None)
        x_BTD = looked_up(table_VD, tokens_BT, context.layout)
        x_BTD = context.layout.constrain(x_BTD, "batch", "length", "activation_embed")  # the parts of a block
        # Gemma's own code has the factor in the compute dtype too.
        return x_BTD * jnp.sqrt(float(self.spec.emb_dim)).astype(x_BTD.dtype) if self.spec.scale_embedding else x_BTD

    def _all_layers(self) -> int:
        return len(self.spec.layers) + self.spec.prediction_layers


def empty_caches(spec: ModelSpec, rows: int, length: int) -> list[list[cache.Cache]]:
    """Caches for `rows` texts of up to `length` tokens: a segment, a pattern layer, arrays of [repeats, B, S, ...]."""

    def repeated(layer: LayerSpec, repeats: int) -> cache.Cache:
        one = cache.empty(layer, spec, rows, length)
        return {name: jnp.zeros((repeats, *array.shape), array.dtype) for name, array in one.items()}

    return [[repeated(layer, segment.repeats) for layer in segment.pattern] for segment in spec.plan]


def _normalised(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
