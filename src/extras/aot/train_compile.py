"""Compiles the training step ahead of time, on any machine: `python -m src.train_compile configs/base.yml key=value`.

`compile_topology` names the devices. The printed report says whether the step fits them, what fills their memory, and
how fast it should run (docs/aot.md). The exit code is 3 if it does not fit.
"""

import contextlib
import itertools
import json
import re
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
from ml_collections import ConfigDict

from src.config.schema import Config
from src.config.usage import Usage
from src.extras.aot import eight_bits, pgle, program, report
from src.extras.aot.devices import abstract_devices
from src.extras.aot.topology import Topology, parse_topology
from src.extras.command_files import check_outputs, write_output
from src.extras.idle_settings import idle_settings
from src.run.run_setup import configured
from src.run.summary import print_header
from src.step.compiler_flags import check_environment, compiler_options
from src.step.trace import TracedTrainStep, trace_train_step
from src.system.errors import UserError, show
from src.system.imports import optional

USAGE = Usage(
    """Compiles a run's step for hardware that need not be present: memory use, speed, and suggestions.

python -m src.train_compile CONFIG compile_topology=v5p-128 [key=value ...]""",
    ("Compilation ahead of time",),
)
DOES_NOT_FIT = 3  # exit code
CUDNN_CALL = "@__cudnn$"  # in StableHLO


def main(argv: Sequence[str] | ConfigDict) -> report.Report | None:
    """Runs the command line `argv`, or a config: prints a report, and writes the files that its keys name.

    Returns the report, also if the step does not fit its devices, or None for --help. A step that does not fit is not
    saved, and its report has `changes` that reduce its memory. Raises UserError if a key or environment variable is
    wrong, a compiler is missing or fails for another reason than a device's memory, a profile belongs to another step,
    a matmul that `quantization` selects has more than 8 bits, or a file cannot be written; also as `configured` does.
    """
    config = configured(argv, USAGE, joins=False)
    if config is None:
        return None
    topology = checked_topology(config)
    program_path, report_path = config.aot.compiled_trainstep_file, config.aot.compile_report
    outputs = {"compiled_trainstep_file": program_path, "compile_report": report_path}
    check_outputs({key: path for key, path in outputs.items() if path})
    # The report includes the compilation time, so don't use the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    times = [time.monotonic()]
    traced = traced_for(config, topology)
    times.append(time.monotonic())
    for line in idle_settings(config.mesh, traced.plan):
        show(line)
    print(
        f"compiling for {report.describe(topology.name, topology.slices)}; this may take minutes, and Ctrl-C ends it",
        flush=True,
    )
    lowered = traced.jax_traced.lower()
    if program_path and CUDNN_CALL in lowered.as_text():
        raise UserError(
            f"compiled_trainstep_file: this step calls cuDNN (attention={traced.plan.kernel}), whose kernels XLA "
            "compiles only with the GPU at hand: the saved step would fail there. Compile and run with "
            "attention=blocked. Or leave compiled_trainstep_file empty: jax_cache_dir keeps what a first run compiles."
        )
    header = program.header(traced, config.model, config.step, config.batch, config.mesh)
    profile = pgle.options(config.aot.pgle_profile, header) if config.aot.pgle_profile else {}
    times.append(time.monotonic())
    compiled, refusal = compile_lowered(lowered, topology, profile)
    times.append(time.monotonic())
    if profile and compiled:
        pgle.check_used(config.aot.pgle_profile, profile, compiled.as_text() or "")
    if compiled:
        eight_bits.check(compiled, traced.plan)
    parts = zip(("tracing", "lowering", "compiling"), itertools.pairwise(times), strict=True)
    seconds = {name: end - start for name, (start, end) in parts}

    result = report.make_report(topology, traced, compiled, refusal, seconds)
    result["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print_header(report.lines(result))
    fits = result["memory"]["fits"]
    if not fits and (plan := optional("plan.advice")):
        memory = result["memory"]
        result["changes"] = plan.advise(config, topology, memory["needed"], memory["capacity"], _compiled_change)
        print_header([("would help ", "\n".join(report.change_lines(result)))])
    elif not fits:
        show("no changes that would help are sought: src/extras/plan is missing")

    if program_path and compiled and fits:
        program.save(program_path, compiled, header)
        show(f"saved {program_path}")
    elif program_path:
        show(f"{program_path} was not written: the step does not fit")
    if report_path:
        write_output("compile_report", report_path, (json.dumps(result, indent=2) + "\n").encode())
    return result


def checked_topology(config: Config) -> Topology:
    """Returns the config's topology; raises UserError for keys or an environment that no compilation accepts."""
    if not config.aot.compile_topology:
        raise UserError("compile_topology is empty: name the devices to compile for, such as compile_topology=v5p-128")
    topology = parse_topology(config.aot.compile_topology, config.aot.compile_topology_num_slices)
    if config.run.hardware not in ("", topology.platform):
        raise UserError(
            f"hardware={config.run.hardware}, but {topology.name} is a {topology.platform}. Leave hardware empty."
        )
    pgle.check_platform(config.aot, topology.platform)
    if config.aot.pgle:
        raise UserError(
            f"pgle={config.aot.pgle} measures a run, but src.train_compile only takes a finished profile: "
            "give pgle_profile"
        )
    report.device_capacity(topology)  # raises a clearer error than JAX for an invalid fraction in the environment
    report.host_capacity(topology)
    check_environment(uses_tpu=topology.platform == "tpu")
    return topology


def traced_for(config: Config, topology: Topology) -> TracedTrainStep:
    """Traces a config's step for a topology; raises UserError as `abstract_devices` and `trace_train_step` do."""
    devices = abstract_devices(topology)
    options = compiler_options(config.aot.compile_xla_flags, devices[0], topology.slices)
    return trace_train_step(config, devices, options)


def compile_lowered(
    lowered: jax.stages.Lowered, topology: Topology, profile: Mapping[str, bytes]
) -> tuple[jax.stages.Compiled | None, str]:
    """Returns (program, ""), or (None, message) if it exceeds a TPU's HBM; raises UserError for any other failure.

    One such failure is that arrays in host memory exceed it. `profile` is empty, or the result of `pgle.options`.
    """
    try:
        compiled = lowered.compile(dict(profile))
        if stats := compiled.memory_analysis():
            on_host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
            _check_host_memory(topology, on_host, report.host_capacity(topology))
        return compiled, ""
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n\nSuspected Python Code Location:")[0].rstrip()
    # A kernel may exhaust another memory, such as VMEM, which says nothing about the step's size.
    if "RESOURCE_EXHAUSTED" in message and "hbm" in message.lower():
        return None, message
    if found := re.search(r"memory space host\. Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) host", message):
        _check_host_memory(topology, *(float(found[n]) * report.UNITS[found[n + 1]] for n in (1, 3)))
    found = re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)", message)
    # One array exceeds a memory: the host's, if that is larger than the device's.
    if found and topology.chip and int(found[2]) > topology.chip.memory:
        _check_host_memory(topology, *map(float, found.groups()))
    kind = message.partition(":")[0]
    raise UserError(
        f"the compiler for {topology.name} failed with {kind}, which is not about the step's memory:\n{message}\n"
        "This is a limit of the compiler or of a kernel, usually for particular sizes. Try max_target_length "
        "as a multiple of 128, another attention (flash, dot_product), or other flags (compile_xla_flags,"
        " LIBTPU_INIT_ARGS)."
    )


