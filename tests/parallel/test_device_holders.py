"""Where another process holds the devices, the message names it: by a stand-in for /proc."""

import os

import pytest

from src.run import device_holders as module
from src.run.device_holders import device_holders, in_use_error
from src.system.errors import TransientError

# As JAX 0.10 passes on what libtpu, the driver of v5e's chips, and XLA for GPUs in exclusive mode say.
TPU = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 4711. Not attempting"
VFIO = (
    "Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or resource busy"
)
GPU = "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA (you may need to"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Adds a process to a stand-in for /proc: its pid, its command, what it has open (None: another user's)."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "uptime").write_text("1 1")
    monkeypatch.setattr(module, "PROC", proc)

    def add(pid, command, files):
        folder = proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command.split()))
        for number, file in enumerate(files or ()):
            (folder / "fd" / str(number)).symlink_to(file)
        if files is None:
            (folder / "fd").rmdir()  # unreadable even by root, as whom tests may run

    return add


def message_for(error):
    answer = in_use_error(RuntimeError(error))
    assert isinstance(answer, TransientError)
    return str(answer)


def test_processes_with_a_chip_open_are_named_and_no_others(machine):
    machine(12, "python -m src.train configs/base.yml", ["/dev/null", *(f"/dev/accel{n}" for n in range(4))])
    machine(13, "vim /dev/accel0", ["/dev/pts/0", "socket:[4]"])
    machine(14, "monitor", ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/vfio/vfio"])
    machine(15, "serve model", ["/dev/nvidia0", "/dev/nvidia7"])
    machine(16, "v5e", ["/dev/vfio/0"])
    machine(os.getpid(), "this", ["/dev/accel0"])
    chips = ", ".join(f"/dev/accel{n}" for n in range(4))
    assert device_holders(set()) == {
        12: f"python -m src.train configs/base.yml ({chips})",
        15: "serve model (/dev/nvidia0, /dev/nvidia7)",
        16: "v5e (/dev/vfio/0)",
    }


@pytest.mark.parametrize("error", [TPU, VFIO, GPU])
def test_what_jax_says_of_devices_in_use_is_answered(error, machine):
    machine(99, "python other.py", ["/dev/vfio/0", "/dev/nvidia0"])
    assert "pid 99: python other.py (/dev/nvidia0, /dev/vfio/0)" in message_for(error)


def test_a_pid_that_only_the_message_has_is_named(machine):
    assert "pid 4711: a command that cannot be read (by libtpu)" in message_for(TPU)


def test_where_nobody_is_seen_the_message_says_how_to_look(machine):
    assert "a process that this user cannot see: sudo fuser -v /dev/accel*" in message_for(GPU)


def test_other_failures_stay_what_they_are(machine):
    machine(99, "python other.py", ["/dev/nvidia0"])
    assert in_use_error(RuntimeError("Unable to initialize backend 'cuda': the driver is too old")) is None
