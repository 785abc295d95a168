"""A compiled training step as a file: `src.train_compile` saves it, and `src.train` runs it without compiling.

The file has a line naming its format; a line with the digest and size of the rest; the header, a JSON object that
describes what the program was compiled for; and the program, a pickle made by JAX. The digest detects damage, not
tampering.
"""

import contextlib
import hashlib
import io
import json
import pickle
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.experimental import serialize_executable
from jax.experimental.mosaic.dialects import tpu
from jax.extend.mlir import ir
from jaxlib.triton import dialect as triton

from src.config.schema import BatchKeys, Mesh, Model, Step
from src.config.yaml import dump
from src.data.batch_schedule import RAMP_KEYS
from src.extras.aot.devices import CUDA
from src.extras.command_files import write_output
from src.parallel.slices import count_slices
from src.step.compiler_flags import environment_flags
from src.step.same_program import program_text
from src.step.trace import TracedTrainStep
from src.system.errors import UserError, changed_keys, first_few

Header = dict[str, Any]


class FileKind(NamedTuple):
    """A kind of file that belongs to one compiled program."""

    key: str  # the config key that takes its path
    first_line: bytes
    maker: str  # the command that writes it
    verb: str  # past participle for messages


STEP_FILE = FileKind(
    "compiled_trainstep_file", b"MinText compiled training step, format 2\n", "src.train_compile", "compiled"
)

# All classes and functions in a pickled step, in JAX 0.10.2 and 0.11.2, on CPU, TPU and GPU.
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

# JAX settings that change how a step is compiled; then, from jax_enable_x64 on, settings that change how it is traced.
# The program's digest covers tracing too, so of the latter only those that users set are listed.
# fmt: off
JAX_SETTINGS = (
    "jax_disable_most_optimizations", "jax_exec_time_optimization_effort", "jax_memory_fitting_effort",
    "jax_optimization_level", "jax_memory_fitting_level", "jax_compiler_enable_remat_pass", "jax_xla_profile_version",
    "jax_enable_pgle", "jax_use_shardy_partitioner",
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_random_seed_offset",
)
# fmt: on

# Keys that do not affect the compiled step, so that src.plan uses a compiled point again if they differ. In a header,
# leaving them out only keeps the list of differences short: the program's digest decides whether a program matches.
# fmt: off
RUN_TIME_KEYS = frozenset((
    "jax_cache_dir", "learning_rate", "lr_schedule_type", "learning_rate_schedule_steps", "warmup_steps_fraction",
    "learning_rate_final_fraction", "wsd_decay_steps_fraction", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay",
    "muon_beta", "gradient_clipping_threshold", "on_nonfinite", "abort_on_nan_loss", "abort_on_inf_loss",
    "skip_step_scaling_factor", "long_documents", "batch_transform", *RAMP_KEYS[1:],
    "coordinator_address", "num_processes", "process_id",
    "jax_distributed_initialization_timeout", "jax_distributed_heartbeat_timeout_seconds",
))
# fmt: on

# Header parts that are JSON objects whose values must all match.
COMPARED = ("devices", "mesh", "versions", "compiler_options", "environment", "jax_config")


def header(traced: TracedTrainStep, *sections: Model | Step | BatchKeys | Mesh) -> Header:
    """Builds the header, a JSON object: everything that a step's program depends on.

    `program` is a digest of the traced step, which changes with MinText's code and with keys; `config`, the keys of the
    config's `sections`, only explains why two digests differ.
    """
    mesh = traced.plan.layout.mesh
    devices = list(mesh.devices.flat)
    platform = devices[0].platform
    packages = {"tpu": ["libtpu"], "gpu": [f"jax-cuda{CUDA}-plugin", f"jax-cuda{CUDA}-pjrt"]}.get(platform, [])
    arguments = {"state": traced.state.by_name(), "batch": traced.batch, "hparams": traced.hparams}
    return {
        "devices": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "slices": count_slices(devices),
            "processes": len({device.process_index for device in devices}),
            # Network position of each device in the mesh: the program sends along those links.
            "order": _digest(str([(device.id, *getattr(device, "coords", ())) for device in devices]))[:16],
            **({"processor": _processor()} if platform == "cpu" else {}),
        },
        "mesh": dict(mesh.shape),
        "versions": _versions("jax", "jaxlib", *packages),
        "compiler_options": dict(traced.compiler_options),
        "environment": environment_flags(),
        # Only settings that this version of JAX has.
        "jax_config": {name: str(jax.config.values[name]) for name in JAX_SETTINGS if name in jax.config.values},
        "program": _digest(program_text(traced.jax_traced, kernel_text)),
        "config": {
            key: dump(value) for section in sections for key, value in vars(section).items() if key not in RUN_TIME_KEYS
        },
        "arguments": {
            jax.tree_util.keystr(path, simple=True, separator="."): _describe(leaf)
            for path, leaf in jax.tree.leaves_with_path(arguments)
        },
    }


