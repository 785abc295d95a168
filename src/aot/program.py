"""A compiled training step as a file: `src.train_compile` saves it, `src.train` runs it without compiling.

The file, from its start: a line that says what it is; a line with the digest and the number of the bytes that follow;
the header, a JSON object that says what the program is for; the program, a pickle that JAX made. The digest tells
damage, not intent: a compiled program is code, to be loaded only from those whose code one would run.
"""

import hashlib
import io
import json
import pickle
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax.experimental import serialize_executable
from jax.experimental.mosaic.dialects import tpu
from jax.extend.mlir import ir
from jaxlib.triton import dialect as triton

from src.aot.outputs import write_output
from src.config.schema import KEYS, keys_of
from src.config.yaml import dump
from src.errors import UserError, first_few
from src.parallel.mesh import count_slices
from src.step.build import TracedStep, program_text
from src.step.compiler_flags import environment_flags

Header = dict[str, Any]

FIRST_LINE = b"MinText compiled training step, format 2\n"
SECOND_LINE = "sha256 {digest} of the {size} bytes that follow\n"

# All that a pickled step is made of, in JAX 0.10.2 and 0.11.2, on CPU, TPU and GPU.
# fmt: off
PICKLED = frozenset((
    "jax.P", "jax._src.core.ManualAxisType", "jax._src.core.MemorySpace", "jax._src.core.ShapedArray",
    "jax._src.interpreters.pxla.AllArgsInfo", "jax._src.interpreters.pxla.UnloadedMeshExecutable",
    "jax._src.layout.AutoLayoutSingleton", "jax._src.layout.Layout", "jax._src.linear_util.DebugInfo",
    "jax._src.mesh.AbstractDevice", "jax._src.mesh.AbstractMesh", "jax._src.mesh.AxisType", "jax._src.mesh.Mesh",
    "jax._src.named_sharding._unpickle_named_sharding", "jax._src.stages.ArgInfo", "jaxlib._jax.DeviceList",
    "ml_dtypes.bfloat16", "numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct",
))
# fmt: on

# Settings of JAX that change what it makes of a step: how it compiles, and how it traces. The program's digest sees the
# latter too, and more of them; here they have names.
# fmt: off
JAX_SETTINGS = (
    "jax_disable_most_optimizations", "jax_exec_time_optimization_effort", "jax_memory_fitting_effort",
    "jax_optimization_level", "jax_memory_fitting_level", "jax_compiler_enable_remat_pass", "jax_xla_profile_version",
    "jax_enable_pgle", "jax_use_shardy_partitioner",
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_explicit_x64_dtypes",
    "jax_default_prng_impl", "jax_enable_custom_prng", "jax_threefry_partitionable", "jax_threefry_gpu_kernel_lowering",
    "jax_random_seed_offset", "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp", "jax_use_direct_linearize",
    "jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_allow_f16_reductions", "jax_embedded_constants_max_bytes",
    "jax_use_simplified_jaxpr_constants", "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering", "jax_pallas_use_mosaic_gpu", "jax_pallas_enable_debug_checks",
    "jax_pallas_poison_buffers", "jax_mosaic_allow_hlo",
)
# fmt: on

# Keys of base.yml that have no part in the compiled step: whole sections, and single keys of others. Whether a program
# is the wrong one its digest says; this only keeps the list of reasons short.
RUN_TIME_SECTIONS = ("run", "aot", "data", "tools", "evaluation", "decoding", "checkpoint", "diagnostics")
# fmt: off
RUN_TIME_KEYS = frozenset((
    "jax_cache_dir", "learning_rate", "lr_schedule_type", "learning_rate_schedule_steps", "warmup_steps_fraction",
    "learning_rate_final_fraction", "wsd_decay_steps_fraction", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay",
    "muon_beta", "gradient_clipping_threshold", "on_nonfinite", "long_documents", "batch_transform",
    "coordinator_address", "num_processes", "process_id",
    "jax_distributed_initialization_timeout", "jax_distributed_heartbeat_timeout_seconds",
))
# fmt: on

