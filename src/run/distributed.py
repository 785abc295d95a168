"""Joins the processes of a job once all of them have connected and agree on its settings."""

import atexit
import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from src import FOLDER
from src.config.schema import Mesh
from src.config.yaml import dump
from src.run.environment import versions
from src.system import exit_codes, rendezvous
from src.system.errors import show
from src.system.version import version

# Keys that may differ between the processes of a job: the process's index, and the local paths of shared files. The
# fingerprint of training data and tokenizer shows whether their contents are the same (src/data/processes.py).
PER_PROCESS_KEYS = ("process_id", "coordinator_address", "jax_cache_dir", "dataset_path", "datasets", "tokenizer_path")


def start_distributed(cluster: tuple[str, int, int], mesh: Mesh, settings: Mapping[str, str]) -> None:
    """Joins a job of several processes. `cluster`: address, number of processes and index, as JAX takes them.

    Raises as `Meeting.join` does, such as UserError if the processes differ in `settings` (from `job_settings`), and
    TransientError if one is missing.
    """
    timeout, silence = mesh.jax_distributed_initialization_timeout, mesh.jax_distributed_heartbeat_timeout_seconds
    address, count, process_id = cluster
    print(f"waiting for {count} processes at {address}", flush=True)
    disagree = (
        "the processes of this job were started with different configurations, code or packages: give all of them the "
        f"same, except {', '.join(PER_PROCESS_KEYS)}"
    )
    meeting = rendezvous.Meeting(address, count, settings, timeout, silence, disagree, show)
    exit_codes.job = rendezvous.Job(process_id, meeting.join(process_id), exit_codes.end_now)
    # Registered after JAX's exit handler, which waits for the other processes, so that this runs before it.
    atexit.register(exit_codes.job.leave)
    # JAX aborts a process, without an explanation, if its own heartbeats stop for this timeout. The heartbeats of
    # `rendezvous` must end the job earlier, with an explanation: hence 6 times their limit.
    jax.distributed.initialize(*cluster, initialization_timeout=timeout, heartbeat_timeout_seconds=6 * silence)


def job_settings(keys: Mapping[str, Any]) -> dict[str, str]:
    """Collects the settings that all processes of a job must share: keys, versions, a digest of each source file."""
    code = {f"src/{path.relative_to(FOLDER).as_posix()}": path for path in sorted(FOLDER.rglob("*.py"))}
    return {
        **{key: dump(value) for key, value in keys.items() if key not in PER_PROCESS_KEYS},
        **{"MinText": version(), **versions()},
        **{name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for name, path in code.items()},
    }