def _check_host_memory(topology: Topology, needed: float, most: float) -> None:
    if needed > most:
        limit = f", or set {report.HOST_LIMIT} in the environment" * (topology.platform == "gpu")
        raise UserError(
            f"arrays in host memory need {report.readable(needed)} per device, and a device of {topology.name} "
            f"may have {report.readable(most)} there: keep fewer there (remat_policy, remat_custom, "
            f"optimizer_memory_host_offload), lower per_device_batch_size, use more devices{limit}"
        )


def _compiled_change(config: Config, keys: Mapping[str, Any]) -> report.Report | None:
    """Compiles the step of `config`, changed in `keys`; returns its memory, or None if tracing or compiling fails."""
    topology = parse_topology(config.aot.compile_topology, config.aot.compile_topology_num_slices)
    with contextlib.suppress(UserError):
        traced = traced_for(config, topology)
        return report.device_memory(topology, traced, *compile_lowered(traced.jax_traced.lower(), topology, {}))
    return None


def command(argv: Sequence[str]) -> int:
    """Runs `main`; returns the exit code, `DOES_NOT_FIT` or 0.

    Ctrl-C ends this process at once: Python would raise KeyboardInterrupt only when the compiler has returned.
    """
    with contextlib.ExitStack() as exits:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in a script's background
            exits.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_DFL))
        result = main(argv)
    return DOES_NOT_FIT if result and not result["memory"]["fits"] else 0
