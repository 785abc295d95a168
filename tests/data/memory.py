"""What a process has in memory, as Linux counts it for the program that runs in it.

(`getrusage` counts what the process that started it had before, too: in a test, that of pytest.)
"""

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
is_known = _STATUS.exists()


def now():
    """In bytes."""
    return _bytes("VmRSS")


def peak():
    """The most so far, in bytes."""
    return _bytes("VmHWM")


def _bytes(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())[1])
