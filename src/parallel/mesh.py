"""The device mesh, and how arrays are sharded over it: named axes, logical-axis rules, shardings."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from src.config.schema import Mesh as MeshSection
from src.parallel.slices import axes_within_slices, count_slices, joined_by_process, mesh_sizes
from src.system.errors import Unsupported, UserError

STAGE = "stage"  # the mesh axis of pipeline stages

# The key that sets the size of a weight's dim, by logical axis.
SIZE_KEYS = {
    "vocab": "vocab_size, padded to a multiple of 128",
    "embed": "base_emb_dim",
    "expert_embed": "base_emb_dim",
    "heads": "base_num_query_heads or gdn_num_key_heads",
    "kv_heads": "base_num_kv_heads",
    "mlp": "base_mlp_dim or base_moe_mlp_dim",
    "expert": "num_experts",
    "latent": "q_lora_rank or kv_lora_rank",
    "position": "trainable_position_size",
    "layers": "base_num_decoder_layers or decoder_segments",
    "other_layers": "decoder_segments",
}


@dataclass(frozen=True)
class MeshLayout:
    """A mesh and the rules that map logical axes to its axes."""

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]  # logical axis -> mesh axes, outermost first, that shard a dim of it

    def axes(self, axis: str | None) -> tuple[str, ...]:
        """Mesh axes with several devices, outermost first, that shard a dim of this logical axis."""
        # Within `shard_map` arrays are already shards along the mapped axes, which therefore no longer shard them.
        mapped = get_abstract_mesh().manual_axes
        rule = () if axis is None else self.rules[axis]
        return tuple(name for name in rule if self.mesh.shape[name] > 1 and name not in mapped)

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Partition of an array with dims of these logical axes (None: unsharded).

        Raises UserError if the rules shard two dims over the same mesh axis.
        """
        used = [mesh_axis for axis in axes if axis is not None for mesh_axis in self.rules[axis]]
        if clash := sorted({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1}):
            raise UserError(
                f"logical_axis_rules shard two dims of one array over mesh axis {clash[0]}: the array's logical axes "
                f"are [{', '.join(map(str, axes))}]. Give one of them another mesh axis, or [] for none."
            )
        return PartitionSpec(*(self.axes(axis) or None for axis in axes))

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Sharding of an array with dims of these logical axes; no axes: replicated. Raises as `spec` does."""
        return NamedSharding(self._traced_mesh, self.spec(axes))

    @property
    def _traced_mesh(self) -> Mesh | AbstractMesh:
        """The mesh of the `shard_map` being traced, which knows its manual axes, otherwise this one."""
        traced = get_abstract_mesh()
        return self.mesh if traced.empty else traced

    @property
    def device(self) -> Any:
        """The first device, which has the same platform and generation as all others."""
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """The platform: tpu, gpu or cpu."""
        return self.device.platform

    @property
    def axes_within_slices(self) -> tuple[str, ...]:
        """Mesh axes along which all devices are in one TPU slice or host."""
        return axes_within_slices(self.mesh)

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Constrains the sharding of `x` in jit by its dims' logical axes; raises as `check` and `spec` do."""
        self.check(x.shape, axes)
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def check(self, shape: Sequence[int], axes: Sequence[str | None]) -> None:
        """Raises Unsupported if a dim is not divisible by the mesh axes that shard it."""
        for axis, problem in self.indivisible(shape, axes):
            raise Unsupported(f"{problem}: change that size, or logical_axis_rules.{axis}")

    def indivisible(self, shape: Sequence[int], axes: Sequence[str | None]) -> Iterator[tuple[str, str]]:
        """Yields the logical axis of each dim that is not divisible by its mesh axes, with a description."""
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None and size % self.shards(axis):
                key = f" ({SIZE_KEYS[axis]})" if axis in SIZE_KEYS else ""
                yield axis, f"{axis} = {size}{key} is not divisible by {self.sharded_by(axis)}"

    def split_rows(self, x: Array, parts: int, *axes: str | None) -> Array:
        """Splits [B, ...] to [parts, B / parts, ...]; sequences stay on their devices; `axes`: logical axes after B."""
        x = jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)
        return self.constrain(x, None, "batch", *(axes or [None] * (x.ndim - 2)))

    def sharded_by(self, axis: str) -> str:
        """Writes the mesh axes that shard logical axis `axis` with their sizes, such as `data=2 x fsdp=4`."""
        return " x ".join(f"{name}={self.mesh.shape[name]}" for name in self.axes(axis))

    def shards(self, axis: str) -> int:
        """Number of shards of a dim of logical axis `axis`."""
        return self.size(self.axes(axis))

    def size(self, mesh_axes: Sequence[str]) -> int:
        """Number of devices along these mesh axes."""
        return math.prod(self.mesh.shape[name] for name in mesh_axes)

    def shard_map(
        self, function: Callable, in_specs: Any, out_specs: Any, over: Collection[str] | None = None
    ) -> Callable:
        """Maps `function` over device shards along the mesh axes `over`; None: all that no outer `shard_map` covers."""
        if over is None:
            over = {*self.mesh.axis_names}.difference(get_abstract_mesh().manual_axes)
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        # Axes not in `over` work as usual: inside, `constrain` and another `shard_map` handle them.
        return jax.shard_map(function, mesh=self._traced_mesh, axis_names={*over}, check_vma=False, **specs)


