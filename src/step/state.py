"""The state of a run and its batches: shapes and shardings."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from src.data.types import BATCH_ARRAYS
from src.model.execution import check_rows
from src.model.params import ROLES, Tree, Weights, by_path
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import sharing_keys, zigzag_order
from src.step.optimizer import hparams_at
from src.step.plan import StepPlan

EXTRAS = ("ema", "spikes")  # entries of a state that only some runs have


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that devices hold between steps; checkpoints omit the base weights of adapters."""

    step: Any  # int32: updates done or skipped
    weights: Weights
    opt: Any
    ema: Tree = dataclasses.field(default_factory=dict)  # float32: moving average of trainable weights, with ema_decay
    spikes: Tree = dataclasses.field(default_factory=dict)  # from `spikes.empty_window`; {} without skip_step_on_spikes

    def by_name(self) -> dict[str, Any]:
        """Names the state's entries as checkpoints do: the weights by their roles, and this run's optional entries."""
        extras = {name: tree for name in EXTRAS if (tree := getattr(self, name))}
        return {"step": self.step, **vars(self.weights), "opt": self.opt, **extras}

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Rebuilds the state from the entries of `by_name`."""
        weights = Weights(*(entries[role] for role in ROLES))
        extras = {name: entries[name] for name in EXTRAS if name in entries}
        return cls(entries["step"], weights, entries["opt"], **extras)


def init_state(plan: StepPlan, weights: Weights | None = None) -> TrainState:
    """Makes the state before the first step, from `weights`, or from initial weights if None."""
    weights = weights or plan.init_weights()
    opt = plan.optimizer(hparams_at(plan.step, 1, 0)).init(weights.trainable)  # the same for all hyper-parameters
    spikes = {}
    if plan.step.skip_step_on_spikes:
        from src.step.spikes import empty_window

        spikes = empty_window(plan.step.skip_step_interval)
    ema = jax.tree.map(lambda w: w.astype(jnp.float32), weights.trainable) if plan.step.ema_decay else {}
    return TrainState(jnp.zeros((), jnp.int32), weights, opt, ema, spikes)


def abstract_state(plan: StepPlan) -> TrainState:
    """Shapes and shardings of the state, without arrays: `jax.ShapeDtypeStruct`s."""
    shapes = jax.eval_shape(functools.partial(init_state, plan), plan.split(plan.shapes))
    copy, updates = plan.layout.sharding(()), plan.accumulation.updates
    if plan.step.optimizer_memory_host_offload:
        updates = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), updates)
    opt = state_shardings(shapes.opt, plan.split(plan.shapes).trainable, updates, copy)
    spikes = jax.tree.map(lambda _: copy, shapes.spikes)
    weights = plan.split(plan.shardings)
    shardings = TrainState(copy, weights, opt, weights.trainable if shapes.ema else {}, spikes)
    return jax.tree.map(lambda s, at: ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def batch_sharding(layout: MeshLayout, fields: Mapping[str, ShapeDtypeStruct] = {}) -> dict[str, NamedSharding]:
    """Sharding of each array of a batch, including the fields that `batch_transform` adds."""
    ndims = dict.fromkeys(BATCH_ARRAYS, 1) | {name: field.ndim for name, field in fields.items()}
    # The sequence dim is not sharded here: the step itself reorders tokens and shards them over a context axis.
    return {name: layout.sharding(("batch", *[None] * ndim)) for name, ndim in ndims.items()}


def abstract_batch(plan: StepPlan, rows: int, length: int, key: str = "per_device_batch_size") -> Tree:
    """Abstract arrays of a batch, `rows` x `length`; raises Unsupported, naming `key`, if a dim is not divisible."""
    plan.layout.check((rows,), ("batch",))
    zigzag_order(length, plan.layout)
    check_rows(rows // plan.accumulation.micro_batches, plan.layout, plan.execution, key)
    tiles, shards = plan.step.num_vocab_tiling, plan.layout.shards("norm_length")
    if length % (tiles * shards):
        from src.parallel.indivisible import indivisible_length

        sharing, keys = plan.layout.sharded_by("norm_length"), sharing_keys(plan.layout, "norm_length")
        raise indivisible_length(length, tiles, shards, sharing, keys)
    row = {name: ShapeDtypeStruct((length,), dtype) for name, dtype in BATCH_ARRAYS.items()}
    row |= plan.fields
    batch = {}
    for name, sharding in batch_sharding(plan.layout, plan.fields).items():
        batch[name] = ShapeDtypeStruct((rows, *row[name].shape), row[name].dtype, sharding=sharding)
    return batch


def state_shardings(opt: Any, shapes: Any, shardings: Any, copy: NamedSharding) -> Any:
    """Sharding of each array of an optimizer's state, of shapes `opt`; `copy` for arrays that belong to no weight.

    An array belongs to the weight whose path its own path contains. `shapes` and `shardings` describe the weights'
    updates. An array of the weight's rank has the weight's dims, or their means (size 1); for another rank, dims are
    matched by size, in order: Shampoo's [L, D, D] for a weight [L, D, F] has its L, the first D, and no third.
    """
    sizes, sharding_of = by_path(shapes), by_path(shardings)

    def weight_in(keys: tuple[Any, ...]) -> Any:
        for start in range(len(keys)):
            for end in range(len(keys), start, -1):
                if keys[start:end] in sharding_of:
                    return keys[start:end]
        return None

    def shard(path: Any, leaf: ShapeDtypeStruct) -> NamedSharding:
        weight = weight_in(tuple(entry.key for entry in path if isinstance(entry, DictKey)))
        if weight is None:
            return copy
        shape, at, spec, first = sizes[weight].shape, sharding_of[weight], [], 0
        for number, size in enumerate(leaf.shape):
            candidates = [number] if leaf.ndim == len(shape) else range(first, len(shape))
            dim = next((dim for dim in candidates if shape[dim] == size), None)
            spec.append(None if dim is None else at.spec[dim])
            first = first if dim is None else dim + 1
        return at.update(spec=PartitionSpec(*spec))

    return jax.tree.map_with_path(shard, opt)
