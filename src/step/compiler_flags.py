"""XLA's flags: those of `compile_xla_flags`, which go to the compiler as options, and those in the environment.

XLA refuses a wrong option by an exception. `XLA_FLAGS` and `LIBTPU_INIT_ARGS` are read once, when the libraries start,
and end the process where one is unknown: here a child process reads them first.
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

# A collective is fused with the computation it runs beside where both flags are on; today's libtpu has them off.
_ASYNC_ALL_GATHER, _ASYNC_ALL_REDUCE = (
    {f"xla_enable_async_{name}": "true", f"xla_tpu_enable_async_collective_fusion_fuse_{name}": "true"}
    for name in ("all_gather", "all_reduce")
)
_ASYNC = {**_ASYNC_ALL_GATHER, **_ASYNC_ALL_REDUCE}
# A layer's gradients are summed while the next layer computes; the two pinned JAX have other names for it. The newer
# libtpu refuses collectives that are fused with computations on v4 and v5p: results could be wrong there, it says.
if jax.__version_info__ < (0, 11):
    _PIPELINED, _ON, _ASYNC_ON_LARGE = "xla_gpu_enable_pipelined_", "true", _ASYNC
else:
    _PIPELINED, _ON, _ASYNC_ON_LARGE = "xla_gpu_pipeline_", "COLLECTIVE_PIPELINING_MODE_ON", {}
_GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    f"{_PIPELINED}reduce_scatter": _ON,
    f"{_PIPELINED}all_reduce": _ON,
    # Percent of the memory up to which the scheduler starts collectives early: beyond it they wait, one after another.
    "xla_gpu_memory_limit_slop_factor": "112",
}
# The flags that `auto` stands for, by `jax.Device.device_kind` (before it "multi-slice", where there are several), or
# else by platform. docs/aot.md tells what each does, and which of MaxText's and Pax's are left out: those that today's
# compilers do unasked, or take without a difference.
PRESETS: dict[str, dict[str, str]] = {
    "cpu": {},
    "gpu": _GPU,
    # Between hosts no command buffer, which starts its kernels only together.
    "multi-slice gpu": {**_GPU, "xla_gpu_enable_command_buffer": ""},
    "tpu": {},
    "TPU v4": _ASYNC_ON_LARGE,
    # Those of Pax's runs on several slices: with the four of one slice, layers of its 22B did not finish compiling.
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

BY_ITSELF = "it is retired, and XLA does so by itself"
# JAX adds this flag to LIBTPU_INIT_ARGS where it finds TPUs: it is not the user's, and not there on another machine.
_JAX_TPU_FLAG = "--xla_tpu_use_enhanced_launch_barrier"

_READ_XLA_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
_READ_LIBTPU_INIT_ARGS = """
from jaxlib import xla_client
from libtpu import get_library_path
xla_client.load_pjrt_plugin_dynamically("tpu", get_library_path())
xla_client.initialize_pjrt_plugin("tpu")
"""


def parse_flags(text: str) -> dict[str, str]:
    """Reads flags as XLA_FLAGS has them, `--xla_a=1 --xla_b` with spaces between; the last of a name counts.

    Raises UserError if a part of `text` is no flag.
    """
    flags = {}
    for part in text.split():
        if not (match := re.fullmatch(r"--(\w+)(?:=(.*))?", part)) or ",--" in part:
            raise UserError(
                f"compile_xla_flags: {part} is no flag; expected --name=value, with spaces between flags, or auto"
            )
        flags[match[1]] = "true" if match[2] is None else match[2]
    return flags


def compiler_options(text: str, device: jax.Device, slices: int) -> dict[str, str]:
    """Returns the options of the compiler of `device` that `compile_xla_flags` means, on so many slices or hosts.

    `text` has flags, or is `auto`: a preset for this kind of device. `always` adds its own, which `text` can turn off.
    The device may be one that is not here. Raises UserError if `text` is no list of flags, or the compiler does not
    take one of them.
    """
    if text == "auto":
        kinds = [device.device_kind, device.platform]
        kinds = [f"multi-slice {kind}" for kind in kinds if slices > 1] + kinds
        flags = next(PRESETS[kind] for kind in kinds if kind in PRESETS)
    else:
        flags = parse_flags(text)
    flags = always(device.platform) | flags
    # XLA's parser of options, unlike that of flags, reads a truth value with a capital alone.
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
                errors.append(f"{name} is no option of {_answer(package, name, value)}")
        if errors:
            raise UserError("\n".join(f"compile_xla_flags: {error}" for error in errors))
    return options


def _error(options: Mapping[str, str], device: jax.Device) -> str:
    """Returns the compiler's error for these options, a line; empty where it takes them."""
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error).removeprefix("INVALID_ARGUMENT: ").splitlines()[0]
        # Anything else is not about options: for two slices that are not here no program of one device compiles.
        if message.startswith(("No such compile option", "While setting option", "Failed to parse")):
            return message.rstrip(": ")  # some end where the reason would stand
    return ""


