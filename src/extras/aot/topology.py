"""The TPU slices and GPU hosts that `compile_topology` names."""

import math
import re
from typing import NamedTuple

from src.extras.aot import chip_file
from src.parallel.chips import GPU_HOSTS, TPU_7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, Chip
from src.system.errors import UserError, did_you_mean

_GPUS_PER_HOST = 8


class Topology(NamedTuple):
    """The devices that a program is compiled for."""

    name: str  # as it was typed; in lower case, unless it is a chip file's
    platform: str  # tpu, gpu or cpu
    chip: Chip | None  # None for a CPU, which has no published figures
    shape: tuple[int, ...]  # chips of a slice along each of its dims; for GPUs and CPUs the devices of a host
    devices_per_chip: int
    slices: int  # TPU slices, or hosts of GPUs; 1 for CPUs

    @property
    def num_devices(self) -> int:
        """Number of JAX devices in all slices or hosts."""
        return math.prod(self.shape) * self.devices_per_chip * self.slices

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of a host along each dim: four TPU chips, or one or eight if that is the whole slice."""
        if self.platform != "tpu":
            return self.shape
        if self.shape in ((1, 1), (1, 1, 1)):
            return (1, 1, 1)
        return (2, 4, 1) if self.shape == (2, 4) else (2, 2, 1)


def wraps(shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Tells whether the chips along each dim of a TPU slice form a ring (wraparound links).

    In a 2-dim topology the dims of a whole pod, 16 chips, do; in a 3-dim one, all dims of slices made of whole 4x4x4
    cubes (docs.cloud.google.com/tpu/docs/v5p; jax-ml.github.io/scaling-book/tpus). The compiler's default is no
    wraparound.
    """
    if len(shape) == 2:
        return tuple(size == 16 for size in shape)
    return (all(size % 4 == 0 for size in shape),) * 3


class _Generation(NamedTuple):
    """A TPU generation, and how its slices are named."""

    chip: Chip  # one JAX device
    devices_per_chip: int
    counted: str  # the unit that the number in a slice's name counts
    counted_per_chip: int
    dims: int  # of a slice's shape
    smallest: int  # chips of its smallest slice
    largest: int  # chips of its largest slice


# Slices and their names are from the pages named in `wraps`, for TPU7x from MaxText, which counts devices. The largest
# is a pod for v4, v5e, v6e and TPU7x; for v5p the largest job, 96 of a pod's 140 cubes of 4x4x4.
_V5E = _Generation(TPU_V5E, 1, "chips", 1, dims=2, smallest=1, largest=256)
_GENERATIONS = {
    "v4": _Generation(TPU_V4, 1, "TensorCores (two per chip)", 2, dims=3, smallest=4, largest=4096),
    "v5e": _V5E,
    "v5litepod": _V5E,
    "v5p": _Generation(TPU_V5P, 1, "TensorCores (two per chip)", 2, dims=3, smallest=4, largest=6144),
    "v6e": _Generation(TPU_V6E, 1, "chips", 1, dims=2, smallest=1, largest=256),
    "tpu7x": _Generation(TPU_7X, 2, "devices (two per chip)", 2, dims=3, smallest=1, largest=9216),
}

# Larger three-dimensional slices are made of these cubes, joined by optical switches, at most 64 in a line.
_CUBE = 4
_LONGEST = 64 * _CUBE


