"""The decoder: an embedding, groups of repeated layers, a final norm; hidden states out, logits on request."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from src.model.attention import Attention
from src.model.attention_kernels.choose import choose_kernel
from src.model.attention_kernels.scores import MASKED, ScoreSpec
from src.model.cache import Cache, CacheArray
from src.model.costs import Costs
from src.model.embeddings import embed_tokens, sinusoidal
from src.model.feed_forward import FeedForward
from src.model.forward_context import ForwardContext
from src.model.latent_attention import LatentAttention
from src.model.layers import Execution, run_layer_group
from src.model.moe.layer import Experts
from src.model.norm import Norm
from src.model.params import Tree, matmul, stack, weight
from src.model.spec import LayerSpec, ModelSpec
from src.parallel.mesh import Layout


def mixer(layer: LayerSpec) -> type[Attention] | type[LatentAttention]:
    """Returns the module that mixes a layer's tokens. Another kind of mixer needs the same methods."""
    return LatentAttention if layer.attention_type == "mla" else Attention


def feed_forward(layer: LayerSpec) -> type[FeedForward] | type[Experts]:
    """Returns the module of a layer's feed-forward part."""
    return Experts if layer.has_experts else FeedForward


def layer_costs(layer: LayerSpec) -> dict[str, Costs]:
    """Returns the costs of a layer's parts, by the names that their weights have in a block."""
    return {"attention": mixer(layer).costs(layer), "feed_forward": feed_forward(layer).costs(layer)}


def attention_scores(spec: ModelSpec) -> list[ScoreSpec]:
    """Returns what the attention kernels of a model's layers compute."""
    return [scores for layer in dict.fromkeys(spec.layers) if (scores := layer_costs(layer)["attention"].scores)]


def kernel_for(attention: str, spec: ModelSpec, length: int, layout: Layout) -> str:
    """Returns the attention kernel for a model's rows of `length` tokens on a layout; raises as `choose_kernel`."""
    platform = layout.mesh.devices.flat[0].platform
    return choose_kernel(attention, platform, attention_scores(spec), spec.dtype, length, layout)


class Block(nnx.Module):
    """One layer: attention, then a feed-forward layer or experts, each normalised before, after or both."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: nnx.Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        # 2 L branches add up in the residual stream: each starts smaller (Radford et al. 2019, section 2.3).
        out_scale = 1.0 / math.sqrt(2 * len(model.layers))
        self.dropout_rate = spec.dropout_rate
        self.attention_norm = Norm(spec, (D,), dtype, rngs) if spec.norm_before else None
        self.attention = mixer(spec)(spec, out_scale, dtype, rngs)
        self.attention_out_norm = Norm(spec, (D,), dtype, rngs) if spec.norm_after else None
        self.feed_forward_norm = Norm(spec, (D,), dtype, rngs) if spec.norm_before else None
        self.feed_forward = feed_forward(spec)(spec, out_scale, dtype, rngs)
        self.feed_forward_out_norm = Norm(spec, (D,), dtype, rngs) if spec.norm_after else None

    def __call__(
        self, x_BTD: Array, context: ForwardContext, cache: Cache | None, layer: Array
    ) -> tuple[Array, Cache | None, Tree]:
        """Maps [B, T, D] to [B, T, D] as block number `layer` of the model; returns the cache and a report too."""
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
        return x_BTD, cache, {"feed_forward": report}

    def _add(self, x_BTD: Array, out_BTD: Array, context: ForwardContext, site: Array) -> Array:
        x_BTD = x_BTD + context.dropout(out_BTD, self.dropout_rate, site)
        return context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")


class MtpLayer(nnx.Module):
    """Predicts one more token: joins hidden states with the next tokens' embeddings (DeepSeek-V3, section 2.2)."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, rngs: nnx.Rngs) -> None:
        D, dtype = model.emb_dim, model.weight_dtype
        self.embedding_norm = Norm(spec, (D,), dtype, rngs)
        self.hidden_norm = Norm(spec, (D,), dtype, rngs)
        self.projection = weight(rngs, (2 * D, D), ("embed", None), dtype, fan_in=(0,))
        self.block = Block(spec, model, rngs)
        self.final_norm = Norm(spec, (D,), dtype, rngs)

    def __call__(
        self, hidden_BTD: Array, embedded_BTD: Array, context: ForwardContext, layer: Array
    ) -> tuple[Array, Tree]:
        """Maps hidden states [B, T, D] and the embeddings of the tokens one further on to hidden states [B, T, D]."""
        joined_BTD = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
        x_BTD = matmul(joined_BTD, self.projection[...], "BTC,CD->BTD")
        x_BTD, _, report = self.block(x_BTD, context, None, layer)
        return x_BTD, {"block": report}


