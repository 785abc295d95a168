"""Compiler flags from the configuration and from the environment, against XLA itself."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.extras.migration_hints import RETIRED_FLAGS, read_table
from src.step import compiler_flags
from src.step.compiler_flags import check_environment, compiler_options, environment_flags, parse_flags
from src.system.errors import UserError
from tests import runs

PAGES = "\n".join(page.read_text() for page in [runs.ROOT / "README.md", *runs.ROOT.glob("docs/**/*.md")])
NAMES = st.from_regex(r"xla_[a-z][a-z0-9_]*", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9_/.,+=-]*", fullmatch=True).filter(lambda value: ",--" not in value)


def abstract_device(topology, slices):
    """A device of a topology that is not here; skips where what knows it is not installed."""
    try:
        return abstract_devices(parse_topology(topology, slices))[0]
    except UserError as error:
        pytest.skip(str(error))


# ---- Flags of the configuration


@given(st.dictionaries(NAMES, VALUES))
def test_flags_are_read_as_they_are_written(flags):
    assert parse_flags("  ".join(f"--{name}={value}" for name, value in flags.items())) == flags


def test_a_flag_alone_is_true_and_the_last_of_a_name_counts():
    assert parse_flags("--xla_a --xla_b=1 --xla_b=2") == {"xla_a": "true", "xla_b": "2"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("xla_a=true", "xla_a=true"),
        ("--xla_a=1 true", "true"),
        ("-xla_a=1", "-xla_a=1"),
        ("--xla_a=1,--xla_b=2", "--xla_a=1,--xla_b=2"),
        ("auto --xla_a=1", "auto"),
        ("--", "--"),
    ],
)
def test_what_is_no_flag_is_refused(text, wrong):
    with pytest.raises(UserError, match=f"compile_xla_flags: {wrong} is not a flag; expected --name=value"):
        parse_flags(text)


def test_every_unknown_flag_is_named_before_anything_is_written(monkeypatch, capsys, tmp_path):
    argv = runs.arguments(
        base_output_directory=tmp_path,
        compile_xla_flags="--xla_cpu_enable_fast_mth=true --xla_cpu_use_acl=no --xla_gpu_enable_async_collective",
    )
    message = runs.refusal(monkeypatch, capsys, argv)
    assert "xla_cpu_enable_fast_mth is not an option of jaxlib" in message
    assert "xla_cpu_use_acl, 'no' is not a valid bool value" in message
    assert "xla_gpu_enable_async_collective is not an option of jaxlib" in message
    assert not list(tmp_path.iterdir())


def test_an_option_changes_the_program():
    def kernels(text):
        options = compiler_options(text, jax.devices()[0], 1)
        compiled = jax.jit(lambda x: jnp.sin(x) * 2 + 1, compiler_options=options).lower(1.0).compile()
        return compiled.as_text().count(" fusion(")

    assert kernels("") == 1
    assert kernels("--xla_disable_hlo_passes=fusion") != 1  # none, or with XLA's newer emitter one an operation


def test_a_run_with_flags_dumps_its_step_and_learns_the_same(tmp_path):
    keys = {"steps": 3, "max_target_length": 48, "enable_checkpointing": False}  # the length is no other test's
    flags = f"--xla_dump_to={tmp_path / 'dump'} --xla_cpu_enable_fast_math=false"
    runs.run_here(base_output_directory=tmp_path / "flags", compile_xla_flags=flags, **keys)
    runs.run_here(base_output_directory=tmp_path / "none", **keys)
    dumped = {path.name.split(".")[1] for path in (tmp_path / "dump").iterdir()}
    assert "jit_train_step" in dumped
    assert "jit_init_state" not in dumped
    assert runs.losses(tmp_path / "flags" / "run") == runs.losses(tmp_path / "none" / "run")


def test_a_retired_flag_is_left_out_where_xla_does_so_by_itself(capsys):
    retired = "--xla_gpu_enable_async_collectives=true --xla_gpu_enable_triton_softmax_fusion --xla_gpu_graph_level=3"
    kept = {"xla_cpu_enable_fast_math": "False"}
    assert compiler_options(f"--xla_cpu_enable_fast_math=false {retired}", jax.devices()[0], 1) == kept
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == [
        *("xla_gpu_enable_async_collectives=true", "xla_gpu_enable_triton_softmax_fusion=true", "xla_gpu_graph_level=3")
    ]


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--xla_gpu_enable_async_collectives=false", "--xla_gpu_disable_async_collectives=ALLCOLLECTIVES"),
        ("--xla_gpu_enable_async_all_gather=0", "--xla_gpu_disable_async_collectives=ALLGATHER"),
        ("--xla_gpu_graph_level=0", "--xla_gpu_enable_command_buffer="),
        ("--xla_gpu_enable_cudnn_fmha=true", "attention=cudnn_flash"),
        ("--xla_gpu_enable_triton_softmax_fusion=false", "no flag"),  # XLA does not stop fusing by itself
        ("--xla_gpu_lhs_enable_gpu_async_tracker=0", "no flag"),
    ],
)
def test_a_retired_flag_is_answered_with_what_is_in_its_place(flag, instead):
    with pytest.raises(UserError) as refused:
        compiler_options(flag, jax.devices()[0], 1)
    assert f"It is retired: {instead} replaces it." in str(refused.value)


def test_a_retired_flag_is_not_answered_with_its_opposite(monkeypatch):
    own, other = (
        ("enable_pipelined", "pipeline") if jax.__version_info__ < (0, 11) else ("pipeline", "enable_pipelined")
    )
    off = {"pipeline": "COLLECTIVE_PIPELINING_MODE_OFF", "enable_pipelined": "false"}
    for what in ("all_gather", "all_reduce", "reduce_scatter"):
        with pytest.raises(UserError, match=f"--xla_gpu_{own}_{what}={off[own]} replaces it"):
            compiler_options(f"--xla_gpu_{other}_{what}={off[other]}", jax.devices()[0], 1)
    with pytest.raises(UserError) as refused:
        compiler_options("--xla_gpu_enable_async_collectives=maybe", jax.devices()[0], 1)
    assert "disable" not in str(refused.value)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_async_collectives='true'")  # XLA takes the quotes off
    check_environment(uses_tpu=False)
    assert environment_flags() == {}


def test_what_is_in_a_retired_flags_place_is_there():
    """Of each pair of names that the page gives, this JAX has one, and takes the value that the page gives it."""
    device = jax.devices()[0]
    for name, answers in read_table()[RETIRED_FLAGS].items():
        texts = [text for text in answers.values() if text.startswith("--")]
        if texts and compiler_flags._error({name: ""}, device).startswith("No such compile option"):
            for text in texts:
                assert compiler_options(text, device, 1) == {
                    flag: value.title() if value in ("true", "false") else value
                    for flag, value in parse_flags(text).items()
                }


# ---- Presets


@pytest.mark.parametrize(
    ("topology", "slices", "holds"),
    [
        ("v4-16", 2, {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}),
        ("v4-16", 1, {}),
        ("v5p-16", 2, {"xla_tpu_scoped_vmem_limit_kib": "40960"}),
        ("v5e-16", 2, {"xla_enable_async_all_reduce": "True", "xla_tpu_scoped_vmem_limit_kib": "32768"}),
        ("v6e-16", 1, {"xla_tpu_scoped_vmem_limit_kib": "98304"}),
        ("tpu7x-16", 1, {}),
        ("a3", 1, {"xla_gpu_enable_latency_hiding_scheduler": "True", "xla_gpu_memory_limit_slop_factor": "112"}),
        ("a3", 2, {"xla_gpu_enable_triton_gemm": "False", "xla_gpu_enable_command_buffer": ""}),
    ],
)
def test_the_compiler_of_each_hardware_takes_its_preset(topology, slices, holds):
    device = abstract_device(topology, slices)
    assert holds.items() <= compiler_options("auto", device, slices).items()
    with pytest.raises(UserError, match="xla_no_such is not an option of"):
        compiler_options("--xla_no_such=1", device, slices)


@pytest.mark.parametrize(
    ("text", "triton"), [("", "False"), ("--xla_dump_to=/nowhere", "False"), ("--xla_gpu_enable_triton_gemm", "True")]
)
def test_a_gpus_products_are_cublas_unless_asked_otherwise(text, triton):
    assert compiler_options(text, abstract_device("a3", 1), 1)["xla_gpu_enable_triton_gemm"] == triton


def test_a_flag_of_the_environment_counts_before_what_is_always_given(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert "xla_gpu_enable_triton_gemm" not in compiler_options("", abstract_device("a3", 1), 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_unsupported_enable_triton_gemm=true")
    assert compiler_options("", abstract_device("a3", 1), 1)["xla_gpu_enable_triton_gemm"] == "False"


def test_a_cpu_has_no_preset():
    assert compiler_options("auto", jax.devices()[0], 1) == {}


def test_a_tpu_names_the_flag_whose_value_is_wrong():
    device = abstract_device("v5e-16", 1)
    with pytest.raises(UserError, match=r"'maybe' into flag xla_enable_async_all_gather.*Valid options are"):
        compiler_options("--xla_enable_async_all_gather=maybe", device, 1)
    with pytest.raises(UserError, match=r"'abc' into flag xla_tpu_scoped_vmem_limit_kib$"):
        compiler_options("--xla_tpu_scoped_vmem_limit_kib=abc", device, 1)
    with pytest.raises(UserError, match=r"xla_latency_hiding_scheduler is not an option of libtpu "):
        compiler_options("--xla_latency_hiding_scheduler=true", device, 1)


def test_options_that_the_pages_show_are_taken():
    for text in re.findall(r'compile_xla_flags="([^"]+)"', PAGES):
        of_tpu = any(name.startswith("xla_tpu") for name in parse_flags(text))
        compiler_options(text, abstract_device("v5e-16", 1) if of_tpu else jax.devices()[0], 1)


# ---- The environment


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--xla_gpu_async_collectives=true", "--xla_gpu_async_collectives=true is not a flag of jaxlib"),
        ("--xla_gpu_enable_async_collectives=false", "--xla_gpu_disable_async_collectives=ALLCOLLECTIVES replaces it"),
        ("--xla_cpu_enable_fast_mth --xla_dump_to=x --xla_no_such=1", "--xla_cpu_enable_fast_mth is not a flag of"),
        ("--xla_dump_to=x --xla_a=1 --xla_no_such=1", "--xla_no_such=1 is not a flag of"),
        ("--xla_cpu_enable_fast_math=yes", "value yes for flag xla_cpu_enable_fast_math"),
        ("no_such_file", 'Could not open file "no_such_file"'),
    ],
)
def test_xla_flags_that_would_end_the_process_are_named(monkeypatch, flags, said):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError, match="XLA_FLAGS in the environment: ") as refused:
        check_environment(uses_tpu=False)
    assert said in str(refused.value)


def test_xla_flags_that_work_are_let_through(monkeypatch, write):
    check_environment(uses_tpu=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2  --xla_cpu_enable_fast_math --xla_dump_to=/nowhere")
    check_environment(uses_tpu=False)
    monkeypatch.setenv("XLA_FLAGS", str(write("flags.txt", "--xla_cpu_enable_fast_math=false\n")))
    check_environment(uses_tpu=False)


def test_retired_xla_flags_are_taken_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_async_collectives=true --xla_cpu_enable_fast_math")
    check_environment(uses_tpu=False)
    assert environment_flags() == {"XLA_FLAGS": "--xla_cpu_enable_fast_math"}
    assert "--xla_gpu_enable_async_collectives=true is left out" in capsys.readouterr().out


def test_a_retired_flag_in_a_file_of_flags_is_answered(monkeypatch, write):
    """XLA_FLAGS may name a file, from which nothing can be taken out: no endless search for the flag."""
    monkeypatch.setenv("XLA_FLAGS", str(write("flags.txt", "--xla_gpu_enable_async_collectives=true\n")))
    with pytest.raises(UserError, match=r"async_collectives=true is not a flag of .* Remove it: it is retired"):
        check_environment(uses_tpu=False)


def test_flags_for_the_environment_that_the_pages_show_are_taken(monkeypatch):
    shown = re.findall(r'XLA_FLAGS="?(--\w+=\w+(?: --\w+=\w+)*)', PAGES)
    assert shown
    monkeypatch.setenv("XLA_FLAGS", " ".join(shown))
    check_environment(uses_tpu=False)


def test_a_command_says_what_is_wrong_with_the_environment(tmp_path):
    environment = {"XLA_FLAGS": "--xla_gpu_async_collectives=true", "JAX_PLATFORMS": "cpu", "PATH": ""}
    command = [sys.executable, "-m", "src.train", *runs.arguments(base_output_directory=tmp_path)]
    ended = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: XLA_FLAGS in the environment: --xla_gpu_async_collectives=true is")
    assert len(ended.stderr.splitlines()) == 1


def test_libtpus_arguments_are_read_where_a_tpu_is_used(monkeypatch):
    pytest.importorskip("libtpu", reason="libtpu is not installed: bash setup.sh aot")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_colective_fusion=true --xla_no_such=1")
    check_environment(uses_tpu=False)
    with pytest.raises(UserError) as refused:
        check_environment(uses_tpu=True)
    message = str(refused.value)
    assert "LIBTPU_INIT_ARGS in the environment: xla_no_such is not a flag of libtpu" in message
    assert "xla_tpu_enable_async_colective_fusion is not a flag of libtpu" in message
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=many")
    with pytest.raises(UserError, match="'many' specified for flag 'xla_tpu_scoped_vmem_limit_kib'"):
        check_environment(uses_tpu=True)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536 --xla_enable_async_all_gather=true")
    check_environment(uses_tpu=True)


def test_a_saved_programs_environment_is_what_the_user_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " --xla_b=2   --xla_a=1 ")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_c=3 --xla_tpu_use_enhanced_launch_barrier=true")
    assert environment_flags() == {"XLA_FLAGS": "--xla_b=2 --xla_a=1", "LIBTPU_INIT_ARGS": "--xla_c=3"}
    monkeypatch.delenv("XLA_FLAGS")
    # JAX's own alone, as it sets it on a machine with TPUs.
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true")
    assert environment_flags() == {}
