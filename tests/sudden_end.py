"""A plugin for pytest, which pyproject.toml loads: if a process ends without a report, it says where, and why.

XLA ends a process that has a flag it does not know, Linux kills one if memory is full, and a test may call os._exit.
Then nothing is printed, for pytest captures output in unnamed files, which vanish with the process. So a second process
watches each process of pytest: it is told which test runs, is handed these files, and prints both at a sudden end.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys

LINES = 40  # of what it had printed, at most


def _start():
    """Starts the second process, while stderr is not captured; a signal to the group does not end it."""
    here, there = socket.socketpair()
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=there, stdout=subprocess.DEVNULL, start_new_session=True)
    there.close()
    return here, process


def _tell(where):
    with contextlib.suppress(OSError):  # someone ended the second process
        socket.send_fds(_SOCKET, [f"{where}\n".encode()], [1, 2])


def pytest_load_initial_conftests():
    _tell("its start")


def pytest_sessionstart():
    _tell("its session")  # that of pytest-xdist's workers has other processes, which tell for themselves


def pytest_make_collect_report(collector):
    _tell(f"collecting {collector.nodeid}")


def pytest_runtest_setup(item):
    _tell(item.nodeid)


def pytest_unconfigure():
    _tell("")


def wait_and_tell(pid):
    """Reads which test the process runs until it has ended, and prints that unless it said "", its regular end."""
    source, where, captured = socket.socket(fileno=0), "its start", []
    while True:
        said, files, _, _ = socket.recv_fds(source, 65536, 2)
        if not said:
            break
        if files:
            for old in captured:
                os.close(old)
            captured = files
        where = said.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    if where:
        lines = [
            f"pytest's process {pid} ended without a report, in {where}. Something ended the whole process: a library, "
            "as XLA does for a flag that it does not know, a signal, as where memory is full, or os._exit."
        ]
        # A file without a name is pytest's. With -s there is none, and all was seen.
        printed = [_end_of(file) for file in captured if os.fstat(file).st_nlink == 0]
        if any(printed):
            lines += ["It had printed:", *"\n".join(printed).splitlines()[-LINES:]]
        print("", *lines, sep="\n", file=sys.stderr, flush=True)


def _end_of(file):
    size = os.fstat(file).st_size
    return os.pread(file, 20_000, max(size - 20_000, 0)).decode(errors="replace")


if __name__ == "__main__":
    wait_and_tell(sys.argv[1])
else:
    _SOCKET, _process = _start()
    atexit.register(_tell, "")
