"""`python -m src.plan` as a user meets it: its lines, report, page, exit codes and mistakes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from src.extras.aot import train_compile
from src.extras.plan import command, compiling
from src.extras.plan.search import Search
from src.run import resolve_config
from src.system.errors import UserError
from src.system.exit_codes import run_command
from tests import quick_compilation
from tests.runs import BASE, ROOT, wait_until

TINY = [BASE, "base_emb_dim=32", "base_mlp_dim=64", "base_num_decoder_layers=2", "base_num_query_heads=4"]
TINY += ["base_num_kv_heads=2", "head_dim=8", "vocab_size=97", "max_target_length=16", "compile_topology=cpu-8"]
FIXED = ["ici_pipeline_parallelism=1", "ici_context_parallelism=1", "ici_tensor_parallelism=2", "num_vocab_tiling=1"]


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """Runs the command with records in a folder of the test's own; returns the plan, the report and the lines."""
    for name, value in quick_compilation.ENVIRONMENT.items():  # of the processes that compile
        monkeypatch.setenv(name, value)

    def run(*words):
        words = [*TINY, *FIXED, f"jax_cache_dir={tmp_path}", f"report={tmp_path / 'plan.json'}", *words]
        plan = command.main(words)
        return plan, json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out

    return run


def test_a_search_compiles_ranks_and_writes_what_it_found(planned, tmp_path, monkeypatch, capsys):
    page = tmp_path / "plan.html"
    words = ("top=2", f"page={page}", "train_tokens=1e9", "price_per_device_hour=2")
    plan, found, said = planned(*words)
    assert plan.exit_code == 0
    first = found["rows"][0]
    assert "costed      " in said
    assert re.search(r"compiled 2 of 2, about 0:00 left", said)
    assert f"1: {first['command']}" in said
    assert "by a roofline, not measured" in said
    assert found["plan"]["points"] > found["plan"]["costed"] > len(found["compiled"]) >= 2
    speeds = [row["tokens_per_second"] for row in found["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    for row in found["rows"]:
        assert row["command"].startswith("python -m src.train_compile ")
        config = resolve_config.load(shlex.split(row["command"])[3:], command="src.train_compile")
        assert {key: config[key] for key in row["keys"]} == row["keys"]
        assert (config.mesh.ici_tensor_parallelism, config.step.num_vocab_tiling) == (2, 1)
        assert f"<title>{row['rank']}: {row['mesh']}, {row['policy']}" in page.read_text()
    assert not re.search(r"https?://|\bsrc=", page.read_text())
    again, more, said = planned(*words)
    assert "2 points compiled before" in said
    assert (again, more["rows"]) == (plan, found["rows"])

    def interrupted(self, say, run=Search.run):
        run(self, say)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned(*words)
    said = capsys.readouterr().out
    assert "of the 2 points compiled so far:" in said
    assert f"1: {first['command']}" in said
    assert "2 points kept; the same command continues from there" in said


@pytest.mark.long
def test_a_row_needs_what_train_compile_says(planned, tmp_path):
    """Compiled by the command that the row names, in a process of its own."""
    _, found, _ = planned("top=1", "remat_policy=full")
    row, report = found["rows"][0], tmp_path / "report.json"
    words = [*shlex.split(row["command"])[1:], f"compile_report={report}"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["memory"]["needed"] == row["memory"]


def test_an_interrupted_command_says_how_to_continue(planned, monkeypatch, capsys):
    def interrupted(self, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned("top=1")
    assert "0 points kept; the same command continues from there" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        planned("top=1", "jax_cache_dir=")
    said = capsys.readouterr().out
    assert "nothing is kept, because jax_cache_dir is empty" in said
    assert "continues from there" not in said


def test_records_that_no_later_search_finds_are_removed(tmp_path):
    """With a folder for temporary files of its own, which is empty at the end."""
    words = [*TINY, *FIXED, "jax_cache_dir=", "top=1", "compile_xla_flags=--no_such_flag=1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "src.plan", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "compiled 1 of " in done.stdout, done.stderr
    assert not list(tmp_path.glob("mintext-plan-*"))


def test_a_compilation_that_died_is_not_counted_as_kept(planned, monkeypatch, capsys):
    """It is a result of this search, but the next one compiles it again."""

    def interrupted(self, say, run=Search.run):
        run(self, say)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(KeyboardInterrupt):
        planned("top=1")
    said = capsys.readouterr().out
    assert "failed: its process did not finish" in said
    assert "0 points kept; the same command continues from there" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_search_that_is_ended_ends_its_compilations(number, tmp_path, monkeypatch, capsys):
    """In place of Python, which would compile, a script writes its process's id and sleeps; one ends the search."""
    compiler, pids = tmp_path / "compiler", tmp_path / "pids"
    pids.mkdir()
    ends = f"mkdir {tmp_path}/first 2>/dev/null && sleep 1 && kill -{number} $PPID"
    compiler.write_text(f"#!/bin/sh\ntouch {pids}/$$\n{ends}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    monkeypatch.setattr(sys, "argv", ["src.plan", *TINY, *FIXED, f"jax_cache_dir={tmp_path}", "top=1"])
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore SIGHUP, as nohup does
    try:
        with pytest.raises(SystemExit) as end:
            run_command(command.main)
    finally:
        signal.signal(number, before)
    started = [int(path.name) for path in pids.iterdir()]
    left = [pid for pid in started if still_runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert started
    assert not left
    assert end.value.code == 130
    assert "0 points kept; the same command continues from there" in capsys.readouterr().out


STARTED = """
import sys
from src.system.exit_codes import run_command
from src.extras.plan import command

sys.executable = sys.argv.pop(1)
run_command(command.main)
"""


def test_a_killed_search_ends_its_compilations(tmp_path):
    """The script in place of Python runs it, and writes how it ended."""
    compiler, began, ended = (tmp_path / name for name in ("compiler", "began", "ended"))
    compiler.write_text(
        f'#!/bin/sh\ntouch {began}\n{sys.executable} "$@"\necho $? > {ended}.part; mv {ended}.part {ended}\n'
    )
    compiler.chmod(0o755)
    words = [*TINY, *FIXED, f"jax_cache_dir={tmp_path}", "top=1"]
    with subprocess.Popen([sys.executable, "-c", STARTED, str(compiler), *words], cwd=ROOT) as search:
        wait_until(began.exists, search)
        search.kill()
    assert began.exists()
    for _ in range(6000):  # a minute at least, of a hundredth of a second each
        if not ended.exists():
            time.sleep(0.01)
    assert ended.read_text() == "1\n"
    assert not list((tmp_path / "plan").glob("*.json"))


def still_runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["top=0"], "top=0: expected a number of points to compile, 1 to 1000"),
        (["top=2", "top=3"], "top=3: expected one top=, with a value"),
        (["train_tokens=many"], "train_tokens=many: expected a positive number, such as 1e12"),
        (["price_per_device_hour=-1"], "price_per_device_hour=-1: expected a positive number"),
        (["global_batch_tokens=100"], "global_batch_tokens=100 is not a multiple of max_target_length=16"),
        (["allow_quantization=int4"], "allow_quantization=int4: expected some of int8, fp8, mxfp8"),
        (["allow_quantization=int8"], "allow_quantization=int8: no rate of a NVIDIA H100 80GB HBM3 is published"),
        (["train_token=3"], "unknown key train_token"),
        (["per_device_batch_size=0.1"], "the configured batch is 0.8 sequences on 8 devices"),
        (["ici_data_parallelism=3"], "do not divide 8 devices of a slice or host: the product may be 1, 2, 4 or 8"),
        (
            ["gradient_accumulation_steps=5", "global_batch_tokens=128", "ici_fsdp_parallelism=4"],
            "this batch and ici_context_parallelism=1 ici_fsdp_parallelism=4 ici_pipeline_parallelism=1 "
            "ici_tensor_parallelism=2 gradient_accumulation_steps=5: gradient_accumulation_steps=5 does not divide a "
            "shard's 2 sequences: it may be 1 or 2",
        ),
        (
            ["global_batch_tokens=48", "ici_fsdp_parallelism=4"],
            "4 shards of the batch do not divide 3 sequences: global_batch_tokens may be a multiple of 64",
        ),
        (
            ["per_device_batch_size=1.5", "global_batch_tokens=128", "ici_fsdp_parallelism=4"],
            "per_device_batch_size=1.5 does not divide 8 sequences: it may be 1 or 0.5",
        ),
        (
            ["ici_tensor_parallelism=4", "ici_fsdp_parallelism=2"],
            "kv_heads = 2 (base_num_kv_heads) is not divisible by",
        ),
        (["compile_topology=h100"], "compile_topology=h100 is unknown. Did you mean a3?"),
        (["compile_topology="], "compile_topology is empty: name the devices"),
        (["compile_topology=v5e-4", "dtype=float32"], "no peak rate of v5e-4 is published for dtype=float32"),
        (["compile_report=a.json"], "are for one program: leave them out"),
    ],
)
def test_mistakes_are_answered(words, answer, tmp_path):
    with pytest.raises(UserError, match=re.escape(answer)):
        command.main([*TINY, *FIXED, f"jax_cache_dir={tmp_path}", *words])


def test_a_report_of_another_kind_is_not_replaced(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(UserError, match="another file exists there"):
        command.main([*TINY, f"report={other}"])
    assert other.read_text() == "{}"


def test_help_is_about_the_search(capsys):
    assert command.main(["--help"]) is None
    assert "python -m src.plan CONFIG" in capsys.readouterr().out


def test_a_compilation_that_dies_is_a_failure_that_is_not_kept(tmp_path, monkeypatch):
    config = resolve_config.load(TINY).replace(jax_cache_dir=str(tmp_path))
    folder = compiling.Folder.of(config, train_compile.checked_topology(config))
    running = folder.start(config, [*TINY, "no_such_key=1"])
    running.process.wait()
    assert "no_such_key" in running.result()["failed"]
    assert not folder.file(config).exists()
    running = folder.start(config, TINY)
    running.end()
    assert running.result()["failed"] == "its process did not finish: it was ended by signal 9"
