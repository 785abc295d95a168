"""Estimates what fills a device's memory in a training step, before the step is compiled."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from src.model.attention_kernels.blocked import TILE
from src.model.attention_kernels.cudnn import workspace_bytes
from src.model.execution import Execution
from src.model.flops import all_layers
from src.model.moe.dispatch import BUFFER_SLACK
from src.model.params import by_path
from src.model.parts import attention_scores, layer_costs
from src.model.spec import ModelSpec
from src.parallel.mesh import MeshLayout, mesh_axes_of
from src.step.plan import StepPlan
from src.step.trace import TracedTrainStep

SAVED, LOGITS = "kept for the backward pass", "logits and their gradient"
# Only results of these operations are stored; others are fused into their consumers.
_STORED = ("dot_general", "ragged_dot_general", "pallas_call", "shard_map", "custom_partitioning")
# cuBLAS reads inputs of these from memory, so on GPUs results of other operations are stored too if they are such
# inputs, unless the operation only moves elements.
_MATMULS = ("dot_general", "ragged_dot_general")
_MOVES = ("reshape", "transpose", "broadcast_in_dim")
# A block's gathered weights count this often on a GPU: the next block's weights are gathered meanwhile, and a block's
# gradients are held until they are scattered.
GATHERED_ON_GPU = 3
# Operations that only wrap part of a program.
_WRAPPERS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


class Memory(NamedTuple):
    """Bytes of one device by purpose: a step's arguments, which `memory` knows exactly, and estimated temporaries."""

    arguments: dict[str, int]
    temporaries: dict[str, int]
    on_host: int  # the optimizer's state in host memory, not included in `arguments`
    saved_on_host: int  # arrays in host memory that are kept for the backward pass, not included in `temporaries`

    @property
    def all_on_host(self) -> int:
        """Bytes in host memory, of the optimizer and of arrays for the backward pass."""
        return self.on_host + self.saved_on_host

    @property
    def total(self) -> int:
        """Estimated peak bytes: arguments, saved activations, and the larger of the loss's and a block's temporaries.

        The loss has the logits. A block's backward pass has gradients, its gathered weights, and what it computes.
        """
        saved, logits = self.temporaries[SAVED], self.temporaries[LOGITS]
        block = sum(self.temporaries.values()) - saved - logits
        return sum(self.arguments.values()) + saved + max(logits, block)