class Decoder(nnx.Module):
    """The whole model of a `ModelSpec`."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.spec = spec
        V, D, dtype = spec.padded_vocab_size, spec.emb_dim, spec.weight_dtype
        # As an input its values are of size 1, as a norm's output is; tied, it is also a projection that sums over D.
        fan_in = (1,) if spec.logits_via_embedding else ()
        self.embedding = weight(rngs, (V, D), ("vocab", "embed"), dtype, fan_in=fan_in)
        if spec.position_type == "learned":
            shape = (spec.trainable_position_size, D)
            self.position_embedding = weight(rngs, shape, ("position", "embed"), dtype, fan_in=(1,))
        self.segments = nnx.List([_group_blocks(spec, index, rngs) for index in range(len(spec.layer_groups))])
        self.final_norm = Norm(spec, (D,), dtype, rngs)
        if not spec.logits_via_embedding:
            self.output = weight(rngs, (D, V), ("embed", "vocab"), dtype, fan_in=(0,))
        self.mtp = nnx.List([MtpLayer(spec.layers[-1], spec, rngs) for _ in range(spec.mtp_num_layers)])

    def __call__(
        self, tokens_BT: Array, context: ForwardContext, execution: Execution, caches: Any = None
    ) -> tuple[Array, Any, Tree]:
        """Maps token ids [B, T] to hidden states [B, T, D] after the final norm.

        Returns also the caches (of `empty_caches`; no arrays in training) with these tokens in them, and the layers'
        reports, nested as weights are.
        """
        with jax.named_scope("embedding"):
            x_BTD = self._embed(tokens_BT, context)
            if self.spec.position_type == "learned":
                table_SD = self.position_embedding[...].astype(x_BTD.dtype)
                x_BTD += context.layout.constrain(table_SD, "position", "activation_embed")[context.positions_BT]
            elif self.spec.position_type == "sinusoidal":
                x_BTD += sinusoidal(context.positions_BT, self.spec.emb_dim).astype(x_BTD.dtype)
            site = 2 * (len(self.spec.layers) + self.spec.mtp_num_layers)  # after those of all blocks
            x_BTD = context.dropout(x_BTD, self.spec.dropout_rate, site)
            x_BTD = context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")
        reports, new_caches, first_layer = {}, [], 0
        for index, (group, blocks) in enumerate(zip(self.spec.layer_groups, self.segments, strict=True)):
            old = caches[index] if caches else [None] * len(group.pattern)
            staged = index == self.spec.largest_group
            x_BTD, new, reports[index] = run_layer_group(
                group, blocks, x_BTD, context, old, first_layer, execution, staged
            )
            new_caches.append(new)
            first_layer += len(group.pattern) * group.repeats
        return self.final_norm(x_BTD), new_caches, {"segments": reports}

    def mtp_hidden_states(
        self, hidden_BTD: Array, mtp_tokens: Sequence[Array], context: ForwardContext, execution: Execution
    ) -> tuple[list[Array], Tree]:
        """Runs the multi-token prediction layers on `__call__`'s hidden states [B, T, D].

        Each takes the tokens [B, T] that stand 1, 2, ... further on than the states' own. Returns hidden states for
        `logits`, whose entry k - 1 at position t predicts token t + k + 1 of the same segment, and the layers' reports.
        """
        predicted, reports = [], {}
        for index, (layer, tokens_BT) in enumerate(zip(self.mtp, mtp_tokens, strict=True)):
            embedded_BTD = self._embed(tokens_BT, context)
            run_layer = execution.remat(functools.partial(layer, context=context), repeats=1)
            hidden_BTD, reports[index] = run_layer(hidden_BTD, embedded_BTD, layer=len(self.spec.layers) + index)
            predicted.append(layer.final_norm(hidden_BTD))
        return predicted, {"mtp": reports}

    @jax.named_scope("output_projection")
    def logits(self, hidden_BTD: Array, context: ForwardContext) -> Array:
        """Maps hidden states [B, T, D] to float32 logits [B, T, V]; those past the vocabulary's end are about -1e38."""
        hidden_BTD = context.all_gather_sequence(hidden_BTD)
        if self.spec.logits_via_embedding:
            logits_BTV = matmul(hidden_BTD, self.embedding[...], "BTD,VD->BTV")
        else:
            logits_BTV = matmul(hidden_BTD, self.output[...], "BTD,DV->BTV")
        logits_BTV = context.layout.constrain(logits_BTV, "batch", "length", "vocab").astype(jnp.float32)
        if cap := self.spec.final_logits_soft_cap:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        in_vocabulary = jnp.arange(self.spec.padded_vocab_size) < self.spec.vocab_size
        return jnp.where(in_vocabulary, logits_BTV, MASKED)

    def _embed(self, tokens_BT: Array, context: ForwardContext) -> Array:
        # Gathered over fsdp before the lookup, as every weight is: otherwise XLA replicates the result.
        table_VD = context.layout.constrain(self.embedding[...].astype(self.spec.dtype), "vocab", None)
        x_BTD = embed_tokens(table_VD, tokens_BT, context.layout)
        x_BTD = context.layout.constrain(x_BTD, "batch", "length", "activation_embed")
        # Gemma's own code has the factor in the compute dtype too.
        return x_BTD * jnp.sqrt(float(self.spec.emb_dim)).astype(x_BTD.dtype) if self.spec.scale_embedding else x_BTD