def _answer(package: str, name: str, value: str) -> str:
    """Returns the package that does not know a flag, with its version, and what replaced a retired one."""
    known = f"{package} {version(package)}."
    if (instead := hints().retired_flag(name, value)) is None:
        return known
    return f"{known} It is retired: {instead} is in its place." if instead else f"{known} Take it out: {BY_ITSELF}."


def environment_flags() -> dict[str, str]:
    """Returns XLA_FLAGS and LIBTPU_INIT_ARGS as the user set them, where set."""
    flags = {
        variable: " ".join(flag for flag in os.environ.get(variable, "").split() if not flag.startswith(_JAX_TPU_FLAG))
        for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return {variable: text for variable, text in flags.items() if text}


def check_environment(uses_tpu: bool) -> None:
    """Raises UserError for flags in the environment that would end the process once JAX starts a backend.

    Those that XLA retired, because it does by itself what they say, are taken out, each with a printed line.
    `uses_tpu`: this process will load libtpu. It takes 0.3 seconds for each variable that is set.
    """
    flags, problems = environment_flags(), []
    if "XLA_FLAGS" in flags:
        logged = re.findall(r"(?m)^[EF]\d{4} .*?\] (.+)", _start(_READ_XLA_FLAGS))
        problems = [("XLA_FLAGS", "jaxlib", line) for line in logged[:1]]  # what follows is its consequence
    if "LIBTPU_INIT_ARGS" in flags and uses_tpu and find_spec("libtpu") and not problems:
        logged = re.findall(r"(?m)^ERROR: (.+)", _start(_READ_LIBTPU_INIT_ARGS))
        problems = [("LIBTPU_INIT_ARGS", "libtpu", line) for line in logged]
    messages = []
    for variable, package, line in problems:
        match = re.match(r"Unknown flags? in XLA_FLAGS: (.+)|Unknown command line flag '(\w+)'", line)
        for flag in (match[1] or match[2]).split() if match else ():
            name = re.search(r"\w+", flag)[0]
            typed = next((word for word in flags[variable].split() if re.match(rf"--{name}(=|$)", word)), "")
            value = (typed or flag).partition("=")[2].strip("'\"") or "true"
            if (
                typed and hints().retired_flag(name, value) == ""
            ):  # no word has it where the variable names a file of flags
                print(f"{variable} in the environment: {typed} is left out: {BY_ITSELF}", flush=True)
                os.environ[variable] = " ".join(word for word in os.environ[variable].split() if word != typed)
            else:
                messages.append(f"{variable} in the environment: {flag} is no flag of {_answer(package, name, value)}")
        if not match:
            messages.append(f"{variable} in the environment: {line}")
    if messages:
        raise UserError("\n".join(messages))
    if problems:  # all of them left out: others may come after them
        check_environment(uses_tpu)


def _start(program: str) -> str:
    """Returns what a Python program that reads the environment's flags logs where it fails, else ""."""
    settings = {
        "PYTHONPATH": os.pathsep.join(sys.path),  # of the same libraries
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it takes no TPU, so another process may have them
        "TPU_SKIP_MDS_QUERY": "1",  # nor is there a server to ask for the slice
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    child = subprocess.run([sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True)
    return child.stderr if child.returncode else ""