def memory(traced: TracedTrainStep) -> Memory:
    """Computes a step's memory from its shapes, shardings and traced program, without the compiler's own buffers."""
    plan, jaxpr = traced.plan, traced.jax_traced.jaxpr.jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # the compiled program drops unused arguments
    leaves, tree = jax.tree.flatten((traced.state, traced.batch, traced.hparams))
    leaves = [leaf if is_used else None for leaf, is_used in zip(leaves, used, strict=True)]
    state, batch, hparams = tree.unflatten(leaves)
    weights, micro_batches = traced.state.weights.trainable, plan.accumulation.micro_batches
    gradients = device_bytes(weights)
    if micro_batches > 1:  # plus the accumulated sum
        gradients += device_bytes(jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), weights))
    # One tile of one micro-batch in the matmul dtype, as TPUs and GPUs store it.
    logits = traced.tokens // micro_batches // plan.step.num_vocab_tiling * plan.spec.padded_vocab_size
    logits *= jnp.dtype(plan.spec.dtype).itemsize
    return Memory(
        arguments={
            "weights": device_bytes(state.weights),
            "optimizer": device_bytes(state.opt),
            "batch": device_bytes(batch),
            **({"average of the weights": device_bytes(state.ema)} if state.ema else {}),
            "scalars": device_bytes((state.step, state.spikes, hparams)),
        },
        temporaries={
            SAVED: _saved_bytes(traced, jax.memory.Space.Device),
            LOGITS: 2 * (logits // math.prod(plan.layout.shards(axis) for axis in ("batch", "length", "vocab"))),
            "gradients": gradients,
            "a block's weights, gathered": _gathered_bytes(traced.plan),
            "what a block computes": _block_bytes(traced),
        },
        on_host=device_bytes(state.opt, on_host=True),
        saved_on_host=_saved_bytes(traced, jax.memory.Space.Host),
    )


def scores_bytes(traced: TracedTrainStep) -> int:
    """Returns the bytes of attention scores that a layer holds on a device at one time; 0 for a fused kernel."""
    plan, layout, (rows, length) = traced.plan, traced.plan.layout, traced.batch["tokens"].shape
    whole, tile = length * length // layout.shards("length"), TILE[layout.platform] ** 2
    pairs = {"dot_product": whole, "blocked": min(whole, tile)}.get(plan.kernel, 0)
    heads = max((scores.num_heads for scores in attention_scores(plan.spec)), default=0) // layout.shards("heads")
    stage = plan.execution.schedule.micro_batches if plan.execution.schedule else 1
    return rows // plan.accumulation.micro_batches // stage // layout.shards("batch") * heads * pairs * 4


def attention_workspace(
    spec: ModelSpec, execution: Execution, kernel: str, layout: MeshLayout, rows: int, length: int, packed: bool
) -> int:
    """Returns the bytes of cuDNN's workspace on a device; a compiler without a GPU does not count them.

    0 for kernels other than cudnn_flash. `rows` is the number of sequences in a micro-batch, over all devices.
    """
    if kernel != "cudnn_flash":
        return 0
    rows //= execution.schedule.micro_batches if execution.schedule else 1
    mixers = [layer_costs(layer)["attention"] for layer in all_layers(spec)]
    return max(
        (
            workspace_bytes(rows, length, costs.scores, min(costs.sharded["heads"]), packed, layout)
            for costs in mixers
            if costs.scores
        ),
        default=0,
    )


def device_bytes(tree: Any, on_host: bool = False) -> int:
    """Counts the bytes of one device's shards, in its own or (`on_host`) in host memory; replicated arrays in full."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if (getattr(sharding, "memory_kind", None) == "pinned_host") == on_host:
            shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _saved_bytes(traced: TracedTrainStep, space: jax.memory.Space) -> int:
    # Only scanned layers are counted: loops stack their arrays.
    schedule, total = traced.plan.execution.schedule, 0
    for array in stored_in_forward(traced.jax_traced.jaxpr.jaxpr, space):
        shape = array.shape[1:]  # without the loop dim; a pipeline loops over iterations, and inside over layers
        in_pipeline = schedule and array.shape[0] == schedule.iterations and not _is_activation(traced, shape)
        if in_pipeline and _is_activation(traced, shape[1:]):
            shape = shape[1:]
        total += array.size * array.dtype.itemsize // _shards(traced, shape, between_blocks=True)
    return total


def stored_in_forward(jaxpr: Jaxpr, space: jax.memory.Space) -> Iterator[Any]:
    """Yields the abstract arrays saved in the memory `space` for the backward pass.

    They are recognized as arrays that loops stack, an entry per iteration, and reversed loops read.
    """
    return (array for array in _saved(jaxpr, set()) if array.memory_space == space)


def stored_in_backward(jaxpr: Jaxpr, platform: str) -> Iterator[Any]:
    """Yields the abstract outputs of matmuls and kernels in one iteration of each reversed loop.

    On GPUs it also yields the matmuls' inputs that other operations compute.
    """
    return (array for body in _backward_bodies(jaxpr) for array in _matmuls(body, platform == "gpu"))


def _shards(traced: TracedTrainStep, shape: tuple[int, ...], between_blocks: bool) -> int:
    """Infers an array's number of shards from its shape: a weight's, or an activation's [rows, length, ...].

    An array as wide as the residual stream is sharded as that is between blocks if `between_blocks`. Otherwise it is a
    matmul's output: a sum over heads or hidden units, which is whole until it is scattered.
    """
    layout, spec = traced.plan.layout, traced.plan.spec
    if not _is_activation(traced, shape):
        return layout.shards("embed")
    replicas = layout.size(traced.plan.accumulation.manual_axes)  # the traced arrays belong to one replica
    batch_shards = layout.shards("batch") // replicas
    if shape[0] not in _rows(traced):  # an array of experts: the shards of a stage's devices, concatenated
        return layout.mesh.size // layout.shards("layers") // replicas
    costs = [part for layer in dict.fromkeys(spec.layers) for part in layer_costs(layer).values()]
    sharded = [(axis, sizes) for part in costs for axis, sizes in part.sharded.items()]
    for axis, sizes in (*sorted(sharded), ("vocab", (spec.padded_vocab_size,))):
        if set(sizes).intersection(shape[2:]):
            return batch_shards * layout.shards("length") * layout.shards(axis)
    if shape[2:] == (spec.emb_dim,) and between_blocks:
        return batch_shards * layout.shards("norm_length") * layout.shards("activation_embed")
    return batch_shards * layout.shards("length")


def _is_activation(traced: TracedTrainStep, shape: tuple[int, ...]) -> bool:
    """Tests whether an array's first dim is a micro-batch's rows, or a multiple of its tokens, as for experts."""
    # Arrays for experts come from within a `shard_map`; exchange buffers have `BUFFER_SLACK` times the room.
    if not shape:
        return False
    tokens = [rows * traced.tokens // traced.rows for rows in _rows(traced)]
    return shape[0] in _rows(traced) or any(
        shape[0] >= count and (shape[0] % count == 0 or shape[0] % (count * BUFFER_SLACK) == 0) for count in tokens
    )


def _rows(traced: TracedTrainStep) -> set[int]:
    accumulation, schedule = traced.plan.accumulation, traced.plan.execution.schedule
    rows = traced.rows // accumulation.micro_batches // traced.plan.layout.size(accumulation.manual_axes)
    return {rows, rows // schedule.micro_batches} if schedule else {rows}


def _saved(jaxpr: Jaxpr, stacked: set[Any]) -> Iterator[Any]:
    """Yields the arrays that loops stack and reversed loops read; adds stacked variables to `stacked` on the way."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"].jaxpr
            if equation.params["reverse"]:
                read = _per_iteration(equation.invars, body.invars)
                yield from (var.aval for var in read if not isinstance(var, Literal) and var in stacked)
            else:
                stacked.update(_per_iteration(equation.outvars, body.outvars))
        for inner in jaxprs_in_params(equation.params):
            in_map = equation.primitive.name == "shard_map"  # the two loops of a pipeline are each in one
            if in_map:
                _follow(stacked, equation.invars, inner.invars)
            yield from _saved(inner, stacked)
            if in_map:
                _follow(stacked, inner.outvars, equation.outvars)


