"""Profiles that steer XLA's scheduler: taken for the program that they are of, and for no other."""

import contextlib
import re
import struct
import warnings
from types import SimpleNamespace

import jax
import pytest
from jax._src import config as jax_config
from jax._src import profiler as jax_profiler
from jax.experimental.compilation_cache import compilation_cache

from src.extras.aot import pgle, program, train_compile
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.run import resolve_config
from src.step.compiler_flags import compiler_options
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests import runs
from tests.compilers import SMALL, needs_cuda
from tests.tiny import BASE, load


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def proto(microseconds):
    """XLA's ProfiledInstructionsProto, written by hand: costs, each a name and a double, and a latency between two."""
    latency = field(2, field(1, b"no") + field(2, b"cost") + b"\x19" + struct.pack("<d", 1.0))
    costs = [field(1, field(1, name.encode()) + b"\x11" + struct.pack("<d", us)) for name, us in microseconds.items()]
    return b"".join(costs) + latency


def step_of(topology, *keys):
    """A step, what its program depends on, and its lowering."""
    devices = abstract_devices(parse_topology(topology, 1))
    config = resolve_config.load([BASE, *SMALL, "dataset_type=synthetic", *keys])
    traced = trace_train_step(config, devices, compiler_options("auto", devices[0], 1))
    header = program.header(traced, config.model, config.step, config.batch, config.mesh)
    return traced, header


@pytest.fixture(scope="module")
def tiny():
    """A step on this machine's CPUs, which no profile is for, and its header."""
    config = load()
    traced = trace_train_step(config, jax.devices())
    return traced, program.header(traced, config.model, config.step, config.batch, config.mesh)


def written(path, header, profile):
    program.write_file(pgle.PROFILE_FILE, str(path), header, profile)
    return str(path)


def instructions(text):
    """The names of a program's instructions, in the order in which they run."""
    return re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", text, re.MULTILINE)


@pytest.fixture(scope="module")
def for_gpus():
    """A step for GPUs, lowered, its header and its program."""
    traced, header = step_of("a3", "base_num_decoder_layers=2")
    lowered = traced.jax_traced.lower()
    return lowered, header, lowered.compile().as_text()


def slow_gathers(path, header, digest, text):
    """A profile in which gathers are slow, named as XLA's profiler does; its path."""
    times = {f"{digest}::{it}": 5000.0 if "all-gather" in it else 1.0 for it in instructions(text)}
    return written(path, header, proto(times))


@needs_cuda
@pytest.mark.long
def test_a_profile_changes_the_schedule_of_the_same_program(for_gpus, tmp_path):
    """The compiler's own digest from before it makes the schedule is the same, and the order another."""
    lowered, header, plain = for_gpus
    before_schedule = re.search(r'fingerprint_before_lhs="(\w+)"', plain)[1]
    path = slow_gathers(tmp_path / "profile", header, before_schedule, plain)
    compiled, _ = train_compile.compile_lowered(lowered, parse_topology("a3", 1), pgle.options(path, header))
    text = compiled.as_text()
    assert re.search(r'fingerprint_before_lhs="(\w+)"', text)[1] == before_schedule
    assert instructions(text) != instructions(plain)
    pgle.check_used(path, pgle.options(path, header), text)


@needs_cuda
@pytest.mark.long
def test_the_command_that_compiles_ahead_of_time_does_so_by_the_profile(for_gpus, tmp_path, monkeypatch):
    plain = for_gpus[2]
    digest = re.search(r'fingerprint_before_lhs="(\w+)"', plain)[1]
    made, original = [], train_compile.compile_lowered
    monkeypatch.setattr(train_compile, "compile_lowered", lambda *given: made.append(original(*given)) or made[-1])
    keys = ("base_num_decoder_layers=2", "compile_xla_flags=auto")
    command = [BASE, *SMALL, *keys, "dataset_type=synthetic", "compile_topology=a3"]
    with jax.default_matmul_precision("default"):  # as the command sets it
        path = slow_gathers(tmp_path / "profile", step_of("a3", *keys)[1], digest, plain)
    try:
        train_compile.main([*command, f"pgle_profile={path}"])
        with pytest.raises(
            UserError, match=r"pgle=auto measures a run, but src\.train_compile only takes a finished profile"
        ):
            train_compile.main([*command, "pgle=auto"])
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_default_matmul_precision", None)
    ((program, _),) = made
    assert instructions(program.as_text()) != instructions(plain)


