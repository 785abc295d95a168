"""What reaches the terminal: nothing that it would obey, on any output that there is."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from src.extras.hf.safetensors import open_tensors
from src.run import resolve_config
from src.run.metrics import StepPrinter
from src.run.summary import print_header
from src.system.errors import TransientError, UserError, say
from src.system.exit_codes import run_command
from tests import runs

TITLE = "\x1b]0;another title\x07"  # a terminal's window gets this title
OBEYED = ("\x1b", "\x07", "\x9b", "\r", "\x08")


def raising(error):
    def main(argv):
        raise error

    return main


def unsafe_config(tmp_path):
    (tmp_path / "my.yml").write_text('steps: "\\e]0;x\\a"\nrun_nam: "\\r"\n')
    resolve_config.load([str(tmp_path / "my.yml")])


def unsafe_tensors(tmp_path):
    header = json.dumps({f"a{TITLE}": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    open_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "command",
    [
        *(raising(kind(f"a{TITLE}\r\x9b1mb\nc\td")) for kind in (UserError, TransientError, ValueError)),
        raising(OSError(5, f"a{TITLE}", "file\x1b[2J")),
        lambda argv: say([f"a{TITLE}\r\x08b\n"]),
        lambda argv: print_header([(f"name{TITLE}", f"a\nb{TITLE}")]),
        lambda argv: StepPrinter(4).say(f"a{TITLE}"),
        lambda argv: resolve_config.load(["configs/base.yml", f"dataset_path=/nowhere/{TITLE}", "hardware=x\x1b[1m"]),
    ],
)
def test_no_control_characters_are_printed(command, capsys):
    with contextlib.suppress(SystemExit):
        run_command(command)
    output = "".join(capsys.readouterr())
    assert not [character for character in OBEYED if character in output]
    assert "\ufffd" in output


@pytest.mark.parametrize("unsafe", [unsafe_config, unsafe_tensors])
def test_values_of_files_reach_messages_without_them(unsafe, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_command(lambda argv: unsafe(tmp_path))
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert not [character for character in OBEYED if character in said]


COMMAND = """
import sys
from src.system.exit_codes import run_command
from src.system.errors import show
from src.run.metrics import StepPrinter

def main(argv):
    show("caf\\u00e9 \\u2192 \\ud800")
    with StepPrinter(4) as printer:
        printer.say("\\u00e9")
    print("caf\\u00e9", input() if argv else "")
    sys.stderr.write("done\\n")

run_command(main)
"""


@pytest.mark.parametrize(
    ("streams", "error"), [(">&-", "done\n"), ("<&- >&-", "done\n"), (">&- 2>&-", ""), ("2>&-", ""), ("<&-", "done\n")]
)
def test_streams_that_are_closed_end_no_command(streams, error):
    command = f'exec "$0" -c "$1" {streams}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, COMMAND], cwd=runs.ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, error)


def test_an_output_of_fewer_characters_gets_the_others_replaced():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", COMMAND]
    ended = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "done\n")
    assert ended.stdout == "caf? ? ?\n?\ncaf? \n"


def test_a_command_on_an_ascii_output_shows_data_that_are_not(tmp_path):
    (tmp_path / "caf\u00e9.txt").write_text("d\u00e9j\u00e0 vu " * 100)
    log = tmp_path / "log"
    keys = {"dataset_path": tmp_path / "caf\u00e9.txt", "eval_interval": -1, "jax_cache_dir": ""}
    command = ["env", "PYTHONIOENCODING=ascii:strict", sys.executable, "-m", "src.inspect_data"]
    output = runs.finish(runs.start_command([*command, *runs.arguments(1, **keys)], log), log)
    assert "caf?.txt" in output
    assert "d?j? vu" in output


def test_a_mapped_file_that_is_cut_off_ends_a_command_with_its_place(tmp_path):
    """The system ends a process that reads what is no longer there, which printed nothing."""
    (tmp_path / "tokens").write_bytes(bytes(2**20))
    program = f"""
import mmap, sys
from src.system.exit_codes import run_command

def read_tokens(argv):
    file = open({str(tmp_path / "tokens")!r}, "r+b")
    content = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    return content[2**19]

run_command(read_tokens)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
    assert "in read_tokens" in done.stderr
