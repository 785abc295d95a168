"""What a process has in memory, as Linux counts it for the program that runs in it.

(`getrusage` counts what the process that started it had before, too: in a test, that of pytest.)
"""

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FORGET = Path("/proc/self/clear_refs")
is_known = _STATUS.exists() and _FORGET.exists()


def now():
    """In bytes."""
    return _bytes("VmRSS")


def peak():
    """The most since the start or `forget_peak`, in bytes."""
    return _bytes("VmHWM")


def forget_peak():
    _FORGET.write_text("5")


def _bytes(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())[1])
