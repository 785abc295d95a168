"""Derives a step's collectives from the sharding rules, without its program.

Weights are gathered along the mesh axes that shard both them and the tokens, forward and backward, and their gradients
are reduce-scattered along the same axes; gradients of replicas are summed. Activations are summed over the axes that
shard heads, hidden units or the vocabulary. Devices that share sequences gather keys and values; tokens travel to their
experts; pipeline stages pass micro-batches on.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from src.extras.aot.hlo import RING_SHARE, Collective, dim_share, network_shares
from src.extras.aot.topology import wraps
from src.extras.plan.placed import AbsentLayout, DeclaredWeight, Placed
from src.model.attention_kernels.scores import CONTEXT
from src.model.execution import Execution
from src.model.flops import all_layers
from src.model.spec import LayerSpec
from src.parallel.mesh import STAGE
from src.parallel.slices import divisors


class Step(NamedTuple):
    """A step of a placed model: the inputs for estimates of its memory and collectives."""

    placed: Placed
    execution: Execution
    rows: int  # sequences of a micro-batch, on all devices
    micro_batches: int
    tiles: int  # of the loss
    optimizer_on_host: bool

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch that a device's matmuls see: the same ones on devices that split heads."""
        layout = self.placed.layout
        return self.rows * self.placed.length / (layout.shards("batch") * layout.shards("length"))


def collectives(step: Step) -> list[Collective]:
    """Lists the collectives of a step for weights, gradients and activations, once for each network that they use."""
    of_weights = _of_weights(step.placed, step.micro_batches, step.tiles > 1)
    return [each for each in (*of_weights, *_of_tokens(step)) if each.sent_bytes]


def gathered_elements(weight: DeclaredWeight, layout: AbsentLayout) -> float:
    """Elements of a weight that a device has after gathering its shard, in all layers of its pipeline stage."""
    shards = math.prod(layout.shards(axis) for axis in weight.axes if axis)
    return math.prod(weight.shape) / shards * layout.size(_gathered(weight, layout))


def _gathered(weight: DeclaredWeight, layout: AbsentLayout) -> tuple[str, ...]:
    """Mesh axes along which a weight is gathered: those that shard the tokens and one of its dims besides experts."""
    tokens = {*layout.axes("batch"), *layout.axes("length")}
    dims = [axis for axis in weight.axes if axis and axis != "expert"]
    return tuple(name for axis in dims for name in layout.axes(axis) if name in tokens)


@functools.lru_cache(maxsize=64)  # consecutive points share a mesh, and differ in remat policy and the like
def _of_weights(placed: Placed, micro_batches: int, in_tiles: bool) -> tuple[Collective, ...]:
    return tuple(_each_weight(placed, micro_batches, in_tiles))


def _each_weight(placed: Placed, micro_batches: int, in_tiles: bool) -> Iterator[Collective]:
    layout, schedule = placed.layout, placed.schedule
    itemsize = jnp.dtype(placed.spec.dtype).itemsize
    tokens = (*layout.axes("batch"), *layout.axes("length"))
    # In a pipeline, a stage gathers the weights of one of its `repeats` turns in each iteration.
    turns = micro_batches * (schedule.iterations / schedule.repeats if schedule else 1)
    for weight in placed.model.weights:
        shards = math.prod(layout.shards(axis) for axis in weight.axes if axis)
        shard = math.prod(weight.shape) / shards
        over = _gathered(weight, layout)
        passes = turns if weight.layers else micro_batches
        whole = shard * layout.size(over) * itemsize
        in_layer = bool(weight.layers)
        # A layer's weights are gathered again for the backward pass; the tables' gathered copy is kept for it, unless
        # the loss runs in tiles.
        gathers = passes * (2 if in_layer or in_tiles else 1) * weight.shared
        yield from _collective(placed, "all-gather", over, gathers, whole, True)
        if not weight.trained:
            continue
        # The embedding's gradient has the rows of arbitrary tokens: XLA on TPUs sums it whole on every device.
        kind = "all-reduce" if placed.torus and weight.axes[0] == "vocab" and not in_layer else "reduce-scatter"
        yield from _collective(placed, kind, over, passes * weight.shared, whole, True)
        used = {name for axis in weight.axes if axis for name in layout.axes(axis)}
        replicas = tuple(name for name in tokens if name not in used)
        once = micro_batches == 1 and schedule is None
        size = shard * (itemsize if once and layout.platform != "gpu" else 4)
        # With the optimizer sharded over replicas, each sums a shard of a gradient, and gathers the updated weight. XLA
        # on GPUs sums the gradient whole first, unless micro-batches are summed before.
        scattered = placed.optimizer_sharded and not (once and layout.platform == "gpu")
        yield from _collective(placed, "reduce-scatter" if scattered else "all-reduce", replicas, 1, size, True)
        if placed.optimizer_sharded:
            yield from _collective(placed, "all-gather", replicas, 1, shard * weight.itemsize, True)


