"""Describes what a run's numbers depend on besides its config: versions, commit, machine and devices."""

import contextlib
import functools
import os
import platform
import subprocess
from importlib import metadata

import jax
from etils import epath

from src.checkpoint.run_folder import read_text
from src.system.errors import UserError
from src.system.json_text import parse_json
from src.system.version import CHECKOUT, version

REPORTED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect a run's numbers, by name."""
    return {"Python": platform.python_version()} | {name: metadata.version(name) for name in REPORTED_PACKAGES}


@functools.cache
def environment() -> dict[str, str]:
    """Returns, by name, what a run's numbers depend on besides its config: versions, commit, machine, devices.

    Starts JAX's backend, so call it after `jax.distributed.initialize`.
    """
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = ""  # "" without git, or if pip has installed MinText: git might describe another repository around it
    with contextlib.suppress(OSError):  # PATH has no git, or only one that may not be executed
        if CHECKOUT:
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "MinText": version() + f" ({commit})" * bool(commit),
        **versions(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": str(jax.process_count()),
    }


def read_environment(folder: epath.Path) -> dict[str, str]:
    """Reads a run's environment.json, {} if there is none; raises UserError if it is malformed."""
    file = folder / "environment.json"
    try:
        facts = parse_json("{}" if (text := read_text(file)) is None else text)
        if not isinstance(facts, dict):
            raise ValueError("it is not a mapping of names to texts")
    except ValueError as error:
        raise UserError(f"{file} cannot be read: {error}. Delete it: the page then omits it") from None
    return facts
