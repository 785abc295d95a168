"""Prepares a command: reads its configuration, sets up JAX, and joins the processes of a job."""

import contextlib
import ctypes
import importlib
import os
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from src.config.schema import Config, Step
from src.config.usage import TRAIN, Usage, help_for
from src.parallel.slices import GPU_MEMORY_FRACTION
from src.run import resolve_config
from src.system.errors import UserError, say, show
from src.system.version import title


class ClusterEnv(NamedTuple):
    """This process's role in a cluster, as arguments of `jax.distributed.initialize`."""

    coordinator_address: str
    num_processes: int
    process_id: int


def configured(
    argv: Sequence[str] | ConfigDict, usage: Usage = TRAIN, *, joins: bool = True, uses_weights: bool = False
) -> Config | None:
    """Loads the configuration of a command line and makes JAX ready for use; None if it only asked for help.

    With `joins` this process joins its job, and JAX uses the devices of this machine. Otherwise JAX is not started, and
    the caller checks the environment's flags, because only the caller knows which will be read. `uses_weights`: as in
    `src.config.load.load`.

    Raises UserError if the command line or, with `joins`, a flag in the environment is wrong, or if another process of
    the job has another configuration, code or packages. Raises TransientError if another process of the job does not
    connect, or another program holds the devices. Also raises as `resolve_config.load` does.
    """
    if (help_text := help_for(argv, usage)) is not None:
        show(help_text)
        return None
    print(title(), flush=True)
    notes: list[str] = []
    config = resolve_config.load(argv, notes, uses_weights=uses_weights, command=usage.command)
    configure_jax(config.step)
    if joins:
        platforms, mesh = jax.config.jax_platforms, config.mesh  # no platforms: JAX chooses
        if {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} & os.environ.keys():
            from src.step.compiler_flags import check_environment

            check_environment(uses_tpu=not platforms or "tpu" in platforms)
        if not jax.distributed.is_initialized():
            cluster = ClusterEnv(mesh.coordinator_address, mesh.num_processes, mesh.process_id)
            if not cluster.coordinator_address:
                cluster = find_cluster(mesh.jax_distributed_initialization_timeout)
            if cluster and cluster.num_processes > 1:
                from src.run.distributed import job_settings, start_distributed

                start_distributed(cluster, mesh, job_settings(config))
        try:
            jax.devices()  # starts JAX's search for devices
        except RuntimeError as error:
            from src.run.device_holders import in_use_error

            if answer := in_use_error(error):
                raise answer from error
            raise
    say(notes)
    return config


def configure_jax(step: Step) -> None:
    """Sets options and environment variables that JAX reads before it finds devices or compiles.

    If only the CPU can be used, also makes the C library keep freed memory.
    """
    platforms = jax.config.jax_platforms or ""
    if platforms == "cpu" or not (platforms or find_spec("libtpu") or metadata.entry_points(group="jax_plugins")):
        _keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", step.matmul_precision)
    if step.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(step.jax_cache_dir))
    if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):  # the older name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))  # JAX's default is 0.75
    if (virtual_devices := jax.config.jax_num_cpu_devices) > 1:
        # XLA starts one thread per virtual CPU device, and a collective blocks a thread until all devices enter it. If
        # some devices enter one of two independent collectives and some the other, they deadlock without more threads.
        os.environ.setdefault("PJRT_NPROC", str(4 * virtual_devices))
        # All devices call LAPACK (eigh, qr) at once. They would spin, waiting for the few threads of SciPy's OpenBLAS,
        # and eigh of 128 x 128 would take hundreds of times as long.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _keep_freed_memory() -> None:
    """Makes the C library keep freed memory, because Linux clears each page that XLA's temporary arrays allocate again.

    Clearing takes a quarter of the quickstart's step. Only the first of glibc's arenas grows without bounds, so this
    allows no other; it must be called before XLA's threads start.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library, as on macOS
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):
            mallopt(option, value)


def find_cluster(timeout: int) -> ClusterEnv | None:
    """Asks JAX for the cluster that this process is in; None if JAX detects none, so that it is the whole job.

    JAX detects TPU pods, SLURM, Open MPI and, if the package `kubernetes` is installed, Kubernetes. If this version of
    JAX cannot detect clusters, prints a line and returns None. `timeout`: seconds to wait for the cluster to name its
    coordinator. Raises UserError if only JAX_COORDINATOR_ADDRESS is known.
    """
    # A private function: the public one, which joins the cluster, fails alike without a cluster and with a broken one.
    try:
        detect = importlib.import_module("jax._src.clusters").ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        print("this version of JAX cannot detect clusters: for a job of several processes, give coordinator_address")
        return None
    from_environment = os.environ.get("JAX_COORDINATOR_ADDRESS")
    address, count, process, _ = detect(from_environment, None, None, None, None, timeout)
    if address is None:
        return None
    if count is None or process is None:
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS={from_environment} is set, but no cluster was detected that reports the number "
            "of processes and this one's index: give coordinator_address, num_processes and process_id, or unset it"
        )
    return ClusterEnv(address, count, process)