def _of_tokens(step: Step) -> Iterator[Collective]:
    placed, execution = step.placed, step.execution
    layout, spec, schedule = placed.layout, placed.spec, placed.schedule
    itemsize, saves_all = jnp.dtype(spec.dtype).itemsize, execution.remat_policy == "none"
    kept = set() if saves_all else {name for names in execution.saved_names for name in names}
    stages = schedule.stages if schedule else 1
    # Stages that idle compute on zeros, and communicate them: so all iterations count.
    passes = step.micro_batches * (schedule.iterations / schedule.items if schedule else 1) / stages
    stream = step.tokens * spec.emb_dim * itemsize
    heads, units, vocab = layout.axes("heads"), layout.axes("mlp"), layout.axes("vocab")
    for layer, count in all_layers(spec).items():
        times = count * passes
        # The sum after attention is needed again for the feed-forward layer's derivatives, unless it is saved.
        again = 0 if saves_all or "out_proj" in kept else 1
        # In the backward pass, XLA on TPUs adds up the gradients of an input by several weights, such as those of
        # query, key and value, before it sums them over devices: one all-reduce instead of several.
        merged = bool(placed.torus) or layout.shards("norm_length") > layout.shards("length")
        factors = len(layer.mlp_activations) if execution.for_gpu and not merged else 1
        yield from _collective(placed, "all-reduce", heads, times * (1 + (1 if merged else 3) + again), stream, False)
        yield from _collective(placed, "all-reduce", units, times * (1 + factors), stream, False)
        # A part's input that is sharded between blocks is gathered again for the gradients of its weights.
        between = tuple(name for name in layout.axes("norm_length") if name not in layout.axes("length"))
        yield from _collective(placed, "all-gather", between, times * 2 * (not saves_all), stream, False)
        if layout.shards("length") > 1:
            width = _key_value_width(layer) / layout.shards("kv_heads")
            whole = step.tokens * layout.shards("length") * width * itemsize
            again = 0 if saves_all or CONTEXT in kept else 1
            over = layout.axes("length")
            yield from _collective(placed, "all-gather", over, times * (1 + again), whole, False)
            yield from _collective(placed, "reduce-scatter", over, times, whole, False)
        if layer.num_experts > 1 and layout.axes("expert"):
            rows = step.tokens * layer.num_experts_per_tok * spec.emb_dim * itemsize
            yield from _collective(placed, "all-to-all", layout.axes("expert"), times * (5 - saves_all), rows, False)
    yield from _collective(placed, "all-reduce", vocab, step.micro_batches * 2, stream, False)
    if schedule:
        rows = stream / schedule.micro_batches
        times = 2 * step.micro_batches * schedule.iterations
        yield from _collective(placed, "collective-permute", (STAGE,), times, rows, False)
        yield from _collective(placed, "all-reduce", (STAGE,), 2 * step.micro_batches, stream, False)


def _key_value_width(layer: LayerSpec) -> int:
    if layer.attention_type == "mla":
        return layer.kv_lora_rank + layer.qk_rope_head_dim
    return 2 * layer.num_kv_heads * layer.head_dim


