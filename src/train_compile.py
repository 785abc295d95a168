"""Compiles the training step ahead of time, on any machine: `python -m src.train_compile configs/base.yml key=value`.

`compile_topology` names the devices. What is printed says whether the step fits them, what fills their memory and how
fast it should run (docs/aot.md). The exit code is 3 where it does not fit.
"""

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import src.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
from ml_collections import ConfigDict

from src.aot import program
from src.aot.advice import changes
from src.aot.devices import abstract_devices
from src.aot.outputs import check_outputs, write_output
from src.aot.report import (
    Report,
    change_lines,
    describe,
    device_capacity,
    device_memory,
    lines,
    make_report,
    readable,
    typed,
)
from src.cli import run_command
from src.config.key_help import Usage
from src.errors import UserError
from src.parallel.topology import Topology, parse_topology
from src.report.metrics import duration, print_header
from src.startup import configured
from src.step.build import TracedStep, build
from src.step.compiler_flags import check_environment, compiler_options

USAGE = Usage(
    """Compiles a run's step for devices that are not here: memory, speed, and what would help.

python -m src.train_compile CONFIG compile_topology=v5p-128 [key=value ...]
python -m src.train_compile --help KEY            what a key does, and its default""",
    ("Compilation ahead of time",),
)
DOES_NOT_FIT = 3  # exit code
# So many of the changes that should make a step fit are compiled, if the step itself took no more seconds than this.
MAX_TRIES, MAX_SECONDS_TO_TRY = 3, 300


def main(argv: Sequence[str] | ConfigDict) -> Report | None:
    """Runs the command line `argv` and returns its report; None if it only asked for help.

    Raises:
        UserError: a mistake in the command, or a compiler that fails; not a step that does not fit.
    """
    config = configured(argv, USAGE, joins=False)
    if config is None:
        return None
    if not config.compile_topology:
        raise UserError("compile_topology is empty: name the devices to compile for, such as compile_topology=v5p-128")
    topology = parse_topology(config.compile_topology, config.compile_topology_num_slices)
    if config.hardware not in ("", topology.platform):
        raise UserError(
            f"hardware={config.hardware}, but {topology.name} is a {topology.platform}. Leave hardware empty."
        )
    device_capacity(topology)  # JAX's own message about a wrong one in the environment says less
    check_environment(uses_tpu=topology.platform == "tpu")
    outputs = {key: config[key] for key in ("compiled_trainstep_file", "compile_report") if config[key]}
    check_outputs(outputs)
    # The compilation is to be measured, so an earlier one must not be found.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = abstract_devices(topology)

    started = time.monotonic()
    built = build(config, devices, compiler_options(config.compile_xla_flags, devices[0], topology.slices))
    traced = time.monotonic()
    print(f"compiling for {describe(topology.name, topology.slices)}, which may take minutes", flush=True)
    lowered = built.traced.lower()
    lowered_at = time.monotonic()
    compiled, refusal = _compile(lowered, topology)
    seconds = {
        "tracing": traced - started,
        "lowering": lowered_at - traced,
        "compiling": time.monotonic() - lowered_at,
    }

    report = make_report(topology, built, config.matmul_precision, compiled, refusal, seconds)
    report["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print_header(lines(report))
    fits = report["memory"]["fits"]
    if not fits:
        _advise(report, config, topology, devices, built)
        print_header([("would help ", "\n".join(change_lines(report)))])

    failures: list[UserError] = []
    if path := config.compile_report:
        try:
            write_output("compile_report", path, (json.dumps(report, indent=2) + "\n").encode())
        except UserError as error:
            failures.append(error)
    if path := config.compiled_trainstep_file:
        try:
            if fits:
                program.save(path, compiled, program.header(config, built))
            print(f"saved {path}" if fits else f"{path} is not written: the step does not fit", flush=True)
        except UserError as error:
            failures.append(error)
    if failures and fits:
        raise UserError("\n".join(map(str, failures)))
    for failure in failures:  # the answer, and the exit code, is that the step does not fit
        print(f"error: {failure}", file=sys.stderr, flush=True)
    return report


def _compile(lowered: jax.stages.Lowered, topology: Topology) -> tuple[jax.stages.Compiled | None, str]:
    """Returns (the program, "") or, where it does not fit a TPU's memory (HBM), (None, the compiler's message).

    Raises:
        UserError: the compiler fails for another reason.
    """
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n\nSuspected Python Code Location:")[0].rstrip()
    # A kernel may exhaust another memory, such as the vector units', which says nothing about the step's size.
    if "RESOURCE_EXHAUSTED" in message and "hbm" in message.lower():
        return None, message
    kind = message.partition(":")[0]
    raise UserError(
        f"the compiler for {topology.name} failed with {kind}, which says nothing of the step's memory:\n{message}\n"
        "Such a failure is a limit of the compiler or of a kernel, mostly for some sizes alone. Try max_target_length "
        "as a multiple of 128, another attention (flash, dot_product), or other compile_xla_flags."
    )


def _advise(
    report: Report, config: Mapping[str, Any], topology: Topology, devices: Sequence[jax.Device], built: TracedStep
) -> None:
    """Adds to the report what would make its step fit; compiles the first changes, since an estimate may be wrong."""
    needed, capacity = report["memory"]["needed"], report["memory"]["capacity"]
    seconds = sum(report["seconds"].values())
    tries = MAX_TRIES if seconds <= MAX_SECONDS_TO_TRY else 0
    report["not_tried"] = "" if tries else f"the step itself took {duration(seconds)} to compile"
    listed = []
    for change in changes(config, devices, built, needed, capacity):
        entry = {
            "keys": change.keys,
            "cost": change.cost,
            "estimated": change.estimated,
            "compiled": None,
            "fits": change.estimated <= capacity,
        }
        if not (entry["fits"] and tries):
            listed.append(entry)
            continue
        tries -= 1
        print(f"compiling with {typed(change.keys)}, by estimate {readable(change.estimated)}", flush=True)
        try:
            memory = device_memory(topology, change.built, *_compile(change.built.traced.lower(), topology))
        except UserError:  # it is no help either
            continue
        if memory["needed"] < needed:
            listed.append(entry | {"compiled": memory["needed"], "fits": memory["fits"]})
        if memory["fits"]:  # then no estimates are needed
            listed = [entry for entry in reversed(listed) if entry["compiled"] is not None]
            break
    report["changes"] = listed


def command(argv: Sequence[str]) -> int:
    """Runs `main` and returns its verdict as the exit code."""
    report = main(argv)
    return DOES_NOT_FIT if report and not report["memory"]["fits"] else 0


if __name__ == "__main__":
    run_command(command)