def make_layout(section: MeshSection, devices: Sequence[jax.Device]) -> MeshLayout:
    """Makes the mesh: `ici_*_parallelism` within slices, `dcn_*_parallelism` between; raises as `mesh_sizes` does."""
    names, groups = section.mesh_axes, count_slices(devices)
    ici, dcn = (mesh_sizes(kind, section, len(devices) // groups, groups) for kind in ("ici", "dcn"))
    if groups == 1:
        device_array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    else:
        by_process = joined_by_process(devices[0])
        device_array = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    mesh = Mesh(device_array, names, axis_types=(AxisType.Auto,) * len(names))
    return MeshLayout(mesh, section.logical_axis_rules)


def mesh_axes_of(spec: PartitionSpec) -> set[str]:
    """Set of mesh axes that a partition uses."""
    return {name for part in spec for name in axes_of_dim(part)}


def axes_of_dim(part: Any) -> tuple[str, ...]:
    """Mesh axes, outermost first, of one entry of a partition."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def replica_axes(layout: MeshLayout, shardings: Any) -> tuple[str, ...]:
    """Mesh axes that shard the batch but no weight: devices along them hold the same weights."""
    used = {name for at in jax.tree.leaves(shardings) for name in mesh_axes_of(at.spec)}
    return tuple(name for name in layout.axes("batch") if name not in used)


def weight_shardings(layout: MeshLayout, shapes: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Sharding of each weight, by its shape and logical axes; raises Unsupported naming all indivisible dims."""
    problems: dict[str, str] = {}  # problem -> logical axis

    def place(shape: jax.ShapeDtypeStruct, dims: tuple[str | None, ...]) -> NamedSharding:
        problems.update((problem, axis) for axis, problem in layout.indivisible(shape.shape, dims))
        return layout.sharding(dims)

    shardings = jax.tree.map(place, shapes, axes)
    if problems:
        from src.parallel.indivisible import indivisible_weights

        raise indivisible_weights(problems, [name for axis in problems.values() for name in layout.axes(axis)])
    return shardings


def global_batch_size(layout: MeshLayout, per_device: float, micro_batches: int, key: str) -> int:
    """Computes the rows of a global batch from those per device and micro-batch, which `key` sets.

    Raises Unsupported if a micro-batch's rows over all devices are 0, not whole, or not divisible by its shards.
    """
    devices, shards = layout.mesh.size, layout.shards("batch")
    rows = round(per_device * devices)
    if abs(per_device * devices - rows) > 1e-6 or rows % shards or rows == 0:
        from src.parallel.indivisible import indivisible_batch

        raise indivisible_batch(key, per_device, devices, shards, layout.sharded_by("batch"))
    return rows * micro_batches