def parse_topology(name: str, slices: int) -> Topology:
    """Parses the keys `compile_topology` and `compile_topology_num_slices`.

    A name is a TPU slice as Google names it (v5p-128) or by its chips (v5p:4x4x4), a GPU host (a3) or some of its GPUs
    (a3:1), a chip file (src/extras/aot/chip_file.py) or cpu-N. Raises UserError if there is no such slice or host, if
    `slices` is less than 1, or more than 1 for cpu-N, or if the chip file is wrong.
    """
    if slices < 1:
        raise UserError(f"compile_topology_num_slices={slices}: expected a number of slices or hosts, at least 1")
    host, _, gpus = name.partition(":")
    if path := chip_file.find(host):
        hardware = chip_file.read(path)
        joined = hardware.devices_per_host
        if gpus and gpus not in map(str, range(1, joined + 1)):
            raise UserError(f"compile_topology={name}: expected 1 to {joined} GPUs of a host")
        return Topology(name, "gpu", hardware.chip, (int(gpus or joined),), 1, slices)
    name = name.lower()
    host, _, gpus = name.partition(":")
    if host in GPU_HOSTS and (name == host or gpus in map(str, range(1, _GPUS_PER_HOST + 1))):
        return Topology(name, "gpu", GPU_HOSTS[host], (int(gpus or _GPUS_PER_HOST),), 1, slices)
    written = re.fullmatch(r"(\w+)(?:-(\d+)|:(\d+(?:x\d+)*))", name, re.ASCII)
    family, count, shape = written.groups("") if written else ("", "", "")
    if family == "cpu" and count:
        if slices > 1 or int(count) < 1:
            raise UserError(
                f"compile_topology={name} compile_topology_num_slices={slices}: expected at least one CPU device, "
                "and one slice"
            )
        return Topology(name, "cpu", None, (int(count),), 1, 1)
    if family not in _GENERATIONS:
        size = re.search(r"(?<![\dx])\d+$", name, re.ASCII)  # also matches v5p128
        families = [f"{each}-{size[0] if size else 8}" for each in (*_GENERATIONS, "cpu")]
        gpu_of = {each: re.findall(r"[a-z]\d00", chip.kind.lower())[0] for each, chip in GPU_HOSTS.items()}  # a3: h100
        of_gpu = [f" Did you mean {each}?" for each, gpu in gpu_of.items() if gpu in name]
        gpus = ", ".join(f"{each}: {chip.kind}" for each, chip in GPU_HOSTS.items())
        hint = of_gpu[0] if of_gpu else did_you_mean(name, [*GPU_HOSTS, *families, *chip_file.shipped_names()])
        raise UserError(
            f"compile_topology={name} is unknown.{hint} Expected a TPU slice "
            f"({', '.join(f'{each}-N' for each in _GENERATIONS)}, or its chips, such as v5p:4x4x8), a host of "
            f"{_GPUS_PER_HOST} GPUs ({gpus}), one with a file ({', '.join(chip_file.shipped_names())}, or the path of "
            "your own .yml; docs/plan.md) or cpu-N."
        )
    generation = _GENERATIONS[family]
    if shape:
        chips = _check_shape(name, generation, tuple(map(int, shape.split("x"))))
    else:
        chips = _counted_shape(name, generation, int(count))
    return Topology(name, "tpu", generation.chip, chips, generation.devices_per_chip, slices)


def _counted_shape(name: str, generation: _Generation, count: int) -> tuple[int, ...]:
    family, per_chip = name.rpartition("-")[0], generation.counted_per_chip
    if count % per_chip == 0 and (shape := _slice_shape(count // per_chip, generation)):
        return shape
    names = [n * per_chip for n in range(1, generation.largest + 1) if _slice_shape(n, generation)]
    nearest = [*[n for n in names if n < count][-1:], *[n for n in names if n > count][:1]]
    raise UserError(
        f"compile_topology={name}: no {family} slice has {count} {generation.counted}. The nearest: "
        + ", ".join(f"{family}-{n}" for n in nearest)
    )


def _check_shape(name: str, generation: _Generation, shape: tuple[int, ...]) -> tuple[int, ...]:
    chips = math.prod(shape)
    of_cubes = generation.dims == len(shape) == 3 and all(size in range(_CUBE, _LONGEST + 1, _CUBE) for size in shape)
    if shape == _slice_shape(chips, generation) or (of_cubes and chips <= generation.largest):
        return shape
    named = [_slice_shape(2**power, generation) for power in range(9 if generation.dims == 2 else 6)]
    expected = ", ".join("x".join(map(str, each)) for each in named if each)
    if generation.dims == 3:
        expected += f", or three multiples of {_CUBE}, each at most {_LONGEST}, of {generation.largest} chips at most"
    raise UserError(f"compile_topology={name}: no {name.partition(':')[0]} slice has this shape. Expected {expected}")


def _slice_shape(chips: int, generation: _Generation) -> tuple[int, ...] | None:
    """Shape, nearest to a square or cube, of the slice with this many chips; None if there is none."""
    if not generation.smallest <= chips <= generation.largest:
        return None
    if chips.bit_count() == 1 and chips != 2:  # hosts have one, four or eight chips
        return tuple(sorted(_factors(chips, generation.dims), key=lambda size: (size == 1, size)))  # 2x2x1
    if generation.dims == 3 and chips % _CUBE**3 == 0:
        shape = tuple(_CUBE * size for size in sorted(_factors(chips // _CUBE**3, 3)))
        return shape if shape[-1] <= _LONGEST else None
    return None


def _factors(product: int, count: int) -> tuple[int, ...]:
    if count == 1:
        return (product,)
    divisors = [n for n in range(1, product + 1) if product % n == 0]
    return min(((n, *_factors(product // n, count - 1)) for n in divisors), key=sum)