def _collective(
    placed: Placed, kind: str, axes: tuple[str, ...], times: float, whole: float, asynchronous: bool
) -> Iterator[Collective]:
    """Yields a collective over mesh axes once for each network that it uses; nothing if it has one device or no bytes.

    It runs `times` per step and has `whole` bytes, as the fields of Collective.
    """
    n, near = placed.layout.size(axes), placed.layout.within_slice(axes)
    if n == 1 or not whole:
        return
    sent = whole * RING_SHARE[kind](n)
    shares = (1.0, 0.0) if kind == "collective-permute" and near > 1 else network_shares(kind, n, near)
    if kind == "collective-permute" and near < n:
        shares = (float(near > 1), 1.0)
    links = _links(placed, axes) if placed.torus else 1.0
    for network, share in zip(("ici", "dcn"), shares, strict=True):
        if share:
            along = links if network == "ici" else 1.0
            yield Collective(
                kind, axes, network, max(round(times), 1), round(whole), round(sent * share), along,
                asynchronous=asynchronous,
            )  # fmt: skip


def _links(placed: Placed, axes: tuple[str, ...]) -> float:
    """Fraction of a chip's links that a group along these axes uses; 1 if it uses none, as within a chip."""
    names = placed.layout.mesh.axis_names
    sizes = tuple(zip(names, placed.layout.within, strict=True))
    parts = _torus_parts(placed.torus, placed.devices_per_chip, sizes)
    dims = [(size, ring) for size, ring in zip(placed.torus, wraps(placed.torus), strict=True) if size > 1]
    used = 0.0
    for dim, (size, ring) in enumerate(dims):
        along = [part for axis in axes for part in parts.get(axis, ()) if part.dim == dim]
        count, span = math.prod(part.count for part in along), sum((part.count - 1) * part.hops for part in along)
        used += dim_share(count, span, size, ring)
    return used / len(dims) if used else 1.0


class _Part(NamedTuple):
    """The part of a torus's dim that a mesh axis runs along: `count` chips that are `hops` apart."""

    dim: int
    count: int
    hops: int


@functools.cache
def _torus_parts(
    torus: tuple[int, ...], devices_per_chip: int, sizes: tuple[tuple[str, int], ...]
) -> dict[str, tuple[_Part, ...]]:
    """Lists, for each mesh axis, the dims of the torus that it runs along, as JAX's `create_device_mesh` chooses them.

    The last axis chooses first: whole dims if possible, else parts of them, and its chips are the closest. The two
    devices of a chip, if there are two, are a dim of their own that counts as no link.
    """
    dims = [size for size in torus if size > 1] + [devices_per_chip] * (devices_per_chip > 1)
    left, found = list(dims), dict[str, tuple[_Part, ...]]()
    for axis, axis_size in reversed(sizes):
        ways = [way for way in itertools.product(*map(divisors, left)) if math.prod(way) == axis_size]
        if not ways:  # sizes with other primes than the torus: assume all links
            return {name: tuple(_Part(dim, size, 1) for dim, size in enumerate(dims)) for name, _ in sizes}
        way = max(ways, key=functools.partial(_preference, dims, left))
        parts = (_Part(dim, count, dims[dim] // left[dim]) for dim, count in enumerate(way) if count > 1)
        found[axis] = tuple(parts)
        left = [rest // count for rest, count in zip(left, way, strict=True)]
    return found


def _preference(dims: Sequence[int], left: Sequence[int], way: tuple[int, ...]) -> tuple[Any, ...]:
    """Sort key of a way to place a mesh axis; the best way has the largest.

    It compares the chips along dims that are taken whole, then the number of these dims, then the chips along dims that
    other axes run along too.
    """
    whole = [count for count, size in zip(way, dims, strict=True) if count == size]
    shared = [count for count, rest, size in zip(way, left, dims, strict=True) if rest < size]
    return math.prod(whole), len(whole), math.prod(shared), way
