"""Rearranges a loaded model's weights for decoding: an array per layer, no pipeline stages, and int8 on request."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from src.extras.generation.generate import unsplit_rows
from src.extras.generation.unstaged import unstaged
from src.model import params
from src.model.decoder import Decoder
from src.model.execution import Execution
from src.model.params import Weights
from src.model.selection import Quantization
from src.model.spec import LayerGroup
from src.step.matrices import matrices
from src.step.plan import StepPlan


def unrolled(plan: StepPlan, weights: Weights) -> tuple[StepPlan, Weights]:
    """Returns a plan and weights with separate arrays for each layer, for speed; deletes the stacked arrays.

    The plan no longer shards sequences, or layers over pipeline stages. It must not have adapters.
    """
    assert not plan.step.lora_rank
    # A loop over stacked weights would copy each layer's weights out of the stack for every token, which costs more
    # than the token's own work: reading every weight once.
    spec = dataclasses.replace(plan.spec, stacked=False)
    graphdef, _ = params.abstract(lambda rngs: Decoder(spec, rngs))
    tree = weights.merged()
    tree["segments"] = {
        index: tree["segments"][index] if group.shared else _unstacked(tree["segments"][index], group)
        for index, group in enumerate(plan.spec.layer_groups)
    }
    layout, execution = unsplit_rows(plan.layout), Execution(scan_layers=False)
    changes = {"spec": spec, "graphdef": graphdef, "layout": layout, "execution": execution}
    quantization = _unrolled_quantization(plan.quantization, plan.spec.layer_groups)
    return dataclasses.replace(plan, quantization=quantization, **changes), Weights(tree)


def quantize_at_rest(plan: StepPlan, weights: Weights, loaded: StepPlan) -> tuple[StepPlan, Weights]:
    """Quantizes the matmul weights of `unrolled`'s plan and weights to int8; deletes the old arrays.

    Matmuls still run in the activations' dtype. `loaded` is the plan before unrolling. Raises UserError as
    `select_at_rest` does.
    """
    from src.model.quantization import select_at_rest, store_in_8_bits

    _, declarations = params.abstract(lambda rngs: Decoder(loaded.spec, rngs))
    chosen = _unrolled_quantization(select_at_rest(plan.step, declarations), loaded.spec.layer_groups)
    tree = store_in_8_bits(chosen, weights.merged(), plan.layout.platform == "cpu")
    return dataclasses.replace(plan, quantization=Quantization()), Weights(tree)


def in_activation_dtype(plan: StepPlan, weights: Weights) -> Weights:
    """Casts the weights of matmuls and lookups to `dtype` if it is narrower, so that no step has to.

    Deletes the old arrays. `plan` and `weights` are from `unrolled`. Routers and 8-bit weights are not cast; with
    `quantization`, no weights are, because its matmuls quantize the weights as they are.
    """
    if plan.quantization.kind:
        return weights
    _, declarations = params.abstract(lambda rngs: Decoder(plan.spec, rngs))
    dims = params.by_path(matrices(declarations, plan.spec.vocab_size))
    flat, dtype = params.by_path(weights.merged()), jnp.dtype(plan.spec.dtype)
    for path, leaf in flat.items():
        # A router's weight is multiplied in float32.
        cast = isinstance(leaf, jax.Array) and dims[path].reduction and path[-1] != "router"
        if cast and leaf.dtype.itemsize > dtype.itemsize:
            flat[path] = leaf.astype(dtype)
            leaf.delete()
    return Weights(params.nested(flat))


def _unstacked(blocks: dict[int, params.Tree], group: LayerGroup) -> dict[int, params.Tree]:
    """Splits a group's weights, [repeats, ...] by pattern position, into [1, ...] by layer; deletes the former."""
    layers: dict[int, dict[tuple[Any, ...], jax.Array]] = {}
    for position, block in blocks.items():
        for path, leaf in params.by_path(block).items():
            sharding = unstaged(leaf.sharding, (1, *leaf.shape[1:]))
            for repeat, layer in enumerate(_split(leaf, sharding)):
                layers.setdefault(repeat * len(group.pattern) + position, {})[path] = layer
            leaf.delete()  # else the whole model would be in memory twice
    return {number: params.nested(layer) for number, layer in layers.items()}


@functools.partial(jax.jit, static_argnames="sharding")
def _split(stacked: jax.Array, sharding: jax.sharding.Sharding) -> list[jax.Array]:
    return [jax.lax.with_sharding_constraint(layer, sharding) for layer in jnp.split(stacked, len(stacked))]


def _unrolled_quantization(quantization: Quantization, groups: Sequence[LayerGroup]) -> Quantization:
    """Adapts a quantization to a model whose layers are not stacked, but have their own arrays, [1, ...] each."""
    matmuls = {}
    for path, matmul in quantization.matmuls.items():
        if path[0] != "segments" or groups[path[1]].shared:
            matmuls[path] = matmul
            continue
        _, segment, position, *rest = path
        for repeat in range(groups[segment].repeats):
            matmuls["segments", segment, repeat * len(groups[segment].pattern) + position, *rest] = matmul
    return dataclasses.replace(quantization, matmuls=matmuls)
