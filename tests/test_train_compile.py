"""`python -m src.train_compile` as a user meets it: reports, verdicts, exit codes, mistakes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from src.extras.aot.report import typed
from src.extras.aot.topology import parse_topology
from src.extras.aot.train_compile import command, compile_lowered, main
from src.system.errors import UserError
from src.system.exit_codes import run_command
from tests import quick_compilation
from tests.compilers import SMALL, needs_cuda, needs_libtpu

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs" / "base.yml")


def train_compile(*arguments, code=0):
    """What the command prints, in an environment that names no platform; it ends with this exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= quick_compilation.ENVIRONMENT
    command = [sys.executable, "-m", "src.train_compile", BASE, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def settings():
    """Undoes what the command changes of JAX."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def test_any_machine_compiles_for_virtual_devices(tmp_path):
    path = tmp_path / "reports" / "report.json"
    said = train_compile("compile_topology=cpu-8", *SMALL, "per_device_batch_size=1", f"compile_report={path}")
    report = json.loads(path.read_text())
    assert report["mesh"] == {"data": 1, "stage": 1, "fsdp": 8, "context": 1, "expert": 1, "tensor": 1}
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
    said = train_compile(
        *("compile_topology=v5e-4", *SMALL, "base_num_decoder_layers=1", "per_device_batch_size=1"),
        *("compile_xla_flags=auto", f"compile_report={path}"),
    )
    report = json.loads(path.read_text())
    assert report["memory"]["fits"]
    assert report["attention"] == "flash"
    assert report["memory"]["capacity"] > 15 * 2**30
    assert 0 < report["prediction"]["mfu"] < 1
    assert "fits: " in said
    assert "WARNING" not in said, "libtpu's noise is not the user's"


def no_changes(*arguments):
    """In place of `changes`, which takes a while: tests/plan/test_advice.py has what they are."""
    return iter(())


@needs_libtpu
def test_a_step_too_large_for_a_tpu_is_an_answer(tmp_path, monkeypatch, settings, capsys):
    monkeypatch.setattr("src.extras.plan.advice.changes", no_changes)
    path, program = tmp_path / "report.json", tmp_path / "step"
    arguments = [BASE, "compile_topology=v5e-4", *SMALL, "base_num_decoder_layers=1", "per_device_batch_size=16384"]
    assert command([*arguments, f"compile_report={path}", f"compiled_trainstep_file={program}"]) == 3
    said = capsys.readouterr().out
    report = json.loads(path.read_text())
    memory = report["memory"]
    assert not memory["fits"]
    assert memory["needed"] > memory["capacity"]
    assert "RESOURCE_EXHAUSTED" in report["compiler_message"], "the compiler's message is whole"
    assert "does not fit: at least" in said
    assert not program.exists()


@pytest.mark.long
@needs_libtpu
def test_what_should_help_is_compiled_to_see(tmp_path):
    path = tmp_path / "report.json"
    deep = ("compile_topology=v5e-4", *SMALL, "base_num_decoder_layers=64", "per_device_batch_size=1920")
    said = train_compile(*deep, f"compile_report={path}", code=3)
    report = json.loads(path.read_text())
    first, *others = report["changes"]
    assert first["fits"]
    assert first["compiled"] <= report["memory"]["capacity"]
    assert all(change["compiled"] and not change["fits"] for change in others), "one is enough"
    keys = " ".join(f"{key}={value}" for key, value in first["keys"].items())
    assert said.index(f"compiling with {keys}") < said.index(f"would help   {keys}\n")
    train_compile(*deep, *keys.split(), f"compile_report={path}")
    again = json.loads(path.read_text())["memory"]
    assert again["needed"] == first["compiled"]


@pytest.mark.long
@needs_cuda
def test_a_gpu_host_has_a_verdict_though_its_compiler_gives_none(tmp_path, monkeypatch, settings):
    monkeypatch.setattr("src.extras.plan.advice.changes", no_changes)
    path = tmp_path / "report.json"
    arguments = [BASE, "compile_topology=a3", *SMALL, "base_num_decoder_layers=1", f"compile_report={path}"]
    assert command([*arguments, "per_device_batch_size=65536", "attention=dot_product", "remat_policy=none"]) == 3
    report = json.loads(path.read_text())
    assert report["compiler_message"] == ""
    assert report["memory"]["needed"] > report["memory"]["capacity"]


@needs_cuda
def test_a_step_that_calls_cudnn_is_not_saved(tmp_path, settings):
    """XLA leaves cuDNN's kernels out of a program that it compiles without a GPU (openxla/xla, pull request 41021)."""
    arguments = [BASE, "compile_topology=a3:1", *SMALL, f"compiled_trainstep_file={tmp_path / 'step'}"]
    with pytest.raises(
        UserError, match=r"calls cuDNN \(attention=cudnn_flash\).*Compile and run with attention=blocked"
    ):
        main(arguments)
    assert not (tmp_path / "step").exists()


@pytest.mark.long
@needs_cuda
def test_a_step_for_gpus_without_cudnn_is_saved(tmp_path, settings):
    main([BASE, "compile_topology=a3:1", *SMALL, f"compiled_trainstep_file={tmp_path / 'step'}", "attention=blocked"])
    assert (tmp_path / "step").exists()


@needs_libtpu
def test_flags_that_would_end_libtpu_are_answered(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such=1")
    said = train_compile("compile_topology=v5e-4", *SMALL, code=2)
    assert "LIBTPU_INIT_ARGS in the environment: xla_no_such is not a flag of libtpu" in said


def test_another_memory_than_the_devices_main_one_is_no_question_of_size():
    def refuse(options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 18M of 16M")

    with pytest.raises(UserError, match=r"failed with RESOURCE_EXHAUSTED(.|\n)*vmem"):
        compile_lowered(SimpleNamespace(compile=refuse), parse_topology("v5e-4", 1), {})


def test_arrays_that_exceed_host_memory_are_named_as_such():
    """The words are libtpu 0.0.48's for `minimal_offloaded` with 1160B parameters on v5p-12288."""

    def refuse(options):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space host. Used 208.00G "
            "of 128.00G host. Exceeded host capacity by 80.00G."
        )

    with pytest.raises(
        UserError, match=r"host memory need 208\.00 GiB per device.*may have 128\.00 GiB there: keep fewer"
    ):
        compile_lowered(SimpleNamespace(compile=refuse), parse_topology("v5p-16", 1), {})


@pytest.mark.parametrize(
    ("topology", "environment", "most"),
    [("v5e-4", "", "44.70 GiB"), ("v5p-8", "", ""), ("a3", "", "64.00 GiB"), ("a3", "128", ""), ("cpu-4", "", "")],
)
def test_arrays_that_exceed_the_hosts_memory_are_refused_though_they_compile(topology, environment, most, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", environment)
    stats = SimpleNamespace(host_argument_size_in_bytes=60 * 2**30, host_temp_size_in_bytes=5 * 2**30)
    program = SimpleNamespace(memory_analysis=lambda: stats)
    lowered = SimpleNamespace(compile=lambda options: program)
    if most:
        with pytest.raises(UserError, match=f"need 65.00 GiB per device, and a device of {topology} may have {most}"):
            compile_lowered(lowered, parse_topology(topology, 1), {})
    else:
        assert compile_lowered(lowered, parse_topology(topology, 1), {}) == (program, "")


def test_one_array_that_exceeds_host_memory_is_named_as_such():
    """The words are libtpu 0.0.48's."""

    def refuse(options):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Allocation (size=268435456000) would exceed memory (size=137438953472) :: %s0 = "
            "inlined_call_operand.host [shape: f32[500,1048576,128], index: 0, kind: output]"
        )

    with pytest.raises(UserError, match=r"host memory need 250\.00 GiB per device.*may have 128\.00 GiB"):
        compile_lowered(SimpleNamespace(compile=refuse), parse_topology("v5p-16", 1), {})


def test_a_compiler_that_fails_is_quoted_with_what_to_try():
    def refuse(options):
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo %fusion.3")

    with pytest.raises(UserError) as said:
        compile_lowered(SimpleNamespace(compile=refuse), parse_topology("a3", 1), {})
    assert "the compiler for a3 failed with INTERNAL" in str(said.value)
    assert "Couldn't find output tile sizes that satisfy hlo %fusion.3" in str(said.value)
    assert "max_target_length as a multiple of 128, another attention" in str(said.value)


TINY = ("compile_topology=cpu-8", "base_emb_dim=8", "base_mlp_dim=8", "base_num_query_heads=1", "base_num_kv_heads=1")
SHORT = ("head_dim=8", "base_num_decoder_layers=1", "vocab_size=128", "max_target_length=8", "per_device_batch_size=1")


def failing(*arguments):
    raise UserError("the disk is full")


def test_a_report_that_cannot_be_written_leaves_the_program(tmp_path, monkeypatch, settings, capsys):
    step = tmp_path / "step"
    monkeypatch.setattr(sys.modules[main.__module__], "write_output", failing)
    with pytest.raises(UserError, match="the disk is full"):
        main([BASE, *TINY, *SHORT, f"compile_report={tmp_path / 'report'}", f"compiled_trainstep_file={step}"])
    assert step.read_bytes().startswith(b"MinText compiled training step")
    assert f"saved {step}" in capsys.readouterr().out


def offered(arguments, monkeypatch, capacity):
    """What would help a step of devices with this memory; the last entry, which is first, was compiled last."""
    monkeypatch.setattr("src.extras.aot.report.device_capacity", lambda topology: capacity)
    return main(arguments)["changes"]


def words(change):
    return shlex.split(typed(change["keys"]))


def test_an_offer_that_is_compiled_is_what_the_command_says_of_it(monkeypatch, settings, capsys):
    arguments = [BASE, *TINY, *SHORT, "per_device_batch_size=64", "remat_policy=none"]
    needed = main(arguments)["memory"]["needed"]
    first, *others = offered(arguments, monkeypatch, needed - 1)
    assert first["compiled"] < needed
    assert first["fits"]
    assert all(change["compiled"] for change in others), "nothing is guessed"
    assert f"compiling with {typed(first['keys'])}, estimated at" in capsys.readouterr().out
    assert main([*arguments, *words(first)])["memory"]["needed"] == first["compiled"]


@pytest.mark.long  # what is offered: tests/aot/test_memory.py
@pytest.mark.parametrize(
    ("setting", "part", "key"),
    [
        ("attention=dot_product", 2 / 3, "attention"),
        ("attention=autoselected", 2 / 3, "num_vocab_tiling"),
        ("num_vocab_tiling=64", 2 / 3, "ici_context_parallelism"),
    ],
)
def test_rows_that_are_too_long(setting, part, key, monkeypatch, settings):
    """A row per device: with less memory its scores or logits are computed in parts, or several devices share it."""
    long = [BASE, *TINY, *SHORT, "max_target_length=512", "remat_policy=full", setting]
    needed = main(long)["memory"]["needed"]
    first, *_ = offered(long, monkeypatch, round(needed * part))
    assert first["fits"]
    assert key in first["keys"]
    assert main([*long, *words(first)])["memory"]["needed"] == first["compiled"]


def test_what_takes_long_to_compile_is_tried_once(monkeypatch, settings, capsys):
    monkeypatch.setattr("src.extras.plan.advice.MAX_SECONDS_TO_TRY", 0)
    assert len(offered([BASE, *TINY, *SHORT], monkeypatch, 1)) <= 1  # none if it was compiled and did not help
    said = capsys.readouterr().out
    assert said.count("compiling with") == 1
    assert "no compiled change fits" in said


@needs_libtpu
@pytest.mark.long  # with the preset of one generation: test_a_step_for_a_tpu_slice_fits
@pytest.mark.parametrize("topology", ["v4-8", "v5e-8", "v5p-8", "v6e-8"])
def test_each_generation_compiles_its_preset_for_weights_that_are_gathered(topology, settings):
    report = main([BASE, f"compile_topology={topology}", "compile_xla_flags=auto", *SMALL, "max_target_length=128"])
    assert report["memory"]["fits"]


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("topology", ["v4-16", "v5p-16", "v5e-16", "v6e-16"])
def test_each_generation_has_room_for_attention_of_rows_of_8192(topology, settings):
    """Beside what the compiler itself puts into vector memory, which in smaller models is less."""
    sizes = ("base_emb_dim=1024", "base_mlp_dim=2048", "base_num_decoder_layers=2", "base_num_query_heads=8")
    sizes = (*sizes, "base_num_kv_heads=8", "head_dim=128", "vocab_size=4096", "max_target_length=8192")
    report = main([BASE, f"compile_topology={topology}", *sizes, "per_device_batch_size=4"])
    assert report["attention"] == "flash"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "compile_topology is empty"),
        (("compile_topology=v5q-128",), "v5p-128"),
        (("compile_topology=v5p-100",), "v5p-64, v5p-128"),
        (("compile_topology=cpu-8", "hardware=tpu"), "Leave hardware empty"),
        (("compile_topology=cpu-1", "compile_report=/dev/null/report.json"), "compile_report=/dev/null"),
        (
            ("compile_topology=cpu-1", "compile_report=foo://x"),
            "compile_report=foo://x: expected a path on this machine",
        ),
        (("compile_topology=cpu-1", "compile_report=a", "compiled_trainstep_file=./a"), "are both"),
        (("compile_topology=cpu-8", "ici_fsdp_parallelism=3"), "does not multiply out"),
        (("compile_topology=cpu-8", "compile_topology_num_slices=0"), "1 or more"),
        (("compile_topology=cpu-8", "compile_xla_flags=--xla_no_such_flag=1", *SMALL), "xla_no_such_flag"),
        (("compile_topology=cpu-8", "per_device_batch_size=0.3"), "does not divide"),
    ],
)
def test_a_mistake_is_answered(arguments, says, settings):
    with pytest.raises(UserError) as said:
        main([BASE, *arguments])
    assert says in str(said.value)


def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, settings, capsys):
    monkeypatch.setattr(sys, "argv", ["src.train_compile", BASE])
    with pytest.raises(SystemExit) as end:
        run_command(command)
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: compile_topology is empty")


COMPILING = """
import hashlib
import signal

from src.extras.aot import train_compile

def compiler(argv):
    print("compiling", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C for minutes, like a compiler

train_compile.main = compiler
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
train_compile.command([])
"""


def test_ctrl_c_ends_a_compilation_at_once():
    words = [sys.executable, "-c", COMPILING]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)  # Python would answer after the call
        finally:
            process.kill()
    assert (process.returncode, said) == (-signal.SIGINT, "")
