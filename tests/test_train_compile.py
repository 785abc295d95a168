"""`python -m src.train_compile` as a user meets it: reports, verdicts, exit codes, mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from src.train_compile import _compile
from tests.compilers import SMALL, needs_cuda, needs_libtpu

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs" / "base.yml")


def train_compile(*arguments, code=0):
    """What the command prints, in an environment that names no platform; it ends with this exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-m", "src.train_compile", BASE, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_any_machine_compiles_for_virtual_devices(tmp_path):
    path = tmp_path / "reports" / "report.json"
    said = train_compile("compile_topology=cpu-8", *SMALL, "per_device_batch_size=1", f"compile_report={path}")
    report = json.loads(path.read_text())
    assert report["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert report["parameters"] == 2 * 1024 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    assert (report["rows"], report["tokens"]) == (8, 2048)
    assert report["memory"]["arguments"] == sum(report["memory"]["argument_parts"].values())
    kinds = {collective["kind"] for collective in report["collectives"]}
    assert "all-gather" in kinds, "weights are sharded"
    assert "it compiles" in said
    assert "8 x cpu" in said


@needs_libtpu
def test_a_step_for_a_tpu_slice_fits(tmp_path):
    path = tmp_path / "report.json"
    said = train_compile("compile_topology=v5e-4", *SMALL, "per_device_batch_size=1", f"compile_report={path}")
    report = json.loads(path.read_text())
    assert report["memory"]["fits"]
    assert report["attention"] == "flash"
    assert report["memory"]["capacity"] > 15 * 2**30
    assert 0 < report["prediction"]["mfu"] < 1
    assert "fits: " in said
    assert "WARNING" not in said, "libtpu's noise is not the user's"


@needs_libtpu
def test_a_step_too_large_for_a_tpu_is_an_answer(tmp_path):
    path, program = tmp_path / "report.json", tmp_path / "step"
    arguments = ("compile_topology=v5e-4", "base_num_decoder_layers=4", "per_device_batch_size=96")
    said = train_compile(*arguments, f"compile_report={path}", f"compiled_trainstep_file={program}", code=3)
    report = json.loads(path.read_text())
    memory = report["memory"]
    assert not memory["fits"]
    assert memory["needed"] > memory["capacity"]
    assert "RESOURCE_EXHAUSTED" in report["compiler_message"], "the compiler's message is whole"
    keys = {key for change in report["changes"] for key in change["keys"]}
    assert {"per_device_batch_size", "num_vocab_tiling", "compile_topology_num_slices"} <= keys
    assert all(change["needed"] < memory["needed"] for change in report["changes"])
    assert "does not fit: at least" in said
    assert not program.exists()


@needs_cuda
def test_a_gpu_host_has_a_verdict_though_its_compiler_gives_none(tmp_path):
    path = tmp_path / "report.json"
    arguments = ("compile_topology=a3", *SMALL, f"compile_report={path}")
    train_compile(*arguments, "per_device_batch_size=1")
    assert json.loads(path.read_text())["attention"] == "cudnn_flash"

    train_compile(*arguments, "per_device_batch_size=16384", "attention=dot_product", "remat_policy=none", code=3)
    report = json.loads(path.read_text())
    assert report["compiler_message"] == ""
    assert report["memory"]["needed"] > report["memory"]["capacity"]
    assert report["changes"]


@needs_libtpu
def test_flags_that_would_end_libtpu_are_answered(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such=1")
    said = train_compile("compile_topology=v5e-4", *SMALL, code=2)
    assert "LIBTPU_INIT_ARGS in the environment: xla_no_such is no flag of libtpu" in said


def test_another_memory_than_the_devices_main_one_is_no_question_of_size():
    def refuse():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 18M of 16M")

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        _compile(SimpleNamespace(compile=refuse))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "compile_topology is empty"),
        (("compile_topology=v5q-128",), "v5p-128"),
        (("compile_topology=v5p-100",), "v5p-64, v5p-128"),
        (("compile_topology=cpu-8", "hardware=tpu"), "Leave hardware empty"),
        (("compile_topology=cpu-1", "compile_report=/dev/null/report.json", *SMALL), "compile_report=/dev/null"),
        (("compile_topology=cpu-8", "ici_fsdp_parallelism=3"), "does not multiply out"),
        (("compile_topology=cpu-8", "compile_topology_num_slices=0"), "1 or more"),
        (("compile_topology=cpu-8", "compile_xla_flags=--xla_no_such_flag=1", *SMALL), "xla_no_such_flag"),
        (("compile_topology=cpu-8", "per_device_batch_size=0.3"), "does not divide"),
    ],
)
def test_a_mistake_is_answered(arguments, says):
    said = train_compile(*arguments, code=2)
    assert says in said