@needs_cuda
@pytest.mark.long
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_profile_of_another_program_is_refused(for_gpus, tmp_path, is_compiled):
    """Compiled by it, the program is the one without."""
    lowered, header, plain = for_gpus
    path = slow_gathers(tmp_path / "foreign", header, "0" * 32, plain)
    text = plain
    if is_compiled:
        text = lowered.compile(pgle.options(path, header)).as_text()
        assert instructions(text) == instructions(plain)
    with pytest.raises(UserError, match=r"has times for [\d,]+ instructions, of which 0 are in this program"):
        pgle.check_used(path, pgle.options(path, header), text)


def test_the_instructions_of_a_profile():
    long_name = "fusion." + "1" * 200
    assert list(pgle.profiled(proto({"all-gather.1": 2.0, long_name: 3.0}))) == ["all-gather.1", long_name]
    assert not list(pgle.profiled(proto({})))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-5], "is truncated or damaged"),
        (lambda content: content[:-5] + b"XXXXX", "is truncated or damaged"),
        (lambda content: b"", "is not what src.train pgle=collect"),
        (lambda content: program.STEP_FILE.first_line + content, "is not what src.train pgle=collect"),
    ],
    ids=["truncated", "damaged", "empty file", "a step"],
)
def test_what_is_no_profile_is_refused(tiny, tmp_path, damage, said):
    path = tmp_path / "profile"
    written(path, tiny[1], proto({"fusion.1": 2.0}))
    assert pgle.options(str(path), tiny[1])["fdo_profile"] == proto({"fusion.1": 2.0})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"pgle_profile={path} {said}"):
        pgle.options(str(path), tiny[1])


def test_a_profile_of_another_configuration_is_refused(tiny, tmp_path):
    config = load(base_mlp_dim=128)
    other = program.header(
        trace_train_step(config, jax.devices()), config.model, config.step, config.batch, config.mesh
    )
    path = written(tmp_path / "other", other, proto({"fusion.1": 2.0}))
    with pytest.raises(UserError, match=r"collected for a different run:\n  base_mlp_dim: 128 in the file, 64"):
        pgle.options(path, tiny[1])


def calls(step, traced, times):
    def ones(leaf):
        return jax.device_put(jax.numpy.ones(leaf.shape, leaf.dtype), leaf.sharding)

    state, batch = jax.tree.map(ones, (traced.state, traced.batch))
    for _ in range(times):
        state, _ = step(state, batch, traced.hparams)


def test_a_run_that_collects_writes_a_profile_of_its_program(tiny, tmp_path, monkeypatch, capsys):
    """On a CPU the profiler sees no kernel of a GPU; with what it would see in its place, the file is of this step."""
    traced, header = tiny
    collector = pgle._Collector(traced.jax_traced.lower(), header, tmp_path / "profile")
    with pytest.raises(UserError, match=r"pgle=collect: the profile of the step is empty.*CUPTI"):
        calls(collector, traced, 1 + pgle.PGLE_STEPS)
    assert not (tmp_path / "profile").exists()
    monkeypatch.setattr(pgle, "get_profiled_instructions_proto", lambda folder: proto({"fusion.1": 2.0}))
    calls(pgle._Collector(traced.jax_traced.lower(), header, tmp_path / "profile"), traced, 2 + pgle.PGLE_STEPS)
    assert pgle.options(str(tmp_path / "profile"), header)["fdo_profile"] == proto({"fusion.1": 2.0})
    assert f"compile with it by pgle_profile={tmp_path / 'profile'}" in capsys.readouterr().out


def test_a_run_that_ends_before_the_profile_does_says_so(tiny, tmp_path, capsys):
    """As one that goes on near its end; its profiler is off then."""
    traced, header = tiny
    for steps in (1, pgle.PGLE_STEPS):
        collector = pgle._Collector(traced.jax_traced.lower(), header, tmp_path / "profile")
        calls(collector, traced, steps)
        collector.close()
        assert f"pgle=collect wrote no profile: it needs 4 steps, and this start ran {steps}" in capsys.readouterr().out
    with jax.profiler.trace(str(tmp_path / "free")):
        pass


