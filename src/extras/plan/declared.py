"""What the estimates read of a model, traced once for all points of a search: its weights, its state, its arrays."""

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from src.config.schema import Config
from src.extras.aot.memory import device_bytes, stored_in_backward, stored_in_forward
from src.extras.aot.topology import Topology
from src.model.block import Block
from src.model.execution import Execution
from src.model.forward_context import ForwardContext
from src.model.params import abstract, by_path, values
from src.model.parts import layer_costs
from src.model.spec import LayerSpec, ModelSpec, model_spec
from src.parallel.mesh import MeshLayout
from src.parallel.slices import mesh_sizes
from src.step.plan import StepPlan, make_plan
from src.step.state import abstract_state

ROWS = 101  # of a traced block, a prime that divides no size of a model: arrays that it divides are activations


@dataclass(frozen=True)
class AbsentLayout(MeshLayout):
    """A layout on devices that need not exist: only their kind and their number are known."""

    device: Any = None  # with the attributes of a jax.Device that planning reads
    within: tuple[int, ...] = ()  # sizes of the mesh's axes within a slice or host

    @property
    def axes_within_slices(self) -> tuple[str, ...]:
        """Mesh axes along which all devices are in one slice or host."""
        sizes = zip(self.mesh.shape.items(), self.within, strict=True)
        return tuple(name for (name, size), near in sizes if size == near)

    def within_slice(self, axes: tuple[str, ...]) -> int:
        """Number of devices along these mesh axes that are in one slice or host."""
        return math.prod(self.within[self.mesh.axis_names.index(axis)] for axis in axes)


