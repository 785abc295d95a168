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
from src.errors import UserError
from src.report import diagnostics
from tests import runs

PROGRAM = """
import pathlib, sys, time
from src.config.command_keys import Diagnostics
from src.report import diagnostics
diagnostics._TRACES = pathlib.Path(sys.argv[2])

def a_function_of_its_own():
    time.sleep(2.5)

with diagnostics.stack_traces(Diagnostics(
    collect_stack_trace=True, stack_trace_to_cloud=sys.argv[1] == "cloud", stack_trace_interval_seconds=1
)):
    a_function_of_its_own()
print("done")
"""


def test_stacks_are_written_at_the_interval(tmp_path):
    """To the console, and as a file; two processes wait at once."""
    written = []
    for process in [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, where, str(tmp_path / "traces")],
            cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for where in ("console", "cloud")
    ]:  # fmt: skip
        printed, errors = process.communicate(timeout=60)
        assert (process.returncode, printed) == (0, "done\n"), errors
        written.append(errors)
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name.startswith("stack_trace_")
    written[1] = file.read_text()
    assert [each.count("a_function_of_its_own") for each in written] == [2, 2]


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
    monkeypatch.setattr(diagnostics, "_TRACES", tmp_path)
    monkeypatch.setattr(diagnostics.time, "strftime", lambda text: "stack_trace_2026_01_01_00_00_00")
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=True, stack_trace_interval_seconds=600)
    with open("/dev/null", "w") as nowhere:
        monkeypatch.setattr(sys, "stderr", nowhere)
        with diagnostics.stack_traces(keys), diagnostics.stack_traces(keys):
            assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_for_traces_that_can_not_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(diagnostics, "_TRACES", tmp_path / "file")
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=True, stack_trace_interval_seconds=600)
    with pytest.raises(UserError, match="stack_trace_to_cloud=false"), diagnostics.stack_traces(keys):
        pass


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
    assert capsys.readouterr().out == "no profile is written: it would be of steps 18 to 22, and steps=20\n"
    for step in range(16, 20):
        with profile.step(step, None):
            pass
    profile.close()
    assert not list(tmp_path.iterdir())


def test_memory_that_is_full_is_answered_by_what_helps():
    with pytest.raises(UserError) as raised, diagnostics.advice_on_memory(3, "full"):
        jax.block_until_ready(jnp.zeros(2**50, jnp.int8))  # more than a process can address
    said = str(raised.value)
    assert said.startswith("memory is full: 1,048,576.0 GiB at once were asked for, on 8 x cpu. JAX says: RESOURCE_EXH")
    for word in ("(here 3;", "(here full)", "ici_fsdp_parallelism=-1", "src.train_compile", "compile_topology=cpu-8"):
        assert word in said


@pytest.mark.parametrize("message", ["INTERNAL: 10000000 bytes", "RESOURCE_EXHAUSTED: a kernel ran out of VMEM"])
def test_what_is_no_lack_of_memory_stays_what_it_is(message):
    error = jax.errors.JaxRuntimeError(message)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, diagnostics.advice_on_memory(3, "full"):
        raise error
    assert raised.value is error


def test_a_signal_asks_for_the_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnostics, "_TRACES", tmp_path)
    keys = Diagnostics(collect_stack_trace=True, stack_trace_to_cloud=True, stack_trace_interval_seconds=600)
    before = signal.getsignal(signal.SIGUSR1)
    with diagnostics.stack_traces(keys):
        os.kill(os.getpid(), signal.SIGUSR1)
        (file,) = tmp_path.iterdir()
        assert "test_a_signal_asks_for_the_stacks" in file.read_text()
    assert signal.getsignal(signal.SIGUSR1) is before
