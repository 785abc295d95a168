"""The decoder: an embedding, groups of repeated layers, a final norm. `__call__` computes hidden states, not logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from src.model.attention_kernels.scores import MASKED
from src.model.block import Block
from src.model.execution import Execution
from src.model.forward_context import ForwardContext
from src.model.layers import run_layer_group
from src.model.lookup import look_up
from src.model.norm import Norm
from src.model.params import Rngs, Tree, matmul, stack, weight
from src.model.spec import ModelSpec


class OutputPart(NamedTuple):
    """Output projection to a part of the vocabulary. Stacked parts of the whole vocabulary have a leading dim."""

    kernel_DV: Array
    bias_V: Array
    ids_V: Array  # token ids


class Decoder(nnx.Module):
    """The whole model that a `ModelSpec` describes."""

    def __init__(self, spec: ModelSpec, rngs: Rngs) -> None:
        self.spec = spec
        V, D, dtype = spec.padded_vocab_size, spec.emb_dim, spec.weight_dtype
        # Untied embeddings start with a standard deviation of 1, like a norm's output. A tied table is also the output
        # projection, which sums over D, so its variance is 1 / D.
        fan_in = (1,) if spec.logits_via_embedding else ()
        self.embedding = weight(rngs, (V, D), ("vocab", "embed"), dtype, fan_in=fan_in)
        if spec.added_positions == "learned":
            shape = spec.trainable_position_size, D
            self.position_embedding = weight(rngs, shape, ("position", "embed"), dtype, fan_in=(1,))
        # The blocks of the layer groups; checkpoints use the name segments.
        self.segments = nnx.List([_group_blocks(spec, index, rngs) for index in range(len(spec.layer_groups))])
        self.final_norm = Norm(spec.final_norm, (D,), dtype, rngs)
        if not spec.logits_via_embedding:
            self.output = weight(rngs, (D, V), ("embed", "vocab"), dtype, fan_in=(0,))
        bias = {"constant": 0.0, "decays": False}
        self.output_bias = weight(rngs, (V,), ("vocab",), dtype, **bias) if spec.logits_bias else None
        self.mtp = nnx.List([])
        if spec.mtp_num_layers:
            from src.model.mtp import mtp_layers

            self.mtp = mtp_layers(spec, rngs)

    def __call__(
        self, tokens_BT: Array, context: ForwardContext, execution: Execution, caches: Any = None
    ) -> tuple[Array, Any, Tree]:
        """Maps token ids [B, T] to hidden states [B, T, D] after the final norm.

        Also returns the updated caches (nested as in `empty_caches` of src/extras/generation/generate.py, but each None
        without `caches`), and the layers' reports in the nesting of the weights.
        """
        spec = self.spec
        with jax.named_scope("embedding"):
            x_BTD = self._embed(tokens_BT, context)
            if spec.added_positions == "learned":
                table_SD = self.position_embedding[...].astype(x_BTD.dtype)
                x_BTD += look_up(table_SD, context.positions_BT, context.layout, "position")
            elif spec.added_positions == "sinusoidal":
                from src.model.sinusoidal import sinusoidal

                x_BTD += sinusoidal(context.positions_BT, spec.emb_dim).astype(x_BTD.dtype)
            site = 2 * (len(spec.layers) + spec.mtp_num_layers)  # after the sites of all blocks
            x_BTD = context.dropout(x_BTD, spec.embedding_dropout, site)
            x_BTD = context.layout.constrain(x_BTD, "batch", "norm_length", "activation_embed")
        reports, new_caches, first_layer = {}, [], 0
        for index, (group, blocks) in enumerate(zip(spec.layer_groups, self.segments, strict=True)):
            old = caches[index] if caches else [None] * len(group.pattern)
            staged = index == spec.largest_group
            x_BTD, new, reports[index] = run_layer_group(
                group, blocks, x_BTD, context, old, first_layer, execution, staged
            )
            new_caches.append(new)
            first_layer += len(group.pattern) * group.repeats
        graphdef, norm = nnx.split(self.final_norm)
        x_BTD, norm = context.grad_barrier(x_BTD, norm)
        return nnx.merge(graphdef, norm)(x_BTD), new_caches, {"segments": reports}

    def mtp_hidden_states(
        self, hidden_BTD: Array, mtp_tokens: Sequence[Array], context: ForwardContext, execution: Execution
    ) -> tuple[list[Array], Tree]:
        """Runs the `mtp` layers, if any, on `__call__`'s hidden states [B, T, D]; returns as `run_mtp_layers` does.

        `mtp_tokens` are each layer's input tokens [B, T].
        """
        if not self.spec.mtp_num_layers:
            return [], {"mtp": {}}
        from src.model.mtp import run_mtp_layers

        embedded = (self._embed(tokens_BT, context) for tokens_BT in mtp_tokens)
        return run_mtp_layers(self.mtp, hidden_BTD, embedded, context, execution, len(self.spec.layers))

    @jax.named_scope("output_projection")
    def logits(self, hidden_BTD: Array, context: ForwardContext, part: OutputPart | None = None) -> Array:
        """Maps hidden states [B, T, D] to float32 logits [B, T, V]; those past the vocabulary's end are about -2e38.

        With `part`, a part of the output projection's weight, V is that part's tokens.
        """
        spec = self.spec
        tied = spec.logits_via_embedding and part is None
        kernel = part.kernel_DV if part else (self.embedding if tied else self.output)[...]
        hidden_BTD, kernel = context.grad_barrier(hidden_BTD, kernel)
        hidden_BTD = context.all_gather_sequence(hidden_BTD)
        logits_BTV = matmul(hidden_BTD, kernel, "BTD,VD->BTV" if tied else "BTD,DV->BTV")
        logits_BTV = context.layout.constrain(logits_BTV, "batch", "length", "vocab").astype(jnp.float32)
        if spec.logits_scaling != 1:
            logits_BTV /= spec.logits_scaling
        if self.output_bias is not None:
            logits_BTV += (part.bias_V if part else self.output_bias[...]).astype(jnp.float32)
        if cap := spec.final_logits_soft_cap:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        if spec.padded_vocab_size == spec.vocab_size:
            return logits_BTV  # XLA's CPU compiler would copy the logits to apply a mask that is always true
        ids_V = part.ids_V if part else jnp.arange(spec.padded_vocab_size)
        return jnp.where(ids_V < spec.vocab_size, logits_BTV, MASKED)

    def _embed(self, tokens_BT: Array, context: ForwardContext) -> Array:
        x_BTD = look_up(self.embedding[...].astype(self.spec.dtype), tokens_BT, context.layout, "vocab")
        x_BTD = context.layout.constrain(x_BTD, "batch", "length", "activation_embed")
        scale = self.spec.embedding_multiplier * (self.spec.emb_dim**0.5 if self.spec.scale_embedding else 1.0)
        return x_BTD if scale == 1 else x_BTD * jnp.asarray(scale, x_BTD.dtype)  # rounded, as in Gemma's own code


def _group_blocks(spec: ModelSpec, index: int, rngs: Rngs) -> nnx.Module:
    group = spec.layer_groups[index]

    def pattern(rngs: Rngs) -> nnx.List:
        return nnx.List([Block(layer, spec, rngs) for layer in group.pattern])

    if group.shared:
        return pattern(rngs)
    return stack(pattern, rngs, group.repeats, "layers" if index == spec.largest_group else "other_layers")