# Parts of a header that are JSON objects, each value of which has to be the same.
COMPARED = ("devices", "mesh", "versions", "compiler_options", "environment", "jax_config")


def header(config: Mapping[str, Any], built: TracedStep) -> Header:
    """Returns what the program of a step depends on, as a JSON object: another header, another program.

    `program` is the digest of the traced step, which any change of MinText's code or of a key changes; `config` only
    explains such a change.
    """
    mesh = built.plan.layout.mesh
    devices = list(mesh.devices.flat)
    run_time_keys = RUN_TIME_KEYS.union(*(keys_of(section) for section in RUN_TIME_SECTIONS))
    return {
        "devices": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "slices": count_slices(devices),
            "processes": len({device.process_index for device in devices}),
            # Where on the network each place of the mesh is: the program sends along those links.
            "order": _digest(str([(device.id, *getattr(device, "coords", ())) for device in devices]))[:16],
            **({"processor": _processor()} if devices[0].platform == "cpu" else {}),
        },
        "mesh": dict(mesh.shape),
        "versions": _versions(devices[0].platform),
        "compiler_options": dict(built.compiler_options),
        "environment": environment_flags(),
        # Those that this version of JAX has.
        "jax_config": {name: str(jax.config.values[name]) for name in JAX_SETTINGS if name in jax.config.values},
        "program": _digest(program_text(built.traced, _kernel_text)),
        "config": {key: dump(config[key]) for key in KEYS if key not in run_time_keys},
        "arguments": {
            jax.tree_util.keystr(path, simple=True, separator="."): _describe(leaf)
            for path, leaf in jax.tree.leaves_with_path(
                {"state": built.state.by_name(), "batch": built.batch, "hparams": built.hparams}
            )
        },
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)  # the hyper-parameters are numbers, on every device
    return f"{leaf.dtype}{list(leaf.shape)} sharded {tuple(sharding.spec) if sharding else ()}"


def _versions(hardware: str) -> dict[str, str]:
    """Returns the versions of the packages that compile and run a program on `tpu`, `gpu` or `cpu`."""
    packages = {"tpu": ["libtpu"], "gpu": ["jax-cuda12-plugin", "jax-cuda12-pjrt"]}.get(hardware, [])
    installed = {distribution.name for distribution in metadata.distributions()}
    return {package: metadata.version(package) for package in ["jax", "jaxlib", *packages] if package in installed}


def _processor() -> str:
    """Returns this machine's processor, whose instructions XLA's CPU backend compiles for."""
    information = Path("/proc/cpuinfo")
    if not information.exists():  # no Linux
        return platform.processor()
    fields = dict(re.findall(r"(?m)^(\w[\w ]*?)\s*: (.+)$", information.read_text()))
    instructions = fields.get("flags") or fields["Features"]  # x86 or ARM
    return f"{fields.get('model name', 'unnamed')}, instruction sets {_digest(instructions)[:8]}"


def _kernel_text(bytecode: bytes) -> str:
    """Returns a Pallas kernel as text, which unlike its serialised form does not name its source files."""
    with ir.Context() as context:
        tpu.register_dialect(context)
        triton.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode))


def differences(saved: Header, current: Header) -> list[str]:
    """Returns a line for each thing that differs between a file's header and this run's; none for the same program."""
    if {**saved, "config": None} == {**current, "config": None}:
        return []
    lines = []
    if saved["program"] != current["program"]:
        lines += _changes(saved["config"], current["config"])
    for section in COMPARED:
        lines += _changes(saved[section], current[section], f"{section}.")
    # A wider model changes every argument of the step.
    lines += first_few(_changes(saved["arguments"], current["arguments"]), "\n").splitlines()
    return lines or ["the step itself: no key differs, so the code of MinText or of a package that it uses has changed"]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in {**saved, **current}:
        old, new = saved.get(name, "nothing"), current.get(name, "nothing")
        if old != new:
            yield f"{prefix}{name}: {old} in the file, {new} here"


