"""Names the processes that hold this machine's TPUs or GPUs, where JAX cannot have them."""

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from src.errors import TransientError, clipped, first_few

PROC, LOCK_FILE = Path("/proc"), Path("/tmp/libtpu_lockfile")  # Linux's, and the one that libtpu holds
# Chips by the drivers of TPUs and of GPUs, but not /dev/vfio/vfio or /dev/nvidiactl, which are no chip's.
_DEVICE = re.compile(r"/dev/(accel|accel/accel|vfio/|vfio/devices/vfio|nvidia)\d+")
# What libtpu and CUDA say of a chip that another process holds; "no supported devices": of GPUs in exclusive mode.
_IN_USE = re.compile(r"already in use|resource busy|busy or unavailable|DEVICE_UNAVAILABLE|no supported devices found")


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
    """Returns the command and devices of each other process that has a chip open or libtpu's lock, and of `pids`."""
    held: dict[int, set[str]] = defaultdict(set, {pid: set() for pid in pids})
    with contextlib.suppress(OSError):  # there is no lock file; other users' locks are seen too
        inode = f":{LOCK_FILE.stat().st_ino}"
        for words in map(str.split, (PROC / "locks").read_text().splitlines()):
            if "->" not in words and words[-3].endswith(inode) and int(words[-4]) > 0:
                held[int(words[-4])].add(str(LOCK_FILE))
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
