"""A compiled step as a file: what its header tells, when it is refused, and what is never read from it."""

import hashlib
import io
import json
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from src.config.schema import defaults, keys_of
from src.extras.aot import program, train_compile
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import parse_topology
from src.step import train_step
from src.step.trace import trace_train_step
from src.system.errors import UserError
from tests import runs
from tests.aot.save_step import header as step_header
from tests.aot.save_step import no_cache, save
from tests.tiny import load as load_config
from tests.tiny import tree_bits

KEYS = {"per_device_batch_size": 1, "base_num_decoder_layers": 1}
DEVICES = jax.devices()[::-1]  # the mesh of a TPU slice seldom has its devices in their own order either


def build_step(**overrides):
    config = load_config(**{**KEYS, **overrides})
    return config, trace_train_step(config, DEVICES)


@pytest.fixture(scope="module")
def step():
    """(config, the traced step, its header)."""
    config, traced = build_step()
    return config, traced, step_header(config, traced)


@pytest.fixture(scope="module")
def saved(step, tmp_path_factory):
    """(the path of the step's file, its program)."""
    path = tmp_path_factory.mktemp("saved") / "folder" / "step"
    return path, save(step[0].replace(compiled_trainstep_file=str(path)), step[1])


@pytest.fixture(scope="module")
def file(saved):
    return saved[0]


def refusal(path, step):
    """What a run with this step says to the file; nothing where it is loaded. The step may have its header already."""
    config, traced, *known = step
    with pytest.raises(UserError) as error:
        program.load(str(path), *(known or [step_header(config, traced)]), traced)
    return str(error.value)


def parts(content):
    """(first line, header, program) of a file's bytes, read by docs/aot.md's description of it."""
    first, _, rest = content.split(b"\n", 2)
    header, length = json.JSONDecoder().raw_decode(rest.decode("latin-1"))
    return first, header, rest[length + 1 :]


def written(path, header, payload):
    """A file whose digest is right, whatever its header and program are."""
    body = json.dumps(header, indent=1).encode() + b"\n" + payload
    second = f"sha256 {hashlib.sha256(body).hexdigest()} of the {len(body)} bytes that follow\n".encode()
    path.write_bytes(b"MinText compiled training step, format 2\n" + second + body)
    return path


# ---- What the file says


