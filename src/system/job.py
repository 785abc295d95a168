"""Holds what connects this process to the others of its job; `rendezvous.py` makes it, in a job of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from src.system.rendezvous import Job


class ClusterEnv(NamedTuple):
    """This process's part in a cluster, as `jax.distributed.initialize` takes it."""

    coordinator_address: str
    num_processes: int
    process_id: int


current: Job | None = None  # set once this process has joined a job of several
