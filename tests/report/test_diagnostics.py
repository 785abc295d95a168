"""Stack traces of a run come while it lasts, and do not keep it from ending; a profile is of the steps it says."""

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from src.config.command_keys import Diagnostics
from src.extras import stack_traces
from src.run import diagnostics
from src.system.errors import UserError
from tests import runs

# Two threads that each wait in a function of their own.
PROGRAM = """
import os, pathlib, signal, sys, threading, time
from cloud_tpu_diagnostics.src.util import default
from src.config.command_keys import Diagnostics
from src.extras import stack_traces
from src.run import diagnostics
stack_traces._TRACES = pathlib.Path(sys.argv[1])
default.STACK_TRACE_DIR_DEFAULT = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a script started pytest with &

def a_function_of_its_own(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

def another_thread_waits():
    time.sleep(60)

def traced(seconds, interval, to_cloud=True):
    threading.Thread(target=another_thread_waits, daemon=True).start()
    keys = Diagnostics(
        collect_stack_trace=True, stack_trace_to_cloud=to_cloud, stack_trace_interval_seconds=interval
    )
    with diagnostics.stack_traces(keys):
        a_function_of_its_own(seconds)
"""


def started(code, traces):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code, str(traces)],
        cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kinds(folder):
    """The text of the three files that a process writes: by the timer, at a signal, and the package's."""
    files = {path.name: path.read_text() for path in folder.iterdir()}
    (at_signal,) = (name for name in files if name.endswith("_usr1.txt"))
    timer = at_signal.replace("_usr1", "")
    (package,) = files.keys() - {at_signal, timer}
    assert all(name.startswith("stack_trace_") for name in files)
    return files[timer], files[at_signal], files[package]


def traces_of(text):
    """How often each of the two functions is in it."""
    return text.count("in a_function_of_its_own"), text.count("in another_thread_waits")


def test_stacks_are_written_at_the_interval(tmp_path):
    """To the console, and as files, all threads' and by the package the main thread's; two processes wait at once."""
    code = "traced(2.5, 1, to_cloud={})"
    console, cloud = (started(code.format(to_cloud), tmp_path) for to_cloud in (False, True))
    for process in console, cloud:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        if process is console:
            assert traces_of(errors) == (2, 2)
    timer, at_signal, package = kinds(tmp_path)
    assert traces_of(timer) == traces_of(at_signal) == (2, 2)
    assert traces_of(package) == (2, 0)
    assert "snapshot every 1 seconds" in package


def test_a_run_to_the_cloud_ends_long_before_its_interval_with_both_kinds_of_trace(tmp_path):
    """By itself, by an exception and by Ctrl-C; the package's own context would wait for 600 s or stay."""
    signals = "threading.Timer(2, os.kill, (os.getpid(), signal.SIGUSR1)).start(); "
    ends = {
        "returns": ("traced(5, 600); print(signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL)", 0),
        "raises": (
            "threading.Timer(5, os.kill, (os.getpid(), signal.SIGINT)).start(); traced(60, 600)",
            -signal.SIGINT,
        ),
    }
    begin = time.monotonic()
    for name in ends:
        (tmp_path / name).mkdir()
    processes = {name: started(signals + code, tmp_path / name) for name, (code, _) in ends.items()}
    for name, process in processes.items():
        out, errors = process.communicate(timeout=300)
        assert (process.returncode, out) == (ends[name][1], "True\n" * (name == "returns")), errors
        timer, at_signal, package = kinds(tmp_path / name)
        assert (timer, traces_of(at_signal), traces_of(package)) == ("", (1, 1), (1, 0))
    assert time.monotonic() - begin < 300  # 600 by the package's own context


def test_a_crash_leaves_all_threads_stacks(tmp_path):
    process = started("threading.Timer(1, os.kill, (os.getpid(), signal.SIGSEGV)).start(); traced(60, 600)", tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    assert traces_of(kinds(tmp_path)[0]) == (1, 1)


def test_the_package_sends_no_signal_that_ends_a_process_that_lives_on(tmp_path):
    """Its thread looks at the interval's end; then its context is left, and a second run may begin."""
    code = """
traced(0.5, 2)
try:
    traced(0.5, 2, to_cloud=False)
except diagnostics.UserError as error:
    print(error)
os.kill(os.getpid(), signal.SIGUSR1)
for thread in threading.enumerate():
    if thread.name == "cloud-tpu-diagnostics":
        thread.join()
os.kill(os.getpid(), signal.SIGUSR1)
traced(0.1, 600)
print("lives")
"""
    process = started(code, tmp_path)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.splitlines()[0].endswith("this process's last run is closing its traces: start another")
    assert out.splitlines()[1:] == ["lives"]
    assert len(list(tmp_path.glob("*_usr1.txt"))) == 2


def test_the_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_traces, "_TRACES", tmp_path)
    monkeypatch.setitem(sys.modules, "cloud_tpu_diagnostics", None)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(UserError, match=r"cloud-tpu-diagnostics, which bash setup\.sh tpu installs: .*=?to false"):
        cloud(600)
    assert signal.getsignal(signal.SIGUSR1) is before