def test_the_file_begins_with_what_it_is_for(file, step):
    first, header, payload = parts(file.read_bytes())
    assert first == b"MinText compiled training step, format 2"
    assert header == step[2]
    assert header["devices"]["kind"] == "cpu"
    assert (header["devices"]["count"], header["devices"]["processes"]) == (8, 1)
    assert header["mesh"] == {"data": 1, "stage": 1, "fsdp": 8, "context": 1, "expert": 1, "tensor": 1}
    assert header["versions"] == {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    assert header["config"]["base_emb_dim"] == "32"
    assert header["jax_config"]["jax_enable_x64"] == "False"
    assert header["arguments"]["state.trainable.embedding"] == "float32[128, 32] sharded (None, 'fsdp')"
    assert header["arguments"]["batch.loss_mask"] == "float32[8, 16] sharded ('fsdp', None)"
    assert header["arguments"]["hparams.learning_rate"] == "float32[] sharded ()"
    assert payload.startswith(b"\x80"), "a pickle"


def test_it_is_written_whole_or_not_at_all(saved, step, tmp_path):
    path, compiled = saved
    assert [each.name for each in path.parent.iterdir()] == ["step"], "nothing is left beside it"
    (tmp_path / "file").write_text("")
    with no_cache(), pytest.raises(UserError, match="cannot write it"):
        program.save(str(tmp_path / "file" / "step"), compiled, step[2])


def test_a_link_leads_to_the_file_that_is_replaced(saved, step, tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "step", tmp_path / "link"
    target.write_text("MinText compiled training step, format 1\n")
    link.symlink_to(target)
    with no_cache():
        program.save(str(link), saved[1], step[2])
    assert link.is_symlink()
    assert target.read_bytes().startswith(b"MinText")
    assert [each.name for each in target.parent.iterdir()] == ["step"]


def test_what_is_no_regular_file_stays_what_it_is(saved, step, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with no_cache(), pytest.raises(UserError, match="not a regular file"):
            program.save(str(path), saved[1], step[2])
    assert pipe.is_fifo()
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_what_is_loaded_computes_what_was_saved(saved, step):
    path, compiled = saved
    _, traced, header = step

    def ones(leaf):
        return jax.device_put(jnp.ones(leaf.shape, leaf.dtype), leaf.sharding)

    results = []
    for train in (compiled, program.load(str(path), header, traced)):
        state, batch = jax.tree.map(ones, (traced.state, traced.batch))
        results.append(tree_bits(train(state, batch, traced.hparams)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.weights.trainable)), "the old state is donated"
    assert results[0] == results[1]


# ---- A file that is not as it was written


@settings(max_examples=40)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(file, step, tmp_path_factory, place, bit):
    content = bytearray(file.read_bytes())
    # Half of the places are in the lines before the program, which is a thousand times as long.
    place = int(place * 2 * 600) if place < 0.5 else int((place - 0.5) * 2 * len(content))
    content[place] ^= 1 << bit
    damaged = tmp_path_factory.getbasetemp() / "damaged"
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=r"is truncated or damaged|is not what"):
        program.load(str(damaged), step[2], step[1])


@pytest.mark.parametrize("kept", [0, 20, 60, 1000, -1])
def test_a_shortened_file_is_refused(file, step, tmp_path, kept):
    short = tmp_path / "short"
    short.write_bytes(file.read_bytes()[:kept])
    expected = "is truncated or damaged" if kept in (60, 1000, -1) else "is not what src.train_compile"
    assert expected in refusal(short, step)


def test_what_is_no_compiled_step_is_refused(step, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(pickle.dumps([1, 2]))
    assert "is not what src.train_compile" in refusal(foreign, step)
    assert "cannot read it" in refusal(tmp_path / "none", step)
    assert "cannot read it" in refusal(tmp_path, step)


class Touch:
    """What a pickle may do that is loaded without care: it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_other_name_than_a_step_is_made_of_is_looked_up(step, tmp_path):
    evil = written(tmp_path / "evil", step[2], pickle.dumps(Touch(tmp_path / "touched")))
    said = refusal(evil, step)
    assert "pathlib" in said
    assert str(evil) in said
    assert not (tmp_path / "touched").exists()
    pickle.loads(evil.read_bytes().partition(b"\n}\n")[2])
    assert (tmp_path / "touched").exists(), "a pickle that does no harm shows nothing"


@pytest.mark.parametrize(
    "header",
    [{}, {"program": "x"}, {"program": 1, "devices": []}, [1], {name: {} for name in program.COMPARED}],
    ids=str,
)
def test_another_header_under_a_right_digest_is_none_of_ours(step, tmp_path, header):
    said = refusal(written(tmp_path / "other", header, b""), step)
    assert f"{tmp_path / 'other'} was not written by MinText, though its digest is right" in said


@pytest.mark.parametrize(
    "payload",
    [b"", b"garbage", pickle.dumps(5), pickle.dumps((1, 2, 3)), pickle.dumps(([], [], True)), b"\x80\x04]" * 3],
)
def test_another_program_under_a_right_digest_is_none_of_ours(step, tmp_path, payload):
    said = refusal(written(tmp_path / "other", step[2], payload), step)
    assert f"{tmp_path / 'other'} was not written by MinText, though its digest is right" in said


def test_a_header_that_is_no_json_is_none_of_ours(step, tmp_path):
    body = b"{no json\n}\n"
    second = f"sha256 {hashlib.sha256(body).hexdigest()} of the {len(body)} bytes that follow\n".encode()
    (tmp_path / "other").write_bytes(program.STEP_FILE.first_line + second + body)
    assert "its header is not JSON" in refusal(tmp_path / "other", step)


def test_a_program_that_the_devices_do_not_load_is_refused(file, step, tmp_path):
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("exec", b"no program") if obj == "program" else None

    with open(tmp_path / "payload", "wb") as opened:
        Pickler(opened).dump(("program", [], True))
    other = written(tmp_path / "other", step[2], (tmp_path / "payload").read_bytes())
    assert "these devices do not load it" in refusal(other, step)


# ---- A program for something else


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"per_device_batch_size": 2}, "per_device_batch_size: 1.0 in the file, 2.0 here"),
        ({"ici_tensor_parallelism": 2}, "mesh.tensor: 1 in the file, 2 here"),
        ({"max_target_length": 32}, "batch.tokens: int32[8, 16] sharded "),
        ({"dtype": "bfloat16"}, "dtype: float32 in the file, bfloat16 here"),
        ({"remat_policy": "full"}, "remat_policy: none in the file, full here"),
        ({"opt_type": "sgd"}, "opt_type: adamw in the file, sgd here"),
        ({"z_loss_multiplier": 1e-4}, "z_loss_multiplier: 0.0 in the file, 0.0001 here"),
        ({"dropout_rate": 0.1}, "dropout_rate: 0.0 in the file, 0.1 here"),
        ({"base_emb_dim": 64}, "base_emb_dim: 32 in the file, 64 here"),
        ({"logical_axis_rules__embed": []}, "logical_axis_rules: "),
    ],
)
def test_what_is_compiled_in_may_not_change(file, overrides, line):
    assert f"\n  {line}" in refusal(file, build_step(**overrides))


def test_the_precision_of_products_is_compiled_in(file):
    with jax.default_matmul_precision("high"):  # as src.run.run_setup sets it by the key
        said = refusal(file, build_step(matmul_precision="high"))
    assert "\n  matmul_precision: highest in the file, high here" in said


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_disable_most_optimizations", False),
        ("jax_memory_fitting_level", "O1"),
        ("jax_compiler_enable_remat_pass", False),
        ("jax_threefry_partitionable", False),
        ("jax_enable_x64", True),
    ],
)
def test_settings_of_jax_are_compiled_in(file, step, setting, value):
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        said = refusal(file, step[:2])
    finally:
        jax.config.update(setting, before)
    assert f"\n  jax_config.{setting}: {before} in the file, {value} here" in said


def test_all_that_differs_is_listed(file):
    said = refusal(file, build_step(base_emb_dim=64, remat_policy="full", mu_dtype="bfloat16", learning_rate=0.5))
    keys = [line.split(":")[0].strip() for line in said.splitlines() if " in the file, " in line]
    assert {"base_emb_dim", "remat_policy", "mu_dtype"} <= set(keys)
    assert "learning_rate" not in keys, "it may change, so it is no reason"
    assert re.search(r"\n  and \d+ more\n", said), "of the arguments, which all differ, the first few"


def test_the_seed_is_compiled_in_with_dropout_alone(step, file):
    config, traced = build_step(init_weights_seed=1)
    assert program.differences(step[2], step_header(config, traced)) == []
    dropout = [step_header(*build_step(dropout_rate=0.1, init_weights_seed=seed)) for seed in (0, 1)]
    assert program.differences(*dropout) == ["init_weights_seed: 0 in the file, 1 here"]


def test_another_order_of_devices_is_another_program(file, step):
    assert "\n  devices.order: " in refusal(file, (step[0], trace_train_step(step[0], jax.devices())))


def test_changed_code_is_another_program(file, step, monkeypatch):
    monkeypatch.setattr(train_step, "clip", lambda gradients, norm, threshold: gradients)
    assert "MinText's code" in refusal(file, build_step())


def test_another_machine_versions_and_flags_are_listed(file, step, tmp_path, monkeypatch):
    header = {
        **step[2],
        "devices": {**step[2]["devices"], "kind": "TPU v5 lite", "count": 256, "slices": 2},
        "versions": {"jax": "0.1.2", "jaxlib": "0.1.2", "libtpu": "0.0.9"},
        "compiler_options": {"xla_a": "1"},
        "environment": {"XLA_FLAGS": "--xla_b=1"},
        "config": {**step[2]["config"], "init_weights_seed": "7"},
    }
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_c=1")
    said = refusal(written(tmp_path / "other", header, b""), step[:2])
    for line in (
        "devices.kind: TPU v5 lite in the file, cpu here",
        "devices.count: 256 in the file, 8 here",
        "devices.slices: 2 in the file, 1 here",
        f"versions.jax: 0.1.2 in the file, {jax.__version__} here",
        "versions.libtpu: 0.0.9 in the file, nothing here",
        "compiler_options.xla_a: 1 in the file, nothing here",
        "environment.XLA_FLAGS: --xla_b=1 in the file, nothing here",
        "environment.LIBTPU_INIT_ARGS: nothing in the file, --xla_c=1 here",
    ):
        assert f"\n  {line}" in said
    assert "init_weights_seed" not in said, "the program is the same, so no key is a reason"


# What a run may change: a value for each of program.RUN_TIME_KEYS that is none of a job's coordinator.
# fmt: off
RUN_TIME = {
    "jax_cache_dir": "", "learning_rate": 0.5, "lr_schedule_type": "wsd", "learning_rate_schedule_steps": 7,
    "warmup_steps_fraction": 0.3, "learning_rate_final_fraction": 0.2, "wsd_decay_steps_fraction": 0.4,
    "adam_b1": 0.7, "adam_b2": 0.8, "adam_eps": 1e-3, "adam_weight_decay": 0.3, "muon_beta": 0.5,
    "gradient_clipping_threshold": 0.0,
    "on_nonfinite": "skip", "abort_on_nan_loss": False, "abort_on_inf_loss": False, "skip_step_scaling_factor": 3.0,
    "long_documents": "truncate", "batch_transform": "copy:copy",
    "per_device_batch_size_start": 1.0, "per_device_batch_size_increment": 1.0, "global_rampup_samples": 64,
}
# fmt: on


OF_PROCESSES = {
    key for key in keys_of("mesh") if key.startswith(("coordinator", "process_id", "num_processes", "jax_"))
}


def test_what_enters_at_run_time_may_change(step):
    config = step[0]
    groups = {"steps": 5, "run_name": "other", "dataset_path": "x", "decode_seed": 4, "checkpoint_period": 9}
    changed = config.replace(**RUN_TIME, **groups)
    assert program.differences(step[2], step_header(changed, trace_train_step(changed, DEVICES))) == []
    assert set(RUN_TIME) == program.RUN_TIME_KEYS - OF_PROCESSES
    assert all(config[key] != value for key, value in RUN_TIME.items())
    assert set(defaults()) > program.RUN_TIME_KEYS


# ---- The digest of a program

KERNEL = """
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

def double(x, factor, compiler_params):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * factor
    return pl.pallas_call(kernel, out_shape=x, compiler_params=compiler_params)(x)
"""


def traced_for(platform, source_file, factor):
    """A Pallas kernel whose source is in this file; no accelerator is needed to trace and lower it."""
    names = {}
    exec(compile(KERNEL, source_file, "exec"), names)
    parameters = {"tpu": None, "cuda": names["triton"].CompilerParams()}[platform]
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    # A later JAX asks which GPU a kernel of Triton's is for.
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu") if platform == "cuda" else None
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(lambda x: names["double"](x, factor, parameters)).trace(x)
        lowered = traced.lower(lowering_platforms=(platform,))
    return SimpleNamespace(jaxpr=traced.jaxpr, lower=lambda: lowered)


@pytest.fixture
def frames_in_locations():
    """Gives the compiler places in Python's sources, as users' programs do; other tests are compiled without them."""
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_kernel_is_the_same_wherever_its_source_lies(platform, frames_in_locations):
    here, there = traced_for(platform, "/here/kernel.py", 2.0), traced_for(platform, "/over/there/kernel.py", 2.0)
    assert here.lower().as_text() != there.lower().as_text(), "the compiler is given the source's place"
    assert program.program_text(here, program.kernel_text) == program.program_text(there, program.kernel_text)
    assert program.program_text(here) == program.program_text(there), "nor does it matter without the kernels"
    changed = traced_for(platform, "/here/kernel.py", 3.0)
    texts = [
        program.program_text(SimpleNamespace(jaxpr="", lower=each.lower), program.kernel_text)
        for each in (here, changed)
    ]
    assert texts[0] != texts[1], "what the compiler is given counts, and not the jaxpr alone"


def test_present_devices_have_the_program_of_absent_ones(step):
    """JAX names the kind of memory in the shardings of devices that have memory: only of those that are present."""
    traced = step[1].jax_traced
    assert "memory_kind=device" in str(traced.jaxpr)
    text = program.program_text(traced)
    assert "memory_kind=device" not in text
    host = NamedSharding(Mesh(np.array(DEVICES[:1]), "x"), PartitionSpec(), memory_kind="pinned_host")
    moved = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, host)).trace(jnp.ones(8))
    assert "memory_kind=pinned_host" in program.program_text(moved)


def traced_with_python_partitioning():
    """A step that XLA asks Python to partition, as it does for JAX's own function of cuDNN's attention."""

    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(
        partition=lambda mesh, arguments, result: (mesh, lambda x: 2 * x, result.sharding, (result.sharding,)),
        sharding_rule="i -> i",
    )
    sharding = NamedSharding(Mesh(np.array(DEVICES), "x"), PartitionSpec("x"))
    traced = jax.jit(double, in_shardings=sharding, out_shardings=sharding).trace(jnp.ones(8))
    return SimpleNamespace(jaxpr="the same", lower=traced.lower)


def test_a_kernel_partitioned_by_python_is_the_same_in_every_process():
    first, second = traced_with_python_partitioning(), traced_with_python_partitioning()
    assert first.lower().as_text() != second.lower().as_text(), "the compiler is given a Python object's address"
    assert program.program_text(first) == program.program_text(second)


def test_a_kernel_partitioned_by_python_is_saved(tmp_path):
    with no_cache():
        program.save(str(tmp_path / "step"), traced_with_python_partitioning().lower().compile(), {"no": "header"})
    assert parts((tmp_path / "step").read_bytes())[1] == {"no": "header"}


# ---- Programs for devices that are not here


class Names(pickle.Unpickler):
    """Collects the names that a pickle looks up, and makes nothing of them."""

    class Nothing:
        def __new__(cls, *arguments, **keys):
            return object.__new__(cls)

        def __init__(self, *arguments, **keys):
            pass

        def __setstate__(self, state):
            pass

    def __init__(self, payload):
        super().__init__(io.BytesIO(payload))
        self.found = set()

    def find_class(self, module, name):
        self.found.add(f"{module}.{name}")
        return self.Nothing

    def persistent_load(self, pid):
        return None


def test_hosts_of_gpus_are_its_slices():
    """As they are where the program is loaded: there JAX numbers each host as a slice."""
    try:
        hosts = abstract_devices(parse_topology("a3", 4))
    except UserError as error:
        pytest.skip(str(error))
    config = load_config(**KEYS, attention="dot_product")
    devices = step_header(config, trace_train_step(config, hosts))["devices"]
    assert (devices["count"], devices["slices"], devices["processes"]) == (32, 4, 4)


@pytest.mark.long
@pytest.mark.parametrize(("topology", "kernel"), [("a3", "blocked"), ("v5e-8", "flash")])
def test_steps_for_accelerators_are_made_of_the_same_names(tmp_path, topology, kernel, capsys):
    sizes = {"base_emb_dim": 128, "base_num_query_heads": 1, "base_num_kv_heads": 1, "head_dim": 128, "vocab_size": 256}
    keys = {"base_num_decoder_layers": 1, "base_mlp_dim": 128, "max_target_length": 128, "per_device_batch_size": 1}
    more = {"compile_topology": topology, "compiled_trainstep_file": tmp_path / "step", "attention": kernel}
    arguments = [f"{key}={value}" for key, value in {**sizes, **keys, **more}.items()]
    try:
        with no_cache():  # which the command switches off
            train_compile.main([runs.BASE, *arguments])
    except UserError as error:
        if "needs the package" in str(error):
            pytest.skip(str(error))
        raise
    assert re.search(rf"attention +{kernel}\b", capsys.readouterr().out)
    names = Names(parts((tmp_path / "step").read_bytes())[2])
    names.load()
    assert names.found <= program.PICKLED
    assert "jax._src.interpreters.pxla.UnloadedMeshExecutable" in names.found
