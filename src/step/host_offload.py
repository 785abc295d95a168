"""Keeps the optimizer's state in host memory between updates (`optimizer_memory_host_offload`)."""

from typing import Any

import jax


def to_device(opt: Any) -> Any:
    """Copies the state to the devices, for an update."""
    return jax.device_put(opt, jax.memory.Space.Device)


def to_host(new: Any, old: Any) -> Any:
    """Copies an updated state to the memories of the old one."""
    return jax.tree.map(lambda new, old: jax.device_put(new, jax.typeof(old).memory_space), new, old)
