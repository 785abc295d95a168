"""Holds this process's connection to the others of its job, which `rendezvous.py` makes in a job of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from src.system.rendezvous import Job


class ClusterEnv(NamedTuple):
    """This process's role in a cluster, as arguments of `jax.distributed.initialize`."""

    coordinator_address: str
    num_processes: int
    process_id: int


current: Job | None = None  # set once this process has joined a job of several
