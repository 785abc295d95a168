"""The processes of a job: how they find each other, and that each has the same configuration, code and packages."""

import atexit
import hashlib
import importlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from src import rendezvous
from src.config.yaml import base, dump
from src.errors import UserError, end_now
from src.report.metrics import REPORTED_PACKAGES, version

# What may differ from process to process: which one it is, and where a host has what all have. That training data and
# tokenizer are the same, their fingerprint tells (src/data/host_arrays.py).
OF_ONE_PROCESS = ("process_id", "coordinator_address", "jax_cache_dir", "dataset_path", "datasets", "tokenizer_path")

_job: rendezvous.Job | None = None  # of several processes, once this one has joined it


class Place(NamedTuple):
    """This process in a cluster: what `jax.distributed.initialize` takes, which finds the local devices by itself."""

    coordinator_address: str
    num_processes: int
    process_id: int


def start_distributed(config: Mapping[str, Any]) -> None:
    """Joins the processes of a job; where there is no cluster, the job is this process.

    JAX finds TPU pods, SLURM, Open MPI and, where the package `kubernetes` is installed, Kubernetes by itself;
    `coordinator_address`, `num_processes` and `process_id` serve anything else.

    Raises:
        UserError: the processes differ in what has to be the same.
        TransientError: not all processes came, or the coordinator's port is in use.
    """
    global _job
    if jax.distributed.is_initialized():
        return
    timeout = config["jax_distributed_initialization_timeout"]
    silence = config["jax_distributed_heartbeat_timeout_seconds"]
    if address := config["coordinator_address"]:
        place = Place(address, config["num_processes"], config["process_id"])
    else:
        place = find_place(timeout)
    if place is None or place.num_processes == 1:
        return
    print(f"waiting for {place.num_processes} processes at {place.coordinator_address}", flush=True)
    peers = rendezvous.join(
        place.coordinator_address,
        place.num_processes,
        place.process_id,
        facts(config),
        timeout=timeout,
        silence=silence,
        disagree="the processes of this job were started with different configurations, code or packages: give all of "
        f"them the same, but for {', '.join(OF_ONE_PROCESS)}",
        say=lambda line: print(line, flush=True),
    )
    _job = rendezvous.Job(place.process_id, peers, end_now)
    atexit.register(_job.leave)  # after JAX registered its own, which waits for the others, and so before it
    jax.distributed.initialize(
        *place,
        initialization_timeout=timeout,
        # JAX's own heartbeats end a process by an abort: they are for what the connections do not show.
        heartbeat_timeout_seconds=3 * silence,
    )


def find_place(timeout: int) -> Place | None:
    """Returns this process's place in the cluster that JAX sees; None where it sees none.

    `timeout`: seconds for the cluster to say where its coordinator is.
    """
    # JAX has no public call that asks whether there is a cluster, and one that joins it fails in the same way where
    # there is none and where it is broken.
    try:
        detect = importlib.import_module("jax._src.clusters").ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        print("this version of JAX does not say whether there is a cluster: for a job of several, coordinator_address")
        return None
    told = os.environ.get("JAX_COORDINATOR_ADDRESS")
    address, count, process, _ = detect(told, None, None, None, None, timeout)
    if address is None:
        return None
    if count is None or process is None:
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS={told} is set, and no cluster says how many processes there are and which one "
            "this is: give coordinator_address, num_processes and process_id, or unset it"
        )
    return Place(address, count, process)


def facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns what all processes must share, by name: keys, versions, and a digest of each file of the code."""
    source = Path(__file__).parent
    files = sorted(path for path in source.rglob("*") if path.suffix in (".py", ".yml"))
    return {
        **{key: dump(config[key]) for key in base().defaults if key not in OF_ONE_PROCESS},
        "MinText": version(),
        "Python": platform.python_version(),
        **{package: metadata.version(package) for package in REPORTED_PACKAGES},
        **{
            f"src/{path.relative_to(source).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            for path in files
        },
    }


def number() -> int | None:
    """Returns which process of its job this one is; None where it is alone."""
    return _job.process if _job else None


def tell(code: int, message: str) -> None:
    """Tells the other processes of the job, if there are any, that this one ends, and so they."""
    if _job:
        _job.tell(code, message)


def await_news() -> None:
    """Gives another process's end a moment to become known: it ends this process too."""
    if _job:
        _job.await_news()
