"""Creates devices to compile for. TPUs and GPUs are abstract: compilers accept them, but no program can run on them."""

import os
import signal
import threading
from importlib import metadata
from importlib.util import find_spec

import jax
from jax.experimental import topologies

from src import installing
from src.extras.aot.topology import Topology, wraps
from src.parallel.chips import GPU_PROPERTIES
from src.system.errors import UserError

# libtpu's names for TPU generations.
_GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
CUDA = 13 if find_spec("jax_cuda13_plugin") else 12  # the CUDA version of JAX's plugin; setup.sh installs 12

# GPU properties for XLA's compiler, as the driver reports them (xla/backends/gpu/target_config/specs in openxla/xla).
_EVERY_GPU = """
    threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
    shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""
_HOPPER = "fpus_per_core: 128 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
_H100 = f"""{_HOPPER}
    core_count: 132 l2_cache_size: 52428800 clock_rate_ghz: 1.98
    cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
"""
_GPUS = {
    "NVIDIA A100-SXM4-80GB": """
        fpus_per_core: 64 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
        core_count: 108 l2_cache_size: 41943040 clock_rate_ghz: 1.41 cuda_compute_capability { major: 8 }
    """,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H100,
    "NVIDIA B200": f"""{_HOPPER}
        core_count: 148 l2_cache_size: 132644864 clock_rate_ghz: 1.965
        cuda_compute_capability {{ major: 10 feature_extension: ACCELERATED_FEATURES }}
    """,
}


def abstract_devices(topology: Topology) -> list[jax.Device]:
    """Returns a topology's JAX devices in the order they have on the real hardware.

    Call it before JAX computes anything: it makes JAX itself run on this machine's CPU. The devices of a `cpu` topology
    are real, and are all the devices of this process. Raises UserError if the compiler for the devices is not
    installed, if XLA lacks a GPU's properties, or if this process already has another number of CPU devices.
    """
    # Otherwise JAX would claim an accelerator, or complain that there is none.
    jax.config.update("jax_platforms", "cpu")
    return {"tpu": _tpus, "gpu": _gpus, "cpu": _cpus}[topology.platform](topology)


def _tpus(topology: Topology) -> list[jax.Device]:
    _installed("libtpu", topology)
    # libtpu reads these when it loads. It assumes it is on a TPU VM, and prints errors if they are not set.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Only one process per machine may use its TPUs, but any number may compile for them.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    assert topology.chip
    generation = _GENERATIONS[topology.chip.kind]
    handler = signal.getsignal(signal.SIGTERM)
    devices = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation}:{'x'.join(map(str, topology.shape))}",
        chip_config_name="megacore" if generation in ("v4", "v5p") else "default",  # two TensorCores are one device
        chips_per_host_bounds=topology.host_shape,
        wrap=(*wraps(topology.shape), False)[:3],
        num_slices=topology.slices,
    ).devices
    # When libtpu loads, it installs a handler that prints a stack trace. Python does not know, and still reports the
    # former handler: install that again.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    return devices


def _gpus(topology: Topology) -> list[jax.Device]:
    _installed(f"jax-cuda{CUDA}-plugin", topology)
    runtime = "nvidia-cuda-runtime" + "-cu12" * (CUDA == 12)
    packages = {"dnn_version_info": f"nvidia-cudnn-cu{CUDA}", "runtime_version": runtime}
    versions = {field: _installed(package, topology).split(".")[:3] for field, package in packages.items()}
    chip = topology.chip
    assert chip
    properties = _GPUS.get(chip.kind) or GPU_PROPERTIES.get(chip.kind)
    if not properties:
        raise UserError(
            f"compile_topology={topology.name}: XLA needs the properties of a {chip.kind} to compile for it, which the "
            "file does not have: add compiler (docs/plan.md)"
        )
    target = f"""
        platform_name: "CUDA"
        device_description_str: "{chip.kind}"
        gpu_device_info {{
            {_EVERY_GPU} {properties}
            device_memory_size: {chip.memory} memory_bandwidth: {int(chip.memory_bandwidth)}
            dnn_version: "{".".join(versions["dnn_version_info"])}"
        }}
    """  # XLA's GpuTargetConfigProto; JAX 0.11's XLA reads cuDNN's version from gpu_device_info
    for field, (major, minor, patch) in versions.items():
        target += f"{field} {{ major: {major} minor: {minor} patch: {patch} }}\n"
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=target,
        topology=f"{topology.slices}x1x{topology.shape[0]}",  # groups joined by NVLink, hosts per group, GPUs per host
    ).devices


def _installed(package: str, topology: Topology) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"compile_topology={topology.name} needs the package {package}, which is not installed here: "
            f"{installing('aot')} installs the compilers for TPUs and GPUs."
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
