"""A test run that something ends says what it was doing: each case is a run of pytest in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests import runs

TESTS = """
import os, signal

def test_one():
    print("python's words")
    os.write(2, b"a library's words\\n")

def test_wrong():
    assert 0

def test_exit():
    test_one()
    os._exit(3)

def test_killed():
    test_one()
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDED = "ended without a report"


def pytest_run(folder, *arguments):
    """Runs pytest with this plugin and no conftest.py; returns the exit code and all that it printed."""
    plugins = ["-p", "tests.sudden_end", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *plugins]
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("exit", "0"),
        ("killed", "1"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("exit", "1"), ("killed", "0"))),
    ],
)
def test_a_process_that_a_test_ends_says_which_and_what_it_printed(tmp_path, name, workers):
    (tmp_path / "test_it.py").write_text(TESTS)
    code, printed = pytest_run(tmp_path, "-n", workers, "-k", f"one or {name}")
    assert code == {"0": {"exit": 3, "killed": -9}[name], "1": 1}[workers]
    assert f"{ENDED}, in test_it.py::test_{name}. " in printed
    for words in ("python's words", "a library's words"):
        assert printed.count(words) == 1  # those of the test that passed are not shown


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(0, ["-n", "1", "-k", "one"]), (1, ["-k", "wrong"]), (4, ["--no-such-option"]), (5, ["-k", "nothing"])],
)
def test_a_run_that_ends_by_itself_has_no_such_line(tmp_path, code, arguments):
    (tmp_path / "test_it.py").write_text(TESTS)
    done, printed = pytest_run(tmp_path, *arguments)
    assert done == code
    assert ENDED not in printed


def test_a_module_that_ends_the_process_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text("import os\nprint('half way')\nos._exit(0)")
    code, printed = pytest_run(tmp_path, "-n", "0")
    assert code == 0
    assert f"{ENDED}, in collecting test_it.py. " in printed
    assert "half way" in printed


def test_a_flag_that_xla_does_not_know_is_named(tmp_path):
    """In tests/conftest.py, while nothing has been collected."""
    (tmp_path / "wrong_flag.py").write_text(
        "from tests import quick_compilation\nquick_compilation.ENVIRONMENT['XLA_FLAGS'] = '--xla_no_such_flag=1'\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "wrong_flag", "-p", "no:cacheprovider", "-n", "0"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "tests/test_sudden_end.py"], cwd=runs.ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"{ENDED}, in its start. " in done.stderr
    assert "--xla_no_such_flag" in done.stderr
