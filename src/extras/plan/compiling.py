"""Compiles points, each in a process of its own, and keeps a record of each in a folder for later searches."""

import atexit
import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax

from src import FOLDER
from src.config.schema import Config
from src.extras.aot import eight_bits, report
from src.extras.aot.devices import CUDA
from src.extras.aot.program import JAX_SETTINGS, RUN_TIME_KEYS
from src.extras.aot.topology import Topology
from src.extras.aot.train_compile import checked_topology, compile_lowered, traced_for
from src.extras.code_digest import code_digest
from src.parallel.chips import GPU_HOSTS, GPU_PROPERTIES
from src.run import resolve_config
from src.run.run_setup import configure_jax
from src.step.compiler_flags import environment_flags
from src.system.disk import new_file
from src.system.errors import UserError
from src.system.exit_codes import run_command

PROCESS_BYTES = 3 * 2**30  # host memory to allow for a compilation
COMMAND = "src.train_compile"  # the command that has these keys and compiles these programs
PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", f"jax-cuda{CUDA}-plugin", f"jax-cuda{CUDA}-pjrt")
SOURCES = ("config", "data", "model", "parallel", "step", "extras/aot")  # folders of src that determine a record
USER_FUNCTIONS = ("loss", "batch_transform", "eval_metrics")
# Variables of the environment that decide what fits.
MEMORY_LIMITS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", report.HOST_LIMIT)

# `failed` (an error message or ""), `words`, `cpu_seconds`, `host_peak_bytes`, and the report unless it failed.
Record = dict[str, Any]


class Running(NamedTuple):
    """A compilation that has been started."""

    process: subprocess.Popen[bytes]
    file: Path  # of its record
    begun: float

    def result(self) -> Record | None:
        """Returns its record, None while it runs; for a process that died, one that is `failed` and not kept."""
        if self.process.poll() is None:
            return None
        if (record := kept(self.file)) is not None:
            return record
        log = self.file.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        code = self.process.returncode
        why = f"it was ended by signal {-code}" if code < 0 else (log or [f"it ended with exit code {code}"])[-1]
        return {"failed": f"its process did not finish: {why}"}

    def end(self) -> None:
        """Ends the process if it still runs."""
        self.process.kill()
        self.process.wait()


class Folder(NamedTuple):
    """The folder of records, and a digest of what they depend on besides a config's keys."""

    path: Path
    surroundings: str
    temporary: bool  # no later search finds it, and it is removed when this process ends

    @classmethod
    def of(cls, config: Config, topology: Topology) -> "Folder":
        """Makes the folder `plan` in `jax_cache_dir`; raises UserError if it cannot be made.

        It is a temporary folder if `jax_cache_dir` is empty, or if the config names functions of the user's own, whose
        code may change.
        """
        kept = "" if any(config[key] for key in USER_FUNCTIONS) else config.step.jax_cache_dir
        path = Path(os.path.expanduser(kept)) / "plan" if kept else Path(tempfile.mkdtemp(prefix="mintext-plan-"))
        if not kept:
            atexit.register(shutil.rmtree, path, ignore_errors=True)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"jax_cache_dir={kept}: cannot keep compiled points there: {error}") from None
        limits = {name: os.environ.get(name) for name in MEMORY_LIMITS}
        settings = {name: str(jax.config.values[name]) for name in JAX_SETTINGS if name in jax.config.values}
        flags = environment_flags(), config.aot.compile_xla_flags
        chip = topology, GPU_PROPERTIES.get(topology.chip.kind if topology.chip else "")
        surroundings = code_digest(chip, limits, settings, flags, folders=SOURCES, packages=PACKAGES)
        return cls(path, surroundings, temporary=not kept)

    def file(self, config: Config) -> Path:
        """Names the record of a config: by a digest of its program's keys and devices, versions, flags and sources."""
        sections = (config.model, config.step, config.batch, config.mesh)
        keys = {key: value for section in sections for key, value in vars(section).items()}
        keys["compile_topology_num_slices"] = config.aot.compile_topology_num_slices  # advice may add slices
        keys = {key: value for key, value in keys.items() if key not in RUN_TIME_KEYS}
        digest = hashlib.sha256(f"{self.surroundings}{sorted(keys.items())}".encode()).hexdigest()
        return self.path / f"{digest}.json"

    def start(self, config: Config, words: Sequence[str]) -> Running:
        """Starts a process that compiles `config`, to which `words` resolve, and writes its record and a log."""
        file = self.file(config)
        arguments = [sys.executable, "-m", __spec__.name, str(file), *words]
        path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
        with file.with_suffix(".log").open("wb") as log:
            # In a session of its own: Ctrl-C reaches only the search, which then ends its compilations.
            process = subprocess.Popen(
                arguments, stdin=_open_while_this_process_runs(), stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        return Running(process, file, time.monotonic())


@functools.cache
def _open_while_this_process_runs() -> int:
    """Returns the read end of a pipe that stays empty; reading from it ends when this process does, even if killed."""
    reading, _ = os.pipe()
    return reading


def _end_with_the_search() -> None:
    """Ends this process once its standard input is closed: the search has ended, perhaps killed."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def rated(topology: Topology) -> Topology:
    """Gives a topology of CPUs the published figures of H100s, so that the command can be tried anywhere."""
    return topology if topology.chip else topology._replace(chip=GPU_HOSTS["a3"])


def processes() -> int:
    """Number of compilations to run at a time: one per core that this process may use, as far as memory suffices."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory // PROCESS_BYTES))


def kept(file: Path) -> Record | None:
    """Reads a record; None if the file is missing or is not a record."""
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "failed" in record else None


def main(argv: Sequence[str]) -> None:
    """Compiles the config of `argv[1:]` as train_compile does, and writes its record to the file `argv[0]`.

    A UserError in compiling becomes a `failed` record; for one in reading the config, nothing is written.
    """
    _end_with_the_search()
    file, *words = argv
    config = resolve_config.load(words, [], command=COMMAND)
    configure_jax(config.step)
    try:
        record: Record = {**compiled_report(config), "failed": ""}
    except UserError as error:
        record = {"failed": str(error)}
    used = resource.getrusage(resource.RUSAGE_SELF)
    record |= {"cpu_seconds": used.ru_utime + used.ru_stime, "host_peak_bytes": used.ru_maxrss * 1024, "words": words}
    with new_file(Path(file)) as opened:
        opened.write(json.dumps(record).encode())


def compiled_report(config: Config) -> report.Report:
    """Compiles a config's step for its topology; returns the report of train_compile, without `changes`.

    Its `seconds` have one entry, for tracing, lowering and compiling. Turns off JAX's compilation cache. Raises
    UserError if the step cannot be traced, or as `compile_lowered`, `eight_bits.check` and `make_report` do.
    """
    topology = rated(checked_topology(config))
    jax.config.update("jax_enable_compilation_cache", False)
    begun, traced = time.monotonic(), traced_for(config, topology)
    compiled, refusal = compile_lowered(traced.jax_traced.lower(), topology, {})
    if compiled:
        eight_bits.check(compiled, traced.plan)
    return report.make_report(topology, traced, compiled, refusal, {"compiling": time.monotonic() - begun})


if __name__ == "__main__":
    run_command(main)
