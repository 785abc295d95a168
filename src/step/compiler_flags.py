"""XLA's flags: those in `compile_xla_flags`, passed to the compiler as options, and those in the environment.

XLA rejects a wrong option with an exception. XLA_FLAGS and LIBTPU_INIT_ARGS are read once, when the libraries start,
and an unknown flag in them ends the process: a child process therefore reads them first.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

import jax

from src.config.hints import hints
from src.step.eval_step import always
from src.system.errors import UserError, say

# If both flags are on, a collective is fused with the computation that it overlaps; both are off by default.
_ASYNC_ALL_GATHER, _ASYNC_ALL_REDUCE = (
    {f"xla_enable_async_{name}": "true", f"xla_tpu_enable_async_collective_fusion_fuse_{name}": "true"}
    for name in ("all_gather", "all_reduce")
)
_ASYNC = {**_ASYNC_ALL_GATHER, **_ASYNC_ALL_REDUCE}
# Sum a layer's gradients while the next layer computes; the two pinned versions of JAX use different flag names. The
# newer libtpu rejects collectives fused with computations on v4 and v5p, because results could be wrong there.
if jax.__version_info__ < (0, 11):
    _PIPELINED, _ON, _ASYNC_ON_LARGE = "xla_gpu_enable_pipelined_", "true", _ASYNC
else:
    _PIPELINED, _ON, _ASYNC_ON_LARGE = "xla_gpu_pipeline_", "COLLECTIVE_PIPELINING_MODE_ON", {}
_GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    f"{_PIPELINED}reduce_scatter": _ON,
    f"{_PIPELINED}all_reduce": _ON,
    # Percent of memory up to which the scheduler starts collectives early: beyond it they run one after another.
    "xla_gpu_memory_limit_slop_factor": "112",
}
# The flags of `auto`, by `jax.Device.device_kind`, or else by platform; prefixed with "multi-slice" for several slices
# or hosts. docs/aot.md explains each, and which flags of MaxText and Pax are left out: those that are now the default,
# or make no difference.
PRESETS: dict[str, dict[str, str]] = {
    "cpu": {},
    "gpu": _GPU,
    # No command buffers between hosts: a buffer's kernels can only start together.
    "multi-slice gpu": {**_GPU, "xla_gpu_enable_command_buffer": ""},
    "tpu": {},
    "TPU v4": _ASYNC_ON_LARGE,
    # Pax's flags for several slices. With `_ASYNC_ON_LARGE` too, layers of Pax's 22B did not finish compiling.
    "multi-slice TPU v4": {
        "xla_enable_async_all_gather": "true",
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": "0",
        "xla_tpu_spmd_threshold_for_allgather_cse": "10000",
        "xla_tpu_enable_latency_hiding_scheduler": "true",
    },
    "TPU v5": {**_ASYNC_ON_LARGE, "xla_tpu_scoped_vmem_limit_kib": "40960"},
    "TPU v5 lite": {**_ASYNC_ALL_REDUCE, "xla_tpu_scoped_vmem_limit_kib": "32768"},
    "TPU v6 lite": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
}

BY_ITSELF = "it is retired, because XLA now does this by default"
# JAX adds this flag to LIBTPU_INIT_ARGS if it finds TPUs: the user did not set it, and other machines lack it.
_JAX_TPU_FLAG = "--xla_tpu_use_enhanced_launch_barrier"

_READ_XLA_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
_READ_LIBTPU_INIT_ARGS = """
from jaxlib import xla_client
from libtpu import get_library_path
xla_client.load_pjrt_plugin_dynamically("tpu", get_library_path())
xla_client.initialize_pjrt_plugin("tpu")
"""


def parse_flags(text: str) -> dict[str, str]:
    """Parses flags in the format of XLA_FLAGS, `--xla_a=1 --xla_b`, separated by spaces; the last value of a name wins.

    Raises UserError if a part of `text` is not a flag.
    """
    flags = {}
    for part in text.split():
        if not (match := re.fullmatch(r"--(\w+)(?:=(.*))?", part)) or ",--" in part:
            raise UserError(
                f"compile_xla_flags: {part} is not a flag; expected --name=value, with spaces between flags, or auto"
            )
        flags[match[1]] = "true" if match[2] is None else match[2]
    return flags


def compiler_options(text: str, device: jax.Device, slices: int) -> dict[str, str]:
    """Resolves `compile_xla_flags` to options of the compiler for `device`, on this many slices or hosts.

    `text` has flags, or is `auto`: a preset for this kind of device. `always` adds options that `text` can turn off.
    Flags that XLA retired because it now does the same by default are left out, with a message for each. The device may
    be absent. Raises UserError if `text` is not a list of flags, or the compiler rejects one of them.
    """
    if text == "auto":
        kinds = [device.device_kind, device.platform]
        kinds = [f"multi-slice {kind}" for kind in kinds if slices > 1] + kinds
        flags = next(PRESETS[kind] for kind in kinds if kind in PRESETS)
    else:
        flags = parse_flags(text)
    flags = always(device.platform) | flags
    # XLA's parser of options, unlike its parser of flags, only accepts truth values that are capitalised.
    options = {name: value.title() if value in ("true", "false") else value for name, value in flags.items()}
    if options and _error(options, device):
        package, errors = "libtpu" if device.platform == "tpu" else "jaxlib", []
        for name, value in flags.items():
            error = _error({name: options[name]}, device)
            if not error.startswith("No such compile option"):
                errors += [error] if error else []
            elif hints().retired_flag(name, value) == "":
                say([f"compile_xla_flags: {name}={value} is left out: {BY_ITSELF}"])
                del options[name]
            else:
                errors.append(f"{name} is not an option of {_answer(package, name, value)}")
        if errors:
            raise UserError("\n".join(f"compile_xla_flags: {error}" for error in errors))
    return options


def _error(options: Mapping[str, str], device: jax.Device) -> str:
    """First line of the compiler's error about these options; empty without an error, or for an unrelated one."""
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error).removeprefix("INVALID_ARGUMENT: ").splitlines()[0]
        # Other errors are not about options: for example, a single-device program does not compile for absent slices.
        if message.startswith(("No such compile option", "While setting option", "Failed to parse")):
            return message.rstrip(": ")  # some messages end with a colon but give no reason
    return ""


