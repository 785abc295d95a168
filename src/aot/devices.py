"""Makes the devices of a topology that is not here, which compilers know and which run nothing."""

import os
from importlib import metadata

import jax
from jax.experimental import topologies

from src.errors import UserError
from src.parallel.topology import Topology

# libtpu's names of the generations.
_GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}

# A GPU's figures for XLA's compiler, as its driver gives them (xla/backends/gpu/target_config/specs in openxla/xla).
_COMPUTE_CAPABILITY = {
    "NVIDIA A100-SXM4-80GB": "major: 8",
    "NVIDIA H100 80GB HBM3": "major: 9 feature_extension: ACCELERATED_FEATURES",
    "NVIDIA H200": "major: 9 feature_extension: ACCELERATED_FEATURES",
    "NVIDIA B200": "major: 10 feature_extension: ACCELERATED_FEATURES",
}
_HOPPER = {
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
}
_MULTIPROCESSORS = {
    "NVIDIA A100-SXM4-80GB": {
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167_936,
        "shared_memory_per_block_optin": 166_912,
        "l2_cache_size": 41_943_040,
        "clock_rate_ghz": 1.41,
    },
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA B200": _HOPPER | {"core_count": 148, "l2_cache_size": 132_644_864, "clock_rate_ghz": 1.965},
}
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49_152,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}


def abstract_devices(topology: Topology) -> list[jax.Device]:
    """Returns the JAX devices of a topology, in the order that they have where it is.

    JAX itself runs on this machine's CPU from then on: nothing may have been computed before. The devices of a `cpu`
    topology are real, and all that this process has.

    Raises:
        UserError: the compiler for them is not installed, or this process already has another number of CPU devices.
    """
    # Otherwise JAX would take hold of an accelerator, or complain that there is none.
    jax.config.update("jax_platforms", "cpu")
    if topology.platform == "tpu":
        return _tpus(topology)
    if topology.platform == "gpu":
        return _gpus(topology)
    return _cpus(topology)


def _tpus(topology: Topology) -> list[jax.Device]:
    _installed("libtpu", topology)
    # Read when libtpu is loaded. It takes its process for one on a TPU VM, and prints errors where these are not known.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # One process per machine may have its TPUs, but any number may compile for some.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    generation = _GENERATIONS[topology.chip.kind]
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation}:{'x'.join(map(str, topology.shape))}",
        chip_config_name="megacore" if generation in ("v4", "v5p") else "default",  # two TensorCores are one device
        chips_per_host_bounds=topology.host_shape,
        wrap=_wraps(topology.shape),
        num_slices=topology.slices,
    ).devices


def _wraps(shape: tuple[int, ...]) -> tuple[bool, bool, bool]:
    """Returns whether the chips along each dim are joined to a ring.

    Of two dims those are that cross a whole pod, 16 chips; of three those of slices made of whole cubes of 4x4x4
    (docs.cloud.google.com/tpu/docs/v5p; jax-ml.github.io/scaling-book/tpus). The compiler's own default is none.
    """
    if len(shape) == 2:
        return (shape[0] == 16, shape[1] == 16, False)
    return (all(size % 4 == 0 for size in shape),) * 3


def _gpus(topology: Topology) -> list[jax.Device]:
    _installed("jax-cuda12-plugin", topology)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=_target(topology),
        topology=f"{topology.slices}x1x{topology.shape[0]}",  # groups joined by NVLink, hosts of each, GPUs of a host
    ).devices


def _target(topology: Topology) -> str:
    """Returns XLA's GpuTargetConfigProto of a GPU as text."""
    chip = topology.chip
    info = _EVERY_GPU | _MULTIPROCESSORS[chip.kind]
    info |= {"device_memory_size": chip.memory, "memory_bandwidth": int(chip.memory_bandwidth)}
    return f"""
        platform_name: "CUDA"
        device_description_str: "{chip.kind}"
        gpu_device_info {{
            {" ".join(f"{name}: {value}" for name, value in info.items())}
            cuda_compute_capability {{ {_COMPUTE_CAPABILITY[chip.kind]} }}
        }}
        dnn_version_info {{ {_version("nvidia-cudnn-cu12", topology)} }}
        runtime_version {{ {_version("nvidia-cuda-runtime-cu12", topology)} }}
    """


def _version(package: str, topology: Topology) -> str:
    """Returns the installed version as a SemanticVersionProto."""
    major, minor, patch = _installed(package, topology).split(".")[:3]
    return f"major: {major} minor: {minor} patch: {patch}"


def _installed(package: str, topology: Topology) -> str:
    """Returns the version of a package; raises UserError where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"compile_topology={topology.name} needs the package {package}, which is not installed here: "
            "bash setup.sh aot brings the compilers for TPUs and GPUs."
        ) from None


def _cpus(topology: Topology) -> list[jax.Device]:
    try:
        jax.config.update("jax_num_cpu_devices", topology.num_devices)
    except RuntimeError:  # JAX has started
        raise UserError(
            f"compile_topology={topology.name} in a process where JAX already has {jax.device_count()} CPU devices: "
            "compile in a process of its own"
        ) from None
    return jax.devices()