def _versions(*packages: str) -> dict[str, str]:
    """Returns the versions of those `packages` that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)  # hyperparameters are numbers, replicated on every device
    return f"{leaf.dtype}{list(leaf.shape)} sharded {tuple(sharding.spec) if sharding else ()}"


def _processor() -> str:
    """Describes this machine's processor, whose instruction sets XLA's CPU backend compiles for."""
    information = Path("/proc/cpuinfo")
    if not information.exists():  # not Linux
        return platform.processor()
    fields = dict(re.findall(r"(?m)^(\w[\w ]*?)\s*: (.+)$", information.read_text()))
    instructions = fields.get("flags") or fields["Features"]  # x86 or ARM
    return f"{fields.get('model name', 'unnamed')}, instruction sets {_digest(instructions)[:8]}"


def kernel_text(bytecode: bytes) -> str:
    """Renders a Pallas kernel as text, which unlike its serialized form does not contain source file names."""
    with ir.Context() as context:
        tpu.register_dialect(context)
        triton.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode))


def differences(saved: Header, current: Header) -> list[str]:
    """Lists the differences between a file's header and this run's, a line each; empty if the program is the same."""
    if {**saved, "config": None} == {**current, "config": None}:
        return []
    lines = []
    if saved["program"] != current["program"]:
        lines += _changes(saved["config"], current["config"])
    for section in COMPARED:
        lines += _changes(saved[section], current[section], f"{section}.")
    # A wider model changes every argument of the step: show only a few.
    lines += first_few(_changes(saved["arguments"], current["arguments"]), "\n").splitlines()
    changed = "MinText's code, a package, your `loss` or a JAX setting has changed"
    return lines or [f"the step itself: no key differs, so {changed}"]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in changed_keys(saved, current):
        yield f"{prefix}{name}: {saved.get(name, 'nothing')} in the file, {current.get(name, 'nothing')} here"


def save(path: str, compiled: jax.stages.Compiled, header: Header) -> None:
    """Writes the program with its header to `path`; raises UserError if the path is not writable."""
    # For a cached program, XLA's CPU backend serializes only an outline, which loads but fails in its first step.
    assert not jax.config.jax_enable_compilation_cache, "the program may be one that the compilation cache kept"
    # `keepalive` has the Python callbacks of custom partitioning, if there are any, which can't be pickled. Drop them:
    # XLA has already called them.
    executable: Any = compiled._executable
    executable._unloaded_executable.keepalive = None
    program, _, _ = serialize_executable.serialize(compiled)
    write_file(STEP_FILE, path, header, program)


def load(path: str, header: Header, traced: TracedTrainStep) -> jax.stages.Compiled:
    """Loads the program at `path`, to be called like `traced.train`.

    Raises UserError as `read_file` does, or if the program is not a step or does not load on these devices.
    """
    where = f"compiled_trainstep_file={path}"
    program = read_file(STEP_FILE, path, header)
    # Use the mesh's order: JAX defaults to the devices' own order, and a mesh in another order would crash the process.
    devices = tuple(traced.plan.layout.mesh.devices.flat)
    try:
        unloaded, arguments, no_kwargs = _Unpickler(io.BytesIO(program), devices[0].client, devices).load()
        in_tree = jax.tree.structure(((traced.state, traced.batch, traced.hparams), {}))
        out_tree = jax.tree.structure(traced.jax_traced.out_info)
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"{where}: these devices do not load it: {error}") from None
    except Exception as error:  # unpickling something else may fail in any way
        raise UserError(
            f"{where} was not written by MinText, though its digest is right: {type(error).__name__}: {error}. "
            "It is not loaded; src.train_compile writes one."
        ) from error


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """JAX's unpickler, which fills in devices and the program; raises UnpicklingError for names not in `PICKLED`."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PICKLED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which no step does")
        return super().find_class(module, name)


def write_file(kind: FileKind, path: str, header: Header, content: bytes) -> None:
    """Writes content for the program of `header`; raises UserError if the path is not writable."""
    body = json.dumps(header, indent=1).encode() + b"\n" + content
    write_output(kind.key, path, kind.first_line + _second_line(body) + body)


def read_file(kind: FileKind, path: str, header: Header) -> bytes:
    """Returns the content of a file that `write_file` wrote.

    Raises UserError if the file cannot be read, is of another kind or version, is damaged, or does not match `header`.
    """
    where, not_loaded = f"{kind.key}={path}", f"It is not loaded; {kind.maker} writes one."
    try:
        whole = epath.Path(path).expanduser().read_bytes()
    except Exception as error:  # each store's client raises its own types
        raise UserError(f"{where}: cannot read it: {type(error).__name__}: {error}") from error
    foreign = f"{where} was not written by MinText, though its digest is right: "
    saved_text, _, content = _checked(where, whole, kind).partition(b"\n}\n")
    try:
        saved = json.loads(saved_text + b"}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{foreign}its header is not JSON: {error}. {not_loaded}") from None
    parts = {**dict.fromkeys((*COMPARED, "config", "arguments"), dict), "program": str}
    if not isinstance(saved, dict) or not all(isinstance(saved.get(part), kind) for part, kind in parts.items()):
        raise UserError(f"{foreign}its header is not a step's. {not_loaded}")
    if lines := differences(saved, header):
        listed = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"{where} was {kind.verb} for a different run:\n{listed}\n"
            f"Make one for this run (python -m {kind.maker}), or leave {kind.key} empty."
        )
    return content


def _checked(where: str, content: bytes, kind: FileKind) -> bytes:
    first_line, second_line, body = (*content.split(b"\n", 2), b"", b"")[:3]
    if first_line + b"\n" != kind.first_line:
        raise UserError(
            f"{where} is not what {kind.maker} of this version writes: it begins with {first_line[:60]!r}, "
            f"expected {kind.first_line.decode().strip()!r}"
        )
    if second_line + b"\n" != _second_line(body):
        raise UserError(f"{where} is truncated or damaged: its digest does not match. Copy it again.")
    return body


def _second_line(body: bytes) -> bytes:
    return f"sha256 {hashlib.sha256(body).hexdigest()} of the {len(body)} bytes that follow\n".encode()
