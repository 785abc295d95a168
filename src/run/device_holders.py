"""Names the processes that hold this machine's devices if JAX cannot use them."""

import contextlib
import os
import re
from collections import defaultdict
from pathlib import Path

from src.system.errors import TransientError, clipped, first_few

PROC = Path("/proc")
# The drivers' files of TPU and GPU chips, but not /dev/vfio/vfio or /dev/nvidiactl, which belong to no single chip.
_DEVICE = re.compile(r"/dev/(accel|accel/accel|vfio/|vfio/devices/vfio|nvidia)\d+")
# Errors of libtpu and CUDA for a chip that another process holds; "no supported devices": GPUs in exclusive mode.
_IN_USE = re.compile(r"already in use|resource busy|busy or unavailable|DEVICE_UNAVAILABLE|no supported devices found")


def in_use_error(error: RuntimeError) -> TransientError | None:
    """Makes an error with pids and commands if JAX's `error` says that other processes hold devices; else None."""
    if not _IN_USE.search(message := str(error)):
        return None
    named = device_holders({int(pid) for pid in re.findall(r"\bpid (\d+)", message)})
    unseen = "a process that this user cannot see: sudo fuser -v /dev/accel* /dev/vfio/* /dev/nvidia*"
    who = "\n  ".join(f"pid {pid}: {held}" for pid, held in named.items()) or unseen
    return TransientError(
        f"this machine's devices are in use by\n  {who}\nWait until it ends, or end it: kill PID. "
        f"JAX says: {clipped(message, 500)}"
    )


def device_holders(pids: set[int]) -> dict[int, str]:
    """Describes, by pid, the command and devices of each other process that has a chip open.

    `pids` are further processes to describe, which JAX's error names.
    """
    held: dict[int, set[str]] = defaultdict(set, {pid: set() for pid in pids})
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            targets = map(os.readlink, (folder / "fd").iterdir())
            if devices := set(filter(_DEVICE.fullmatch, targets)):
                held[int(folder.name)] |= devices
    held.pop(os.getpid(), None)
    return {pid: f"{_command(pid)} ({first_few(sorted(names)) or 'by libtpu'})" for pid, names in sorted(held.items())}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):  # it is in another container, or has ended
        return clipped((PROC / f"{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip(), 200)
    return "a command that cannot be read"
