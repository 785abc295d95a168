"""How a command ends: its exit code, what it says, and where a traceback goes."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.checkpoint.run_folder import in_run_folder
from src.system.errors import TransientError, UserError
from src.system.exit_codes import run_command
from tests import runs


class OwnEnd(BaseException):
    """Of the kind that `except Exception` lets through."""


def ends(capsys, main, **options):
    """The exit code of a command, and what it wrote to stderr."""
    with pytest.raises(SystemExit) as end:
        run_command(main, **options)
    return end.value.code, capsys.readouterr().err


def raises(error, folder=None):
    """A command that ends so, within a run's folder if there is one."""

    def main(argv):
        if folder is None:
            raise error
        with in_run_folder(folder):
            raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("steps=x: expected a number"), 2, "error: steps=x: expected a number\n"),
        (TransientError("the store does not answer"), 75, "error: the store does not answer\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_answer_is_all_that_is_said(error, code, words, capsys):
    assert ends(capsys, raises(error)) == (code, words)


@pytest.mark.parametrize("error", [RuntimeError("no\nsuch luck"), OwnEnd("no"), SystemExit(0), BrokenPipeError()])
def test_a_fault_is_one_line_and_a_traceback_in_the_runs_folder(error, capsys, tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    code, said = ends(capsys, raises(error, tmp_path / "run"))
    assert code == 1
    assert said.count("\n") == 1
    assert said.startswith(f"error: unexpected {type(error).__name__}")
    assert said.endswith(f"; the checkpoint of step 5 in {tmp_path / 'run'} is intact\n")
    file = Path(re.search(r"The traceback is in (\S+);", said)[1])
    assert file.parent == tmp_path / "run"
    assert file.read_text().startswith("Traceback (most recent call last):")
    assert "in main" in file.read_text()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: no space is left to write to .*/run: make room"),
        (
            OSError(errno.EIO, "Input/output error"),
            75,
            "error: a disk or a store failed, perhaps temporarily: try again",
        ),
        (TimeoutError("the store"), 75, "error: a disk or a store failed"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "error: unexpected PermissionError"),
    ],
)
def test_what_a_disk_did_is_told_from_a_fault(error, code, words, capsys, tmp_path):
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    found, said = ends(capsys, raises(error, tmp_path / "run"))
    assert found == code
    assert re.match(words, said)
    assert said.count("\n") == 1
    assert f"The traceback is in {tmp_path / 'run'}" in said
    assert said.endswith(f"; the checkpoint of step 5 in {tmp_path / 'run'} is intact\n")


def test_a_fault_without_a_folder_names_a_temporary_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for command in (raises(ValueError("no")), raises(ValueError("no"), Path("/proc/nowhere"))):
        code, said = ends(capsys, command)
        assert code == 1
        file = Path(re.search(r"The traceback is in ([^\s;]+)", said)[1])
        assert file.is_relative_to(tmp_path)
        assert "ValueError: no" in file.read_text()


def test_an_interrupted_run_says_what_stands(capsys, tmp_path):
    assert ends(capsys, raises(KeyboardInterrupt(), tmp_path)) == (130, "interrupted; there is no checkpoint\n")
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    said = ends(capsys, raises(KeyboardInterrupt(), tmp_path))[1]
    assert f"the checkpoint of step 20 in {tmp_path} is intact" in said


def test_what_a_command_returns_is_its_exit_code(capsys):
    assert ends(capsys, lambda argv: 3) == (3, "")
    for result in (0, None, {"loss": 1.0}, True):
        run_command(lambda argv, result=result: result)


def test_a_command_that_says_so_ends_by_itself(capsys):
    assert ends(capsys, raises(SystemExit(4)), may_exit=True) == (4, "")


LINES = "[print('x' * 80) for _ in range({})]"
STEPS = """[printer.train({{"step": step, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_time_seconds": 1.0,
    "tokens_per_second": 1.0}}) for printer in [metrics.StepPrinter({0})] for step in range(1, {0} + 1)]"""


@pytest.mark.parametrize("output", [LINES, STEPS])
@pytest.mark.parametrize("lines", [1, 100_000])  # within the pipe's buffer, and beyond
def test_an_output_that_nobody_reads_ends_the_command_quietly(output, lines):
    imports = "from src.run import metrics\nfrom src.system.exit_codes import run_command"
    program = f"{imports}\nrun_command(lambda argv: {output.format(lines)})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.2)\n{program}"],
        cwd=runs.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 141)


def test_a_command_can_end_before_anything_heavy_is_imported():
    ours = "[name for name in sys.modules if name.startswith('src.') or name == 'jax']"
    program = f"import sys, src.system.exit_codes; print(*{ours})"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=runs.ROOT, capture_output=True, text=True, check=True)
    expected = {"src.system", "src.system.exit_codes", "src.system.errors", "src.system.storage_errors"}
    assert set(loaded.stdout.split()) == expected