@pytest.mark.parametrize("kind", ["auto", "collect"])
def test_a_step_whose_products_are_wider_than_they_are_to_be_is_not_profiled(kind, tmp_path):
    """As the other steps of a run: of a GPU's program whose products are all made in float32."""
    text = "ENTRY %main (x: f32[]) -> f32[] {\n}"
    program = SimpleNamespace(as_text=lambda: text)
    lowered = SimpleNamespace(compile=lambda options=None: program)
    quantization = SimpleNamespace(kind="fp8", matmuls={})
    plan = SimpleNamespace(quantization=quantization, layout=SimpleNamespace(platform="gpu"), roles={})
    traced = SimpleNamespace(plan=plan, train=None, jax_traced=SimpleNamespace(lower=lambda: lowered))
    keys = SimpleNamespace(pgle=kind, pgle_profile="", compiled_trainstep_file="")
    with pytest.raises(
        UserError, match="0 matmuls in 8 bits, and these in more bits: every forward one, every backward"
    ):
        pgle.chosen_step(keys, traced, {}, tmp_path, contextlib.ExitStack())


def test_automatic_profiles_are_of_the_step_alone_and_never_empty():
    def step(state):
        assert jax_config.enable_pgle.value
        if not state:
            warnings.warn("PGLE collected an empty trace, may be due to contention", RuntimeWarning, stacklevel=1)
        return state

    automatic = pgle._automatic(step)
    assert automatic(5) == 5
    assert not jax_config.enable_pgle.value
    with pytest.raises(UserError, match="pgle=auto: the profile of the step is empty"):
        automatic(0)


@pytest.fixture
def empty_cache(tmp_path):
    """A folder of compiled programs of this test alone: another test may have compiled the same program."""
    ours = {"jax_compilation_cache_dir": str(tmp_path / "programs"), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: jax.config.values[name] for name in ours}
    for values in (ours, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # or JAX would go on with the folder of its first compilation
        if values is ours:
            yield


@pytest.mark.usefixtures("empty_cache")
def test_a_step_that_jax_compiled_by_its_profile_says_so(monkeypatch, capsys):
    """JAX's own doing, with a profile in place of the one it takes of a GPU; then from its cache of programs."""
    monkeypatch.setattr(jax_profiler._profiler, "get_fdo_profile", lambda xspace: proto({"fusion.1": 2.0, "b": 1.0}))
    monkeypatch.setattr(jax_profiler._profiler, "aggregate_profiled_instructions", lambda profiles, _: profiles[0])

    def lines(calls):
        automatic = pgle._automatic(jax.jit(lambda x: x * 3 + 1))
        for call in range(calls):
            assert automatic(jax.numpy.float32(call)) == 3 * call + 1
        jax.clear_caches()
        return capsys.readouterr().out.splitlines()

    assert lines(3) == []
    assert lines(6) == ["pgle=auto: compiled again with times for 2 instructions"]
    assert lines(2) == ["pgle=auto: jax_cache_dir has the step, compiled with an earlier run's profile"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pgle": "auto"}, "pgle=auto needs an NVIDIA GPU, but the platform is cpu"),
        ({"pgle": "collect"}, "pgle=collect needs an NVIDIA GPU, but the platform is cpu"),
        ({"pgle_profile": "p"}, "pgle_profile=p needs an NVIDIA GPU, but the platform is cpu"),
        ({"pgle": "auto", "compiled_trainstep_file": "s"}, "pgle=auto and compiled_trainstep_file=s exclude"),
        ({"pgle": "collect", "pgle_profile": "p"}, "pgle=collect and pgle_profile=p exclude each other"),
        ({"pgle": "auto", "profiler": "xplane"}, "pgle=auto and profiler=xplane exclude each other"),
        ({"pgle": "collect", "steps": 3}, "pgle=collect profiles steps 2 to 4, but steps=3"),
        ({"pgle": "auto", "steps": 3}, "pgle=auto compiles step 4 with a profile of earlier steps, but steps=3"),
        ({"pgle": "auto", "runs": 0}, "pgle=auto does nothing with JAX_PGLE_PROFILING_RUNS=0 in the environment"),
        (
            {"pgle_profile": "p", "compiled_trainstep_file": "s"},
            "the step in compiled_trainstep_file is already compiled",
        ),
    ],
)
def test_what_excludes_a_profile_is_said(keys, said, monkeypatch, capsys, tmp_path):
    if "runs" in keys:
        monkeypatch.setenv("JAX_PGLE_PROFILING_RUNS", str(keys["runs"]))
    keys = {key: value for key, value in keys.items() if key != "runs"}
    argv = runs.arguments(**{"steps": 20, "base_output_directory": tmp_path, **keys})
    assert said in runs.refusal(monkeypatch, capsys, argv)
    assert not (tmp_path / "run").exists()


def test_a_tpu_has_no_such_profile():
    with pytest.raises(UserError, match="pgle_profile=p needs an NVIDIA GPU, but the platform is tpu"):
        pgle.check_platform(SimpleNamespace(pgle="", pgle_profile="p"), "tpu")
