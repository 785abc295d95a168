"""What fills a device's memory in a training step, as far as it can be told before the step is compiled."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from src.build import Built
from src.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec
from src.model.weights import by_path


class Memory(NamedTuple):
    """Bytes of one device by what they are: the step's arguments exactly, what it makes on its way by estimate."""

    arguments: dict[str, int]
    temporaries: dict[str, int]

    @property
    def total(self) -> int:
        """Of arguments and temporaries."""
        return sum(self.arguments.values()) + sum(self.temporaries.values())


def memory(built: Built) -> Memory:
    """The parts of a step's memory that can be told from its shapes, its shardings and its traced program.

    What one block computes, and what the compiler needs beside, is in none of them.
    """
    state = built.state
    arguments = {
        "weights": device_bytes((state.trainable, state.frozen, state.stats)),
        "optimizer": device_bytes(state.opt),
        # The state's own data position is not read, so the program does not take it.
        "batch": device_bytes(built.batch),
        "scalars": device_bytes((state.step, built.hyper)),
    }
    temporaries = {
        "kept for the backward pass": kept_bytes(built),
        "gradients": device_bytes(state.trainable),
        "logits": _logits_bytes(built),
        "a block's weights, gathered": _gathered_bytes(built),
    }
    return Memory(arguments, temporaries)


def device_bytes(tree: Any) -> int:
    """Of the arrays' parts on one device; values without a sharding are on every device."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def kept_bytes(built: Built) -> int:
    """What layers keep on the device for the backward pass: arrays that a loop stacks and the reversed loop reads.

    Layers that are not scanned have no loop, and count as nothing.
    """
    layout = built.plan.layout
    micro_rows = built.rows // built.plan.micro_batches
    heads = {size for layer in built.plan.spec.layers for size in _head_counts(layer.attention)}
    mlp_dims = {_mlp_dim(layer.feed_forward) for layer in built.plan.spec.layers}

    def shards(shape: tuple[int, ...]) -> int:
        """Into how many parts [layers, ...] is cut: an activation by its rows, heads or hidden dim, or a weight."""
        if len(shape) < 2 or shape[1] != micro_rows:
            return layout.shards("embed")
        by_rows = layout.shards("batch")
        if heads.intersection(shape[3:]):
            return by_rows * layout.shards("heads")
        return by_rows * (layout.shards("mlp") if mlp_dims.intersection(shape[3:]) else 1)

    return sum(
        math.prod(array.shape) * array.dtype.itemsize // shards(array.shape)
        for array in _kept(built.traced.jaxpr.jaxpr)
        if array.memory_space == jax.memory.Space.Device
    )


def _kept(jaxpr: Jaxpr) -> Iterator[Any]:
    """The shapes of what the loops of a program stack for the loops that run backwards."""
    stacked: set[Any] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            params = equation.params
            if params["reverse"]:
                read = equation.invars[params["num_consts"] + params["num_carry"] :]
                yield from (var.aval for var in read if not isinstance(var, Literal) and var in stacked)
            else:
                stacked.update(equation.outvars[params["num_carry"] :])
        for inner in jaxprs_in_params(equation.params):
            yield from _kept(inner)


def _head_counts(attention: AttentionSpec) -> tuple[int, int]:
    return attention.num_query_heads, attention.num_kv_heads


def _mlp_dim(feed_forward: FeedForwardSpec | ExpertsSpec) -> int:
    return feed_forward.expert.mlp_dim if isinstance(feed_forward, ExpertsSpec) else feed_forward.mlp_dim


def _logits_bytes(built: Built) -> int:
    """Of one tile of one micro-batch, in the dtype of the products, which is what TPU and GPU hold of them."""
    plan = built.plan
    tokens = built.tokens // plan.micro_batches // plan.vocab_tiles
    size = tokens * plan.spec.padded_vocab_size * jnp.dtype(plan.spec.dtype).itemsize
    return size // (plan.layout.shards("batch") * plan.layout.shards("vocab"))


def _gathered_bytes(built: Built) -> int:
    """Of the largest block's weights in the compute dtype, whole in the dims that `embed` shards."""
    plan, axes = built.plan, set(built.plan.layout.rules["embed"])
    shardings, blocks = by_path(plan.shardings), dict[Any, int]()
    for path, leaf in by_path(plan.shapes).items():
        if path[0] == "segments":
            gathered = axes.intersection(_mesh_axes(shardings[path].spec))
            parts = math.prod(plan.layout.mesh.shape[axis] for axis in gathered)
            size = math.prod(shardings[path].shard_shape(leaf.shape)) * (parts if parts > 1 else 0)
            blocks[path[:3]] = blocks.get(path[:3], 0) + size // plan.spec.plan[int(path[1])].repeats
    return max(blocks.values()) * jnp.dtype(plan.spec.dtype).itemsize


def _mesh_axes(spec: jax.sharding.PartitionSpec) -> Iterator[str]:
    """Those that shard any dim."""
    for part in spec:
        yield from (part,) if isinstance(part, str) else part or ()
