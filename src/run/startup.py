"""Starts commands: reads their configuration, sets up JAX, and joins the processes of a job."""

import atexit
import contextlib
import ctypes
import hashlib
import importlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from src import FOLDER
from src.config.base_yml import TRAIN, Usage, help_for
from src.config.schema import Config, Mesh, Step
from src.config.yaml import dump
from src.parallel.slices import GPU_MEMORY_FRACTION
from src.run import resolve_config
from src.run.environment import version, versions
from src.system import rendezvous
from src.system.errors import TransientError, UserError, clipped, first_few, say, show
from src.system.exit_codes import end_now

# Keys that may differ between the processes of a job: which one it is, and where a host keeps what all hosts have. The
# fingerprint of training data and tokenizer shows whether they are the same (src/data/host_arrays.py).
PER_PROCESS_KEYS = ("process_id", "coordinator_address", "jax_cache_dir", "dataset_path", "datasets", "tokenizer_path")

PROC = Path("/proc")
# Chips by the drivers of TPUs and of GPUs, but not /dev/vfio/vfio or /dev/nvidiactl, which are no chip's.
_DEVICE = re.compile(r"/dev/(accel|accel/accel|vfio/|vfio/devices/vfio|nvidia)\d+")
# What libtpu and CUDA say of a chip that another process holds; "no supported devices": of GPUs in exclusive mode.
_IN_USE = re.compile(r"already in use|resource busy|busy or unavailable|DEVICE_UNAVAILABLE|no supported devices found")


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
            place = Place(mesh.coordinator_address, mesh.num_processes, mesh.process_id)
            if not place.coordinator_address:
                place = find_place(mesh.jax_distributed_initialization_timeout)
            if place and place.num_processes > 1:
                start_distributed(place, mesh, shared_facts(config))
        with named_device_holders():
            jax.devices()  # the first that has JAX look for them
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


class Place(NamedTuple):
    """This process's place in a cluster, as `jax.distributed.initialize` takes it."""

    coordinator_address: str
    num_processes: int
    process_id: int


def start_distributed(place: Place, mesh: Mesh, facts: Mapping[str, str]) -> None:
    """Joins a job of several; raises UserError if processes differ in `facts`, TransientError if not all came."""
    timeout, silence = mesh.jax_distributed_initialization_timeout, mesh.jax_distributed_heartbeat_timeout_seconds
    print(f"waiting for {place.num_processes} processes at {place.coordinator_address}", flush=True)
    disagree = (
        "the processes of this job were started with different configurations, code or packages: give all of them the "
        f"same, but for {', '.join(PER_PROCESS_KEYS)}"
    )
    meeting = rendezvous.Meeting(*place[:2], facts, timeout, silence, disagree, show)
    rendezvous.current_job = rendezvous.Job(place.process_id, meeting.join(place.process_id), end_now)
    # Registered after JAX's exit handler, which waits for the other processes, and therefore run before it.
    atexit.register(rendezvous.current_job.leave)
    # JAX's own heartbeats, sent at half of this, abort a process without a sentence: they are to be later than ours.
    jax.distributed.initialize(*place, initialization_timeout=timeout, heartbeat_timeout_seconds=6 * silence)


def find_place(timeout: int) -> Place | None:
    """Returns this process's place in the cluster that JAX detects; None where it detects none: this is the whole job.

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
    return Place(address, count, process)


@contextlib.contextmanager
def named_device_holders() -> Iterator[None]:
    """Raises TransientError, with pids and commands, if JAX fails in the body because others hold the devices."""
    try:
        yield
    except RuntimeError as error:
        if not _IN_USE.search(message := str(error)):
            raise
        named = device_holders({int(pid) for pid in re.findall(r"\bpid (\d+)", message)})
        unseen = "a process that this user cannot see: sudo fuser -v /dev/accel* /dev/vfio/* /dev/nvidia*"
        who = "\n  ".join(f"pid {pid}: {held}" for pid, held in named.items()) or unseen
        raise TransientError(
            f"this machine's devices are in use by\n  {who}\nWait until it has ended, or end it: kill PID. "
            f"JAX says: {clipped(message, 500)}"
        ) from error


def device_holders(pids: set[int]) -> dict[int, str]:
    """Returns the command and devices of each other process that has a chip open, and of `pids`."""
    held: dict[int, set[str]] = defaultdict(set, {pid: set() for pid in pids})
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            targets = map(os.readlink, (folder / "fd").iterdir())
            if devices := set(filter(_DEVICE.fullmatch, targets)):
                held[int(folder.name)] |= devices
    held.pop(os.getpid(), None)
    return {pid: f"{_command(pid)} ({first_few(sorted(names)) or 'by libtpu'})" for pid, names in sorted(held.items())}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):  # it is in another container, or has ended
        return clipped((PROC / f"{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip(), 200)
    return "a command that cannot be read"


def shared_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns what all processes must share, by name: keys, versions, and a digest of each file of the code."""
    code = {f"src/{path.relative_to(FOLDER).as_posix()}": path for path in sorted(FOLDER.rglob("*.py"))}
    return {
        **{key: dump(value) for key, value in config.items() if key not in PER_PROCESS_KEYS},
        **{"MinText": version(), **versions()},
        **{name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for name, path in code.items()},
    }