def cache_arrays(spec: ModelSpec, rows: int, length: int) -> list[list[dict[str, CacheArray]]]:
    """Declares the caches for `rows` texts of up to `length` tokens, by layer group and pattern position.

    Each array has a first dim of the group's repeats.
    """

    def declare(layer: LayerSpec, repeats: int) -> dict[str, CacheArray]:
        arrays = mixer(layer).cache_arrays(layer, rows, length)
        return {name: CacheArray((repeats, *shape), (None, *axes)) for name, (shape, axes) in arrays.items()}

    return [[declare(layer, group.repeats) for layer in group.pattern] for group in spec.layer_groups]


def empty_caches(spec: ModelSpec, rows: int, length: int) -> list[list[Cache]]:
    """Makes the caches that `cache_arrays` declares, of zeros in the compute dtype."""
    return [
        [{name: jnp.zeros(array.shape, spec.dtype) for name, array in layer.items()} for layer in pattern]
        for pattern in cache_arrays(spec, rows, length)
    ]


def _group_blocks(spec: ModelSpec, index: int, rngs: nnx.Rngs) -> nnx.Module:
    group = spec.layer_groups[index]

    def pattern(rngs: nnx.Rngs) -> nnx.List:
        return nnx.List([Block(layer, spec, rngs) for layer in group.pattern])

    if group.shared:
        return pattern(rngs)
    return stack(pattern, rngs, group.repeats, "layers" if index == spec.largest_group else "other_layers")


def _normalise(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
