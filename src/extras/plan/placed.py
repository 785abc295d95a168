"""Places a model on a mesh of devices that need not exist, and checks that it divides over them."""

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from src.config.schema import Config
from src.extras.aot.memory import device_bytes
from src.extras.aot.topology import Topology
from src.model.execution import make_schedule
from src.model.params import by_path
from src.model.parts import kernel_for
from src.model.pipeline import Schedule
from src.model.spec import ModelSpec, model_spec
from src.parallel.mesh import MeshLayout
from src.parallel.sequence import zigzag_order
from src.parallel.slices import mesh_sizes
from src.step.plan import StepPlan, make_plan
from src.step.state import abstract_state


@dataclass(frozen=True)
class AbsentLayout(MeshLayout):
    """A layout on devices that need not exist: only their kind and their number are known."""

    device: Any = None  # with the attributes of a jax.Device that planning reads
    within: tuple[int, ...] = ()  # sizes of the mesh's axes within a slice or host

    @functools.cached_property
    def _axes(self) -> dict[str, tuple[str, ...]]:
        return {axis: tuple(name for name in rule if self.mesh.shape[name] > 1) for axis, rule in self.rules.items()}

    @functools.cached_property
    def _shards(self) -> dict[str, int]:
        return {axis: self.size(names) for axis, names in self._axes.items()}

    def axes(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes with several devices that shard a dim of this logical axis; none for None."""
        return () if axis is None else self._axes[axis]

    def shards(self, axis: str) -> int:
        """Number of shards of a dim of logical axis `axis`."""
        return self._shards[axis]

    @property
    def axes_within_slices(self) -> tuple[str, ...]:
        """Mesh axes along which all devices are in one slice or host."""
        sizes = zip(self.mesh.shape.items(), self.within, strict=True)
        return tuple(name for (name, size), near in sizes if size == near)

    def within_slice(self, axes: tuple[str, ...]) -> int:
        """Number of devices along these mesh axes that are in one slice or host."""
        return math.prod(self.within[self.mesh.axis_names.index(axis)] for axis in axes)


class DeclaredWeight(NamedTuple):
    """One weight, with all layers that are stacked in it."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical, of each dim
    itemsize: int
    trained: bool
    block: tuple[Any, ...]  # segment and position in its pattern; empty: not a layer's
    layers: int  # number of layers that are stacked in it; 0: not a layer's
    shared: int  # times that a forward pass uses it: the number of layers that share it


class Declared(NamedTuple):
    """A model's weights, and the sizes of its state, which do not depend on the mesh; sizes are in bytes."""

    plan: StepPlan  # on one device
    weights: tuple[DeclaredWeight, ...]
    weight_bytes: int  # of the trained weights
    optimizer_bytes: int
    average_bytes: int  # of the EMA of the weights


class Shares(NamedTuple):
    """Bytes per device of all weights, of the trained ones, and of the optimizer's state."""

    weights: float
    trained: float
    optimizer: float


@dataclass(frozen=True, eq=False)
class Placed:
    """A model on a mesh that it was checked to divide over; remat policies and batches share it."""

    layout: AbsentLayout
    spec: ModelSpec
    kernel: str
    length: int  # of a sequence
    packed: bool
    schedule: Schedule | None  # of pipeline stages
    model: Declared
    shares: Shares
    optimizer_sharded: bool  # over replicas
    torus: tuple[int, ...]  # chips of a TPU's slice along each dim; empty for other devices
    devices_per_chip: int


def place(config: Config, topology: Topology) -> Placed:
    """Places a config's model on its mesh; raises UserError if the mesh or kernel cannot run the model."""
    spec, layout = spec_of(config), absent_layout(config, topology)
    if spec.has_experts or layout.shards("expert") > 1:
        from src.model.moe.layer import check_mesh

        check_mesh(spec, layout)
    if any(layer.attention_type == "mla" for layer in spec.layers):
        from src.model.latent_attention import place_latents

        layout = replace(layout, rules=place_latents(layout, spec).rules)
    length = config.batch.max_target_length
    kernel = kernel_for(config.step.attention, spec, length, layout).name
    model = declared(config, layout, kernel)
    for shape, axes in dict.fromkeys((weight.shape, weight.axes) for weight in model.weights):
        layout.spec(axes)  # raises if two dims are sharded over one mesh axis
        layout.check(shape, axes)
    schedule = make_schedule(config.mesh, spec, layout)
    zigzag_order(length, layout)
    return Placed(
        layout=layout,
        spec=spec,
        kernel=kernel,
        length=length,
        packed=config.batch.packing,
        schedule=schedule,
        model=model,
        shares=_weight_shares(model, layout, config),
        optimizer_sharded=config.step.shard_optimizer_over_data,
        torus=topology.shape if topology.platform == "tpu" else (),
        devices_per_chip=topology.devices_per_chip,
    )


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


_declared: dict[tuple[Any, ...], Declared] = {}
_specs: dict[tuple[Any, ...], ModelSpec] = {}


def spec_of(config: Config) -> ModelSpec:
    """Resolves a config's model; cached by all that it depends on: the section `model`, dtypes and sequence length."""
    step, length = config.step, config.batch.max_target_length
    key = (repr(config.model), step.dtype, step.weight_dtype, length)
    if key not in _specs:
        _specs[key] = model_spec(config.model, step, length)
    return _specs[key]


def declared(config: Config, layout: AbsentLayout, kernel: str) -> Declared:
    """Declares a config's weights and optimizer on one device like the layout's; raises as `make_plan` does.

    The result is cached, by the settings and the kind of device that it depends on.
    """
    step = replace(
        config.step, num_vocab_tiling=1, remat_policy="full", remat_custom={}, gradient_accumulation_steps=1,
        scan_layers="true", attention=kernel, shard_optimizer_over_data=False, optimizer_memory_host_offload=False,
    )  # fmt: skip
    mesh = replace(config.mesh, num_pipeline_microbatches=-1, num_pipeline_repeats=1)
    spec, batch = spec_of(config), replace(config.batch, per_device_batch_size=1.0)
    key = (spec, repr(step), repr(batch), layout.platform, layout.device.device_kind)
    if key not in _declared:
        plan = make_plan(spec, one_device(layout), step, mesh, batch, "")
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
    """Returns the fields `layers` and `shared` of a DeclaredWeight."""
    if path[0] != "segments":
        return 0, 1
    group = spec.layer_groups[int(path[1])]
    return (1, group.repeats) if group.shared else (shape[0], 1)


def one_device(layout: AbsentLayout) -> AbsentLayout:
    """The layout of a single device of the same kind."""
    names, device = layout.mesh.axis_names, layout.device
    mesh: Any = AbstractMesh(
        (1,) * len(names),
        names,
        axis_types=(AxisType.Auto,) * len(names),
        # As the platform, any name but cpu: on a single CPU device, src/model/matmul.py multiplies in another way.
        abstract_device=AbstractDevice(device.device_kind, None, "several"),
    )
    return replace(layout, mesh=mesh, within=(1,) * len(names))


def _weight_shares(model: Declared, layout: AbsentLayout, config: Config) -> Shares:
    whole = trained = 0.0
    used = set()
    for weight in model.weights:
        names = [name for axis in weight.axes if axis for name in layout.axes(axis)]
        used.update(names)
        size = math.prod(weight.shape) * weight.itemsize / layout.size(names)
        whole += size
        trained += size * weight.trained
    optimizer = model.optimizer_bytes * trained / model.weight_bytes
    if config.step.shard_optimizer_over_data:
        optimizer /= layout.size([name for name in layout.axes("batch") if name not in used])
    return Shares(whole, trained, optimizer)