def absent_layout(config: Config, topology: Topology) -> AbsentLayout:
    """Lays a config's mesh out over a topology; raises UserError if the sizes do not multiply out."""
    section, groups = config.mesh, topology.slices
    ici, dcn = (mesh_sizes(kind, section, topology.num_devices // groups, groups) for kind in ("ici", "dcn"))
    names = tuple(section.mesh_axes)
    mesh: Any = AbstractMesh(
        tuple(a * b for a, b in zip(ici, dcn, strict=True)), names, axis_types=(AxisType.Auto,) * len(names)
    )
    return AbsentLayout(mesh, section.logical_axis_rules, device=_device(topology), within=tuple(ici))


def _device(topology: Topology) -> Any:
    kind = topology.chip.kind if topology.chip else "cpu"
    capability = topology.chip.capability if topology.chip else ""
    return SimpleNamespace(platform=topology.platform, device_kind=kind, compute_capability=capability)


class DeclaredWeight(NamedTuple):
    """One weight, with all layers that are stacked in it."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical, of each dim
    itemsize: int
    trained: bool
    block: tuple[Any, ...]  # segment and position in its pattern; empty: not a layer's
    layers: int  # repeats that are stacked in it; 0: not a layer's
    shared: int  # times that a step's forward pass uses it


class Declared(NamedTuple):
    """A model and its step, whatever the mesh."""

    plan: StepPlan  # on one device
    weights: tuple[DeclaredWeight, ...]
    weight_bytes: int  # of the trained weights
    optimizer_bytes: int
    average_bytes: int


_declared: dict[tuple[Any, ...], Declared] = {}
_specs: dict[tuple[Any, ...], ModelSpec] = {}


def spec_of(config: Config) -> ModelSpec:
    """Resolves a config's model once for all configs that differ in other keys."""
    step, length = config.step, config.batch.max_target_length
    key = (repr(config.model), step.dtype, step.weight_dtype, length)
    if key not in _specs:
        _specs[key] = model_spec(config.model, step, length)
    return _specs[key]


def declared(config: Config, layout: AbsentLayout, kernel: str) -> Declared:
    """Declares a config's weights, optimizer and matmuls on one device like the layout's."""
    step = replace(
        config.step, num_vocab_tiling=1, remat_policy="full", remat_custom={}, gradient_accumulation_steps=1,
        scan_layers="true", attention=kernel, shard_optimizer_over_data=False, optimizer_memory_host_offload=False,
    )  # fmt: skip
    mesh = replace(config.mesh, num_pipeline_microbatches=-1, num_pipeline_repeats=1)
    spec = spec_of(config)
    key = (spec, repr(step), repr(config.batch), layout.device.device_kind)
    if key not in _declared:
        plan = make_plan(spec, _one_device(layout), step, mesh, config.batch, "")
        state = abstract_state(plan)
        shapes, axes, roles = (by_path(tree) for tree in (plan.shapes, plan.axes, plan.roles))
        _declared[key] = Declared(
            plan,
            tuple(
                DeclaredWeight(
                    leaf.shape,
                    axes[path],
                    leaf.dtype.itemsize,
                    roles[path] == "trainable",
                    path[1:3] if path[0] == "segments" else (),
                    *_layers(path, spec, leaf.shape),
                )
                for path, leaf in shapes.items()
            ),
            device_bytes(state.weights.trainable),
            device_bytes(state.opt),
            device_bytes(state.ema),
        )
    return _declared[key]


def _layers(path: tuple[Any, ...], spec: ModelSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns how many layers a weight belongs to, and how often each is used."""
    if path[0] != "segments":
        return 0, 1
    group = spec.layer_groups[int(path[1])]
    return (1, group.repeats) if group.shared else (shape[0], 1)


def _one_device(layout: AbsentLayout) -> AbsentLayout:
    names, device = layout.mesh.axis_names, layout.device
    mesh: Any = AbstractMesh(
        (1,) * len(names),
        names,
        axis_types=(AxisType.Auto,) * len(names),
        abstract_device=AbstractDevice(
            device.device_kind, None, "several"
        ),  # not one CPU, which has matmuls of its own
    )
    return replace(layout, mesh=mesh, within=(1,) * len(names))


class TokenArray(NamedTuple):
    """An array of activations: its bytes per token of the batch, and the logical axis that shards it beside tokens."""

    bytes: float
    axis: str  # heads or mlp; norm_length: as wide as the residual stream; length: sharded by tokens only
    of_experts: bool  # its rows are choices of experts


class BlockArrays(NamedTuple):
    """Arrays that a block stores for each token."""

    saved: tuple[TokenArray, ...]  # from the forward to the backward pass
    computed: tuple[TokenArray, ...]  # in the backward pass


def block_arrays(
    layer: LayerSpec,
    spec: ModelSpec,
    execution: Execution,
    kernel: str,
    packed: bool,
    length: int,
    layout: AbsentLayout,
) -> BlockArrays:
    """Lists the arrays of a layer under a remat policy, from its traced forward and backward pass."""
    custom = tuple(sorted(execution.remat_custom.items()))
    in_halves = execution.mlp_in_halves and layout.shards("mlp") == 1
    key = (layer, spec, execution.remat_policy, custom, kernel, packed, length, layout.device.device_kind, in_halves)
    if key not in _blocks:
        _blocks[key] = _trace_block(layer, spec, execution, kernel, packed, length, _one_device(layout), in_halves)
    return _blocks[key]


_blocks: dict[tuple[Any, ...], BlockArrays] = {}


def _trace_block(
    layer: LayerSpec,
    spec: ModelSpec,
    execution: Execution,
    kernel: str,
    packed: bool,
    length: int,
    layout: MeshLayout,
    in_halves: bool,
) -> BlockArrays:
    graphdef, declarations = abstract(functools.partial(Block, layer, spec))
    weights = values(declarations)

    def run(stacked: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        context = ForwardContext(
            ids, ids, layout, kernel, packed, grad_barriers=execution.grad_barriers,
            separate_factors=execution.for_gpu, mlp_in_halves=in_halves,
        )  # fmt: skip
        block = execution.remat(lambda x, weights: nnx.merge(graphdef, weights)(x, context, None, 0)[0], 2)
        return jnp.sum(jax.lax.scan(lambda x, weights: (block(x, weights), None), x, stacked)[0].astype(jnp.float32))

    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), weights)
    x = jax.ShapeDtypeStruct((ROWS, length, spec.emb_dim), spec.dtype)
    jaxpr = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(
        stacked, x, jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
    ).jaxpr
    classify = functools.partial(_token_array, layer=layer, spec=spec, length=length)
    saved = [classify(array.shape[1:], array) for array in stored_in_forward(jaxpr)]
    computed = [classify(array.shape, array) for array in stored_in_backward(jaxpr)]
    return BlockArrays(tuple(filter(None, saved)), tuple(filter(None, computed)))


def _token_array(
    shape: tuple[int, ...], array: Any, *, layer: LayerSpec, spec: ModelSpec, length: int
) -> TokenArray | None:
    """Describes an array of activations; None for others."""
    if array.size % ROWS:
        return None
    size = math.prod(shape) * array.dtype.itemsize / (ROWS * length)
    of_experts = ROWS not in shape[:1]  # choices of experts, in one dim with the rows
    for axis, sizes in [item for part in layer_costs(layer).values() for item in part.sharded.items()]:
        if set(sizes).intersection(shape[1:]):
            return TokenArray(size, axis, of_experts)
    is_stream = spec.emb_dim in shape[1:] and not of_experts
    return TokenArray(size, "norm_length" if is_stream else "length", of_experts)