def cloud(interval):
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=True, stack_trace_interval_seconds=interval)
    with diagnostics.stack_traces(keys):
        pass


def test_the_end_does_not_wait_for_the_interval():
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=False, stack_trace_interval_seconds=600)
    with open("/dev/null", "w") as nowhere, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", nowhere)
        begin = time.monotonic()
        with diagnostics.stack_traces(keys):
            pass
        assert time.monotonic() - begin < 60


def test_nothing_is_written_unless_asked_for(capfd):
    with diagnostics.stack_traces(Diagnostics(collect_stack_trace=False)):
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_processes_that_start_in_one_second_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_traces, "_TRACES", tmp_path)
    monkeypatch.setattr(stack_traces, "_begin_cloud_tpu_diagnostics", lambda *_: None)
    monkeypatch.setattr(stack_traces.time, "strftime", lambda text: "stack_trace_2026_01_01_00_00_00")
    cloud(600)
    cloud(600)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_for_traces_that_can_not_be_written_is_an_error(tmp_path, monkeypatch):
    """Before the package, which would only log it, and whose signal would later end the process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(stack_traces, "_TRACES", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "cloud_tpu_diagnostics", None)
    with pytest.raises(UserError, match=r"stack_trace_to_cloud=true writes to .*/file.*File exists: .* to false"):
        cloud(600)


def test_a_profile_holds_all_that_its_steps_compute_and_nothing_else(tmp_path):
    """Steps are dispatched long before they run, so the operations that ran tell which steps the profile is of."""
    loops = 40

    @jax.jit
    def train_step(state):
        return jax.lax.fori_loop(0, loops, lambda _, x: jnp.tanh(x @ x), state)

    state = train_step(jnp.eye(500)).block_until_ready()
    keys = Diagnostics(profiler="xplane", skip_first_n_steps_for_profiler=2, profiler_steps=3)
    profile = diagnostics.Profile(keys, 10, 20, tmp_path)
    for step in range(10, 18):
        with profile.step(step, state):
            state = train_step(state)
    profile.close()
    (file,) = tmp_path.rglob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    events = [event for line in lines for event in line.events]
    assert [dict(event.stats)["step_num"] for event in events if event.name == "train"] == [13, 14, 15]
    operations = [dict(event.stats).get("hlo_op", "") for event in events]
    assert sum("tanh" in name for name in operations) == 3 * loops  # by itself, or wrapped in a fusion


def test_a_run_that_goes_on_near_its_end_says_that_it_writes_no_profile(tmp_path, capsys):
    profile = diagnostics.Profile(Diagnostics(profiler="xplane", profiler_steps=5), 16, 20, tmp_path)
    assert capsys.readouterr().out == "no profile is written: it would cover steps 18 to 22, but steps=20\n"
    for step in range(16, 20):
        with profile.step(step, None):
            pass
    profile.close()
    assert not list(tmp_path.iterdir())


def test_memory_that_is_full_is_answered_by_what_helps():
    with pytest.raises(UserError) as raised, diagnostics.advice_on_memory(3, "full"):
        jax.block_until_ready(jnp.zeros(2**50, jnp.int8))  # more than a process can address
    said = str(raised.value)
    assert said.startswith("memory is full, on 8 x cpu. JAX says: RESOURCE_EXH")
    for word in ("(here 3;", "(here full)", "ici_fsdp_parallelism=-1", "src.train_compile", "compile_topology=cpu-8"):
        assert word in said


@pytest.mark.parametrize("message", ["INTERNAL: 10000000 bytes", "RESOURCE_EXHAUSTED: a kernel ran out of VMEM"])
def test_what_is_no_lack_of_memory_stays_what_it_is(message):
    error = jax.errors.JaxRuntimeError(message)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, diagnostics.advice_on_memory(3, "full"):
        raise error
    assert raised.value is error


def test_a_signal_asks_for_the_stacks(tmp_path, monkeypatch):
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=False, stack_trace_interval_seconds=600)
    before = signal.getsignal(signal.SIGUSR1)
    with (tmp_path / "console").open("w") as console:
        monkeypatch.setattr(sys, "stderr", console)
        with diagnostics.stack_traces(keys):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_a_signal_asks_for_the_stacks" in (tmp_path / "console").read_text()
    assert signal.getsignal(signal.SIGUSR1) is before
