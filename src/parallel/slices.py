"""TPU slices and GPU hosts: which devices a fast interconnect joins, and mesh sizes within and between them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from src.config.schema import Mesh, size_key
from src.system.errors import UserError

GPU_MEMORY_FRACTION = 0.9  # the part of a GPU's memory that JAX takes; CUDA, NCCL and cuDNN use the rest


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Counts the groups of devices that a fast interconnect joins: TPU slices, or else hosts."""
    return len({slice_of(device) for device in devices})


def slice_of(device: jax.Device) -> int:
    """Index of the device's TPU slice or host."""
    return device.process_index if joined_by_process(device) else getattr(device, "slice_index", 0)


def axes_within_slices(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Mesh axes along which all devices are in one TPU slice or host."""
    slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
    along = {name: np.moveaxis(slices, dim, 0) for dim, name in enumerate(mesh.axis_names)}
    return tuple(name for name, ids in along.items() if (ids == ids[:1]).all())


def joined_by_process(device: jax.Device) -> bool:
    """Whether hosts are identified by process: for CPUs, and for absent GPUs, which XLA puts in one slice 0."""
    if device.platform == "gpu":  # for GPUs that are present, maybe one per process, JAX numbers hosts as slices
        return device.client.runtime_type == "compile_only_runtime"
    return device.platform != "tpu"


def mesh_sizes(kind: str, section: Mesh, devices: int, groups: int) -> list[int]:
    """Axis sizes of one kind, ici or dcn, with -1 filled in, for `groups` slices or hosts of `devices` each.

    Raises UserError unless they multiply to `devices` (ici) or `groups` (dcn).
    """
    sizes = {key: getattr(section, key) for key in (size_key(kind, name) for name in section.mesh_axes)}
    total = devices if kind == "ici" else groups
    known_size = math.prod(size for size in sizes.values() if size != -1)
    filled = [total // known_size if size == -1 else size for size in sizes.values()]
    if math.prod(filled) == total:
        return filled
    larger = [f"{key}={size}" for key, size in sizes.items() if size not in (1, -1)]
    product = " x ".join(larger) or f"every {kind} size=1"
    plural = "s" * (total > 1)
    what = f"device{plural} in each slice or host" if kind == "ici" else f"slice{plural} or host{plural}"
    if -1 in sizes.values():
        product += f" = {known_size}" if len(larger) > 1 else ""
        problem = f"{product} does not divide {total} {what}: {any_of(divisors(total))} do{'es' * (total == 1)}."
    else:
        advice = f"Set one of the sizes to -1 (the rest), or sizes whose product is {total}."
        problem = f"{product} for {total} {what}. {advice}"
    if kind == "dcn" and groups == 1:
        problem += (
            " Larger dcn sizes need a job on more slices or hosts, which JAX did not find (docs/launch.md), or with "
            "compile_topology, compile_topology_num_slices."
        )
    if kind == "ici" and groups > 1 and known_size > devices:
        problem += f" Sizes between the {groups} slices or hosts are dcn_*_parallelism."
    if kind == "ici" and devices == 1:
        problem += " To try a mesh on a CPU, set JAX_NUM_CPU_DEVICES=8 in the environment for 8 virtual devices."
    raise UserError(f"The mesh does not multiply out: {problem}")


def divisors(number: int) -> list[int]:
    """Lists all divisors of `number`, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def any_of(choices: Sequence[Any]) -> str:
    """Joins choices in words, such as `1, 2 or 4`."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Writes a mesh's sizes by axis in a line, such as `fsdp 4 x tensor 2`."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def check_hardware(hardware: str) -> None:
    """Raises UserError if `hardware` names a different platform than JAX found."""
    platform = jax.devices()[0].platform
    if hardware and hardware != platform:
        raise UserError(f"hardware={hardware}, but JAX found {platform}. Leave hardware empty to detect it.")
