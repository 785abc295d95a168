"""Searches for the fastest configuration that fits: reads the command line, searches, prints and writes the results."""

import contextlib
import math
import signal
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

import src.extras.aot.compilers  # noqa: F401  isort: skip  before JAX
import jax

from src.config.schema import KEYS, Config
from src.config.usage import Usage, help_for
from src.extras.aot.report import describe
from src.extras.aot.topology import Topology
from src.extras.aot.train_compile import checked_topology
from src.extras.command_files import check_outputs, write_output
from src.extras.command_words import separate
from src.extras.plan import output
from src.extras.plan.calibrate import calibrate, read_calibration
from src.extras.plan.compiling import COMMAND, Folder, rated
from src.extras.plan.costing import cost
from src.extras.plan.points import Space
from src.extras.plan.search import Search
from src.parallel.chips import peak_flops, run_peak
from src.run import resolve_config
from src.run.run_setup import configure_jax
from src.system.errors import UserError, counted, say, show
from src.system.version import title

USAGE = Usage(
    """Searches the mesh, remat policy and batch that train a config fastest on hardware that need not be present.

python -m src.plan CONFIG compile_topology=v5p-128 [key=value ...]     keys that are typed keep their values
    [global_batch_tokens=N|any]     tokens of a step; without it as configured
    [train_tokens=N] [price_per_device_hour=X]     days, device-hours and price of a run of N tokens
    [allow_quantization=fp8,...]    also try 8-bit matmuls
    [calibration=FILE]              predict as your own runs measured
    [top=N]                         points to compile, 12 without it
    [report=FILE.json] [page=FILE.html]

python -m src.plan calibrate RUN_DIR ... [calibration=FILE]     fits the predictions to finished runs"""
)
REPORT, PAGE = "report of src.plan", "page of src.plan"  # kinds of files, in command_files.py and in messages
OWN = ("global_batch_tokens", "train_tokens", "price_per_device_hour", "allow_quantization", "calibration", "top")
OWN += ("report", "page")
TOP, NOTHING_FITS = 12, 3  # points to compile; exit code


