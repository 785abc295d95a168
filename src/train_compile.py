"""Compiles the training step ahead of time, on any machine: `python -m src.train_compile configs/base.yml key=value`.

`compile_topology` names the devices. What is printed says whether the step fits them, what fills their memory and how
fast it should run (docs/aot.md). The exit code is 3 where it does not fit.
"""

import json
import resource
import sys
import time
from collections.abc import Sequence

import src.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax
from etils import epath

from src.aot import program
from src.aot.advice import changes
from src.aot.devices import abstract_devices
from src.aot.report import Report, lines, make_report
from src.build import build
from src.compiler_flags import check_environment, compiler_options
from src.errors import UserError, run_command
from src.metrics import print_header
from src.startup import configured
from src.topology import parse_topology

USAGE = """python -m src.train_compile CONFIG.yml compile_topology=v5p-128 [key=value ...]
python -m src.train_compile --help KEY            what a key does, and its default"""
DOES_NOT_FIT = 3  # exit code


def main(argv: Sequence[str]) -> Report | None:
    """Runs the command line `argv`; None if it only asked for help.

    Raises:
        UserError: a mistake in the command. A step that does not fit is none: the report says so.
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
    check_environment(uses_tpu=topology.platform == "tpu")
    # What is measured is a compilation, not the finding of an earlier one.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = abstract_devices(topology)

    started = time.monotonic()
    built = build(config, devices, compiler_options(config.compile_xla_flags, devices[0], topology.slices))
    traced = time.monotonic()
    lowered = built.traced.lower()
    lowered_at = time.monotonic()
    compiled, refusal = _compile(lowered)
    seconds = {
        "tracing": traced - started,
        "lowering": lowered_at - traced,
        "compiling": time.monotonic() - lowered_at,
    }

    report = make_report(topology, built, config.matmul_precision, compiled, refusal, seconds)
    report["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = report["memory"]
    if not memory["fits"]:
        report["changes"] = [change._asdict() for change in changes(config, devices, built, memory["needed"])]
    print_header(lines(report))
    if config.compiled_trainstep_file:
        if memory["fits"]:
            program.save(config.compiled_trainstep_file, compiled, program.header(config, built))
            print(f"saved {config.compiled_trainstep_file}", flush=True)
        else:
            print(f"{config.compiled_trainstep_file} is not written: the step does not fit", flush=True)
    # Last: the program, which took long to make, is not lost where this can't be written.
    if config.compile_report:
        _write(config.compile_report, json.dumps(report, indent=2) + "\n")
    return report


def _compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, str]:
    """(the program, "") or, where the compiler finds that it does not fit a TPU's memory (HBM), (None, its message)."""
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        # A kernel may exhaust another memory, such as the vector units': that says nothing of the step's size.
        if "RESOURCE_EXHAUSTED" not in str(error) or "hbm" not in str(error).lower():
            raise
        return None, str(error)


def _write(path: str, text: str) -> None:
    file = epath.Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise UserError(f"compile_report={path}: cannot write it: {error}") from None


def command(argv: Sequence[str]) -> None:
    """As `main`, with the verdict as the exit code."""
    report = main(argv)
    if report and not report["memory"]["fits"]:
        sys.exit(DOES_NOT_FIT)


if __name__ == "__main__":
    run_command(command)