def save(path: str, compiled: jax.stages.Compiled, header: Header) -> None:
    """Writes the program with its header to `path`; raises UserError where nothing can be written there."""
    # XLA's CPU backend saves of such a program but its outline: it loads, and then fails in its first step.
    assert not jax.config.jax_enable_compilation_cache, "the program may be one that the compilation cache kept"
    # It keeps alive the Python functions of custom partitioning (cuDNN's attention has it), which XLA has called by now
    # and which can't be pickled.
    compiled._executable._unloaded_executable.keepalive = None
    program, _, _ = serialize_executable.serialize(compiled)
    body = json.dumps(header, indent=1).encode() + b"\n" + program
    second_line = SECOND_LINE.format(digest=hashlib.sha256(body).hexdigest(), size=len(body))
    write_output("compiled_trainstep_file", path, FIRST_LINE + second_line.encode() + body)


def load(path: str, header: Header, built: TracedStep) -> jax.stages.Compiled:
    """Returns the program at `path`, to be called as `built.train` is; every process of a job loads it.

    Args:
        path: a file that `save` wrote.
        header: what the program has to be for.
        built: the step that it takes the place of.

    Raises:
        UserError: the file can't be read, is damaged or not of `save`, or its program is for something else.
    """
    saved, program = _read(path)
    if lines := differences(saved, header):
        listed = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"compiled_trainstep_file={path} was compiled for another run than this:\n{listed}\n"
            "Compile it for this one (python -m src.train_compile), or leave compiled_trainstep_file empty."
        )
    # In the mesh's order: the devices' own order is JAX's default, with which a mesh of another ends the process.
    devices = tuple(built.plan.layout.mesh.devices.flat)
    try:
        unpickler = _Unpickler(io.BytesIO(program), devices[0].client, devices)
        unloaded, arguments, no_kwargs = unpickler.load()
        executable = unloaded.load()
        in_tree = jax.tree.structure(((built.state, built.batch, built.hparams), {}))
        out_tree = jax.tree.structure(built.traced.out_info)
        return jax.stages.Compiled(executable, [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"compiled_trainstep_file={path}: these devices do not load it: {error}") from None
    except Exception as error:  # a pickle of something else may fail in any way
        raise _foreign(path, f"{type(error).__name__}: {error}") from error


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """JAX's unpickler, which puts in devices and the program; it looks up no name but those a step is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PICKLED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no step does")
        return super().find_class(module, name)


def _read(path: str) -> tuple[Header, bytes]:
    """Returns a file's header and program, its digest checked before anything else."""
    where = f"compiled_trainstep_file={path}"
    try:
        content = epath.Path(path).expanduser().read_bytes()
    except Exception as error:  # each store's client has its own types
        raise UserError(f"{where}: cannot read it: {type(error).__name__}: {error}") from error
    first_line, _, rest = content.partition(b"\n")
    if first_line + b"\n" != FIRST_LINE:
        raise UserError(
            f"{where} is not what src.train_compile of this version writes: it begins with {first_line[:60]!r}, "
            f"expected {FIRST_LINE.decode().strip()!r}"
        )
    second_line, _, body = rest.partition(b"\n")
    expected = re.fullmatch(SECOND_LINE.format(digest="([0-9a-f]{64})", size=r"(\d+)").strip().encode(), second_line)
    if expected and len(body) < int(expected[2]):
        raise UserError(f"{where} is cut off: {len(body):,} of {int(expected[2]):,} bytes are there. Copy it again.")
    if not expected or len(body) > int(expected[2]) or hashlib.sha256(body).hexdigest().encode() != expected[1]:
        raise UserError(f"{where} is damaged: its digest is another than when it was written. Copy it again.")
    text, _, program = body.partition(b"\n}\n")
    try:
        header = json.loads(text + b"}")
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"its header is no JSON: {error}") from None
    objects = [
        isinstance(header, dict) and isinstance(header.get(part), dict) for part in (*COMPARED, "config", "arguments")
    ]
    if not all(objects) or not isinstance(header.get("program"), str):
        raise _foreign(path, "its header is not a step's")
    return header, program


def _foreign(path: str, why: str) -> UserError:
    return UserError(
        f"compiled_trainstep_file={path} is none of ours, though its digest is right: {why}. It is not loaded; "
        "src.train_compile saves one."
    )