class Plan(NamedTuple):
    """The compiled points that fit, fastest first."""

    rows: list[output.Row]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 3 if nothing fits, otherwise 0."""
        return 0 if self.rows else NOTHING_FITS


def main(argv: Sequence[str]) -> object:
    """Runs the command line `argv`: prints the points that fit, or the nearest one and changes, and writes the files.

    Returns a Plan, a Calibration for `calibrate`, or None for --help. Raises UserError if an argument is wrong, no mesh
    suits the devices, the model, the batch and the typed keys, or a file cannot be read or written. An interrupted
    search prints its results so far before it raises KeyboardInterrupt.
    """
    if argv[:1] == ["calibrate"]:
        return calibrate(argv[1:])
    if (text := help_for(argv, USAGE)) is not None:
        show(text)
        return None
    show(title())
    space, request, own = read(argv)
    if own["top"] and not (own["top"].isdecimal() and 1 <= int(own["top"]) <= 1000):
        raise UserError(f"top={own['top']}: expected a number of points to compile, 1 to 1000")
    check_outputs({kind: own[name] for kind, name in ((REPORT, "report"), (PAGE, "page")) if own[name]})
    return _search(space, request, own)


def read(argv: Sequence[str]) -> tuple[Space, output.Request, dict[str, str]]:
    """Reads a command line: returns the space to search, the request, and the values of the command's own words.

    Prints the config's notes, and sets JAX to run on this machine's CPU. Raises UserError for a wrong argument, except
    for `top`, `report` and `page`, which `main` checks; also as `resolve_config.load` does.
    """
    own, words = separate(argv, OWN)
    notes: list[str] = []
    config = resolve_config.load(words, notes, command=COMMAND)
    say(notes)
    configure_jax(config.step)
    jax.config.update("jax_platforms", "cpu")
    topology = rated(checked_topology(config))
    if not (topology.chip and run_peak(topology.chip.kind, config.step.dtype, config.step.matmul_precision)):
        raise UserError(
            f"no peak rate of {topology.name} is published for dtype={config.step.dtype}: nothing to rank by"
        )
    if config.aot.pgle_profile or config.aot.compiled_trainstep_file or config.aot.compile_report:
        raise UserError("pgle_profile, compiled_trainstep_file and compile_report are for one program: leave them out")
    tokens, price = (_number(own, name) for name in ("train_tokens", "price_per_device_hour"))
    constants = read_calibration(own["calibration"], topology.chip.kind) if own["calibration"] else None
    rows, quantizations = _rows(own, config, topology), _quantizations(own, topology)
    space = Space(config, topology, [*map(output.key_of, words)], rows, quantizations, constants)
    return space, output.Request(config, words, topology, tokens, price, own["calibration"], space.has_experts), own


def _search(space: Space, request: output.Request, own: dict[str, str]) -> Plan:
    topology, begun = request.topology, time.monotonic()
    assert topology.chip
    show(f"topology    {describe(topology.name, topology.slices)}: {topology.num_devices} x {topology.chip.kind}")
    if topology.platform == "cpu":
        show("            (CPUs have no published rates: with these, the command can be tried anywhere)")
    costing = cost(space, show)
    seconds = {"costing": time.monotonic() - begun}
    show(f"costed      {costing.costed:,} of {costing.points:,} points, in {seconds['costing']:.0f} s")
    for line in output.omitted_lines(costing):
        show(f"left out    {line}")
    search = Search(costing, space, Folder.of(request.config, topology), request.command_words, int(own["top"] or TOP))
    nearest = interrupt = None
    try:
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            search.run(show)
            seconds["compiling"] = time.monotonic() - begun - seconds["costing"]
            if not any(each.fits for each in search.results):
                show("compiling changes to the nearest point, for ten minutes or so at most")
                nearest = search.advice()
    except KeyboardInterrupt as error:
        interrupt = error
    ranked = output.rows(search.results, request)
    if interrupt and ranked:
        show(f"of the {counted(len(search.results), 'point')} compiled so far:")
    found = output.ranked_lines(ranked, request.basis) if ranked else nearest and output.nearest_lines(nearest, request)
    for line in found or ():
        show(line)
    if interrupt:
        show(search.progress_kept)
        raise interrupt
    if own["report"]:
        written = output.report_json(request, costing, search.results, seconds, nearest)
        write_output(REPORT, own["report"], written.encode())
    if own["page"]:
        write_output(PAGE, own["page"], output.page(request, costing, search.results).encode())
    return Plan(ranked)


@contextlib.contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Generator[None]:
    """Lets signals that would end this process raise KeyboardInterrupt, so that it ends its compilations first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # Ignored signals remain ignored, such as SIGHUP under nohup.
    found = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in found:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in found:
            signal.signal(number, signal.SIG_DFL)


def _number(own: dict[str, str], name: str) -> float:
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(own[name] or 0)
    if not (0 < value < math.inf or own[name] == ""):
        raise UserError(f"{name}={own[name]}: expected a positive number, such as 1e12")
    return value


def _rows(own: dict[str, str], config: Config, topology: Topology) -> int | None:
    """Number of sequences in the global batch, None if any will do; raises UserError if it is not a whole number."""
    length = config.batch.max_target_length
    if own["global_batch_tokens"] == "any":
        return None
    if own["global_batch_tokens"]:
        tokens = _number(own, "global_batch_tokens")
        if tokens % length:
            raise UserError(
                f"global_batch_tokens={own['global_batch_tokens']} is not a multiple of max_target_length={length}"
            )
        return round(tokens) // length
    rows = config.batch.per_device_batch_size * topology.num_devices * config.step.gradient_accumulation_steps
    if abs(rows - round(rows)) > 1e-6 or round(rows) == 0:
        raise UserError(
            f"the configured batch is {rows:g} sequences on {topology.num_devices} devices, which is not whole: "
            "give global_batch_tokens, or another per_device_batch_size"
        )
    return round(rows)


def _quantizations(own: dict[str, str], topology: Topology) -> list[str]:
    kinds = [kind for kind in own["allow_quantization"].split(",") if kind]
    known = [str(kind) for kind in KEYS["quantization"].allowed if kind]
    device = topology.chip.kind if topology.chip else ""
    for kind in kinds:
        if kind not in known:
            raise UserError(f"allow_quantization={own['allow_quantization']}: expected some of {', '.join(known)}")
        if not peak_flops(device, kind):
            raise UserError(f"allow_quantization={kind}: no rate of a {device} is published for it")
    return kinds