def _per_iteration(outside: Sequence[Any], within: Sequence[Any]) -> Iterator[Any]:
    """Yields a loop's outer variables with one entry per iteration: their shape differs from the one within."""
    return (var for var, entry in zip(outside, within, strict=True) if var.aval.shape != entry.aval.shape)


def _follow(variables: set[Any], old: Sequence[Any], new: Sequence[Any]) -> None:
    """Adds the new names of renamed variables to `variables`."""
    pairs = zip(old, new, strict=True)
    variables.update(name for var, name in pairs if not isinstance(var, Literal) and var in variables)


def _block_bytes(traced: TracedTrainStep) -> int:
    """Returns a device's bytes of activations in `stored_in_backward`, of the reversed loop that stores the most."""
    blocks = [
        sum(
            array.size * array.dtype.itemsize // _shards(traced, array.shape, between_blocks=False)
            for array in _matmuls(body, traced.plan.layout.platform == "gpu")
            if _is_activation(traced, array.shape)
        )
        for body in _backward_bodies(traced.jax_traced.jaxpr.jaxpr)
    ]
    return max(blocks, default=0)


def _matmuls(jaxpr: Jaxpr, with_inputs: bool) -> Iterator[Any]:
    made = set[Any]()  # variables that are computed, and not yet known to be stored
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _STORED:
            yield from (var.aval for var in equation.outvars)
        elif name in _WRAPPERS:
            for inner in jaxprs_in_params(equation.params):
                yield from _matmuls(inner, with_inputs)
        elif name not in _MOVES:
            made.update(equation.outvars)
        if with_inputs and name in _MATMULS:
            read = dict.fromkeys(var for var in equation.invars if not isinstance(var, Literal) and var in made)
            yield from (var.aval for var in read)
            made.difference_update(read)


def _backward_bodies(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            if equation.primitive.name == "scan" and equation.params["reverse"]:
                yield inner
            yield from _backward_bodies(inner)


def _gathered_bytes(plan: StepPlan) -> int:
    """Returns the bytes of the largest block's weights in the compute dtype, gathered along axes that shard `embed`.

    On GPUs, they are multiplied by GATHERED_ON_GPU. Weights that are not gathered do not count.
    """
    shardings, axes, blocks = by_path(plan.shardings), by_path(plan.axes), dict[Any, int]()
    for path, leaf in by_path(plan.shapes).items():
        if path[0] == "segments":
            rule = "expert_embed" if "expert_embed" in axes[path] else "embed"
            gathered = mesh_axes_of(shardings[path].spec).intersection(plan.layout.rules[rule])
            parts = math.prod(plan.layout.mesh.shape[axis] for axis in gathered)
            shard = shardings[path].shard_shape(leaf.shape)
            size = math.prod(shard) * (parts if parts > 1 else 0)
            segment = plan.spec.layer_groups[int(path[1])]
            blocks[path[:3]] = blocks.get(path[:3], 0) + size // (1 if segment.shared else shard[0])
    times = GATHERED_ON_GPU if plan.layout.platform == "gpu" else 1
    return times * max(blocks.values()) * jnp.dtype(plan.spec.dtype).itemsize
