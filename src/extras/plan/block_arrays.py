"""Lists the arrays that a block stores for each token, from its traced forward and backward pass on one device."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from src.extras.aot.memory import stored_in_backward, stored_in_forward
from src.extras.plan.placed import Placed, one_device
from src.model.block import Block
from src.model.execution import Execution
from src.model.forward_context import ForwardContext
from src.model.params import abstract, values
from src.model.parts import layer_costs
from src.model.spec import LayerSpec, ModelSpec

ROWS = 101  # sequences of the traced batch; a prime unlikely to divide a weight's size, so that it marks activations


class TokenArray(NamedTuple):
    """An array of activations: its bytes per token, and the logical axis that shards it besides batch and length."""

    bytes: float
    axis: str  # such as heads or mlp; norm_length if it is as wide as the residual stream; length if there is no other
    of_experts: bool  # it has a row for each expert that a token is sent to


class BlockArrays(NamedTuple):
    """The arrays of activations that a block stores."""

    saved: tuple[TokenArray, ...]  # kept from the forward pass for the backward pass
    saved_on_host: tuple[TokenArray, ...]  # the same in host memory
    computed: tuple[TokenArray, ...]  # stored during the backward pass


def block_arrays(layer: LayerSpec, placed: Placed, execution: Execution) -> BlockArrays:
    """Lists the arrays that a layer stores under the remat policy of `execution`.

    Traces are cached. Apart from the kernel, they depend on the mesh only by whether it shards the feed-forward width.
    """
    custom = tuple(sorted(execution.remat_custom.items()))
    in_halves = execution.mlp_in_halves and placed.layout.shards("mlp") == 1
    device = (placed.layout.platform, placed.layout.device.device_kind)
    key = (layer, placed.spec, execution.remat_policy, custom, placed.kernel, placed.packed, placed.length, *device)
    if (*key, in_halves) not in _blocks:
        _blocks[*key, in_halves] = _trace_block(layer, placed, execution, in_halves)
    return _blocks[*key, in_halves]


_blocks: dict[tuple[Any, ...], BlockArrays] = {}


def _trace_block(layer: LayerSpec, placed: Placed, execution: Execution, in_halves: bool) -> BlockArrays:
    spec, length, layout = placed.spec, placed.length, one_device(placed.layout)
    graphdef, declarations = abstract(functools.partial(Block, layer, spec))
    weights = values(declarations)

    def run(stacked: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        context = ForwardContext(
            ids, ids, layout, placed.kernel, placed.packed, grad_barriers=execution.grad_barriers,
            separate_factors=execution.for_gpu, mlp_in_halves=in_halves,
            recomputes_activated=execution.recomputes_activated,
        )  # fmt: skip
        block = execution.remat(lambda x, weights: nnx.merge(graphdef, weights)(x, context, None, 0)[0], 2)
        return jnp.sum(jax.lax.scan(lambda x, weights: (block(x, weights), None), x, stacked)[0].astype(jnp.float32))

    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), weights)
    x = jax.ShapeDtypeStruct((ROWS, length, spec.emb_dim), spec.dtype)
    jaxpr = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(
        stacked, x, jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
    ).jaxpr
    classify = functools.partial(_token_array, layer=layer, spec=spec, length=length)
    saved, on_host = (
        [classify(array.shape[1:], array) for array in stored_in_forward(jaxpr, space)]
        for space in (jax.memory.Space.Device, jax.memory.Space.Host)
    )
    computed = [classify(array.shape, array) for array in stored_in_backward(jaxpr, layout.platform)]
    return BlockArrays(*(tuple(filter(None, arrays)) for arrays in (saved, on_host, computed)))


def _token_array(
    shape: tuple[int, ...], array: Any, *, layer: LayerSpec, spec: ModelSpec, length: int
) -> TokenArray | None:
    """Describes an array, of `shape` in one layer, as activations; None if ROWS does not divide its size."""
    if array.size % ROWS:
        return None
    size = math.prod(shape) * array.dtype.itemsize / (ROWS * length)
    of_experts = ROWS not in shape[:1]  # their first dim merges sequences, tokens and chosen experts
    for axis, sizes in [item for part in layer_costs(layer).values() for item in part.sharded.items()]:
        if set(sizes).intersection(shape[1:]):
            return TokenArray(size, axis, of_experts)
    is_stream = spec.emb_dim in shape[1:] and not of_experts
    return TokenArray(size, "norm_length" if is_stream else "length", of_experts)