def _answer(package: str, name: str, value: str) -> str:
    """Names the package that does not know a flag, its version, and the replacement of a retired flag."""
    known = f"{package} {version(package)}."
    if (instead := hints().retired_flag(name, value)) is None:
        return known
    return f"{known} It is retired: {instead} replaces it." if instead else f"{known} Remove it: {BY_ITSELF}."


def environment_flags() -> dict[str, str]:
    """XLA_FLAGS and LIBTPU_INIT_ARGS as the user set them, omitting empty ones."""
    flags = {
        variable: " ".join(flag for flag in os.environ.get(variable, "").split() if not flag.startswith(_JAX_TPU_FLAG))
        for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return {variable: text for variable, text in flags.items() if text}


def check_environment(uses_tpu: bool) -> None:
    """Raises UserError for flags in the environment that would end the process when JAX starts a backend.

    Removes flags that XLA retired because it now does the same by default, and prints a line for each. `uses_tpu`: this
    process will load libtpu. Takes 0.3 seconds for each variable that is set.
    """
    flags, problems = environment_flags(), []
    if "XLA_FLAGS" in flags:
        logged = re.findall(r"(?m)^[EF]\d{4} .*?\] (.+)", _start(_READ_XLA_FLAGS))
        problems = [("XLA_FLAGS", "jaxlib", line) for line in logged[:1]]  # later lines are consequences
    if "LIBTPU_INIT_ARGS" in flags and uses_tpu and find_spec("libtpu") and not problems:
        logged = re.findall(r"(?m)^ERROR: (.+)", _start(_READ_LIBTPU_INIT_ARGS))
        problems = [("LIBTPU_INIT_ARGS", "libtpu", line) for line in logged]
    messages = []
    for variable, package, line in problems:
        match = re.match(r"Unknown flags? in XLA_FLAGS: (.+)|Unknown command line flag '(\w+)'", line)
        for flag in (match[1] or match[2]).split() if match else ():
            name = re.findall(r"\w+", flag)[0]
            typed = next((word for word in flags[variable].split() if re.match(rf"--{name}(=|$)", word)), "")
            value = (typed or flag).partition("=")[2].strip("'\"") or "true"
            if (
                typed and hints().retired_flag(name, value) == ""
            ):  # `typed` is empty if the variable names a file of flags
                print(f"{variable} in the environment: {typed} is left out: {BY_ITSELF}", flush=True)
                os.environ[variable] = " ".join(word for word in os.environ[variable].split() if word != typed)
            else:
                messages.append(
                    f"{variable} in the environment: {flag} is not a flag of {_answer(package, name, value)}"
                )
        if not match:
            messages.append(f"{variable} in the environment: {line}")
    if messages:
        raise UserError("\n".join(messages))
    if problems:  # all were removed: the next start may report others
        check_environment(uses_tpu)


def _start(program: str) -> str:
    """Runs a Python program that reads the environment's flags; returns its stderr if it fails, otherwise ""."""
    settings = {
        "PYTHONPATH": os.pathsep.join(sys.path),  # use the same libraries
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it uses no TPU, so another process may hold them
        "TPU_SKIP_MDS_QUERY": "1",  # there may be no server to ask about the slice
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    child = subprocess.run([sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True)
    return child.stderr if child.returncode else ""
