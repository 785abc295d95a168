"""Starts commands: reads their configuration, sets up JAX, and joins the processes of a job."""

import contextlib
import ctypes
import importlib
import os
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

import jax
from ml_collections import ConfigDict

from src.config.schema import Config, Step
from src.config.usage import TRAIN, Usage, help_for
from src.parallel.slices import GPU_MEMORY_FRACTION
from src.run import resolve_config
from src.run.environment import version
from src.system.errors import UserError, say, show
from src.system.job import ClusterEnv


def configured(
    argv: Sequence[str] | ConfigDict, usage: Usage = TRAIN, *, joins: bool = True, uses_weights: bool = False
) -> Config | None:
    """Returns the configuration of a command line and makes JAX ready for use; None if it only asked for help.

    With `joins` this process joins its job, and JAX uses the devices of this machine. Otherwise JAX is not started, and
    the caller checks the environment's flags, as it alone knows which will be read. `uses_weights` as `config.load`'s.

    Raises UserError: the command line or, with `joins`, a flag in the environment is wrong; or another process of the
    job has another configuration, code or packages. Raises TransientError: another process of the job did not come, or
    another program holds the devices.
    """
    if (help_text := help_for(argv, usage)) is not None:
        show(help_text)
        return None
    print(f"MinText {version()}", flush=True)
    notes: list[str] = []
    config = resolve_config.load(argv, notes, uses_weights=uses_weights, command=usage.command)
    configure_jax(config.step)
    if joins:
        platforms, mesh = jax.config.jax_platforms, config.mesh  # no platforms: whichever JAX finds
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
            jax.devices()  # JAX begins to look for them here
        except RuntimeError as error:
            from src.run.device_holders import in_use_error

            if answer := in_use_error(error):
                raise answer from error
            raise
    say(notes)
    return config


def configure_jax(step: Step) -> None:
    """Makes those settings of JAX that have to precede its search for devices and any compilation."""
    platforms = jax.config.jax_platforms or ""
    accelerators = [*metadata.entry_points(group="jax_plugins"), *filter(None, [find_spec("libtpu")])]
    if platforms == "cpu" or not (platforms or accelerators):
        _keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", step.matmul_precision)
    if step.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(step.jax_cache_dir))
    if not os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"):  # the older name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))  # by itself JAX takes 0.75
    if (virtual_devices := jax.config.jax_num_cpu_devices) > 1:
        # XLA has as many threads as virtual CPU devices, and a collective blocks one until all devices have entered it.
        # If some devices enter one of two independent collectives and some the other, no thread is left to go on.
        os.environ.setdefault("PJRT_NPROC", str(4 * virtual_devices))
        # All devices call LAPACK (eigh, qr) at once. In SciPy's OpenBLAS they would spin for its own few threads: eigh
        # of 128 x 128 then takes hundreds of times as long.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _keep_freed_memory() -> None:
    """Has the C library keep freed memory: XLA allocates a step's temporary arrays anew, and Linux clears each page.

    That takes a quarter of the quickstart's step. Only the first of glibc's arenas grows without bounds, so it is to
    have no other, which takes effect before XLA's threads begin.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library, as on macOS
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):
            mallopt(option, value)


def find_cluster(timeout: int) -> ClusterEnv | None:
    """Asks JAX for the cluster that this process is in; None: it detects none, and this process is the whole job.

    JAX finds TPU pods, SLURM, Open MPI and, where the package `kubernetes` is installed, Kubernetes. `timeout`: seconds
    to wait for the cluster to name its coordinator.
    """
    # JAX's public call that joins a cluster fails in the same way where there is none and where it is broken.
    try:
        detect = importlib.import_module("jax._src.clusters").ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        print("this version of JAX does not say whether there is a cluster: for a job of several, coordinator_address")
        return None
    from_environment = os.environ.get("JAX_COORDINATOR_ADDRESS")
    address, count, process, _ = detect(from_environment, None, None, None, None, timeout)
    if address is None:
        return None
    if count is None or process is None:
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS={from_environment} is set, and no cluster says how many processes there are and "
            "which one this is: give coordinator_address, num_processes and process_id, or unset it"
        )
    return ClusterEnv(address, count, process)
