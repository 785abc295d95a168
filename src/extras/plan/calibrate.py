"""Fits the constants that predict step times to measured step times, such as those in the metrics of finished runs.

`python -m src.plan calibrate RUN ... compile_topology=a3` reads each run's config.yml and metrics.jsonl.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from src.config.run_configs import run_folder
from src.config.yaml import read_file
from src.extras.aot.roofline import Constants, constants_of
from src.extras.aot.topology import Topology, parse_topology
from src.extras.command_files import write_output
from src.extras.command_words import separate
from src.extras.plan.estimate import Costs, step_costs
from src.parallel.chips import peak_flops
from src.run import resolve_config
from src.run.metrics import read_entry
from src.system.errors import UserError, counted, show

# Constants that a few runs of one chip can tell apart, and the standard deviation of their logarithms among chips.
FEW = {"matmul": 0.15, "memory": 0.3, "exposed": 0.4}
LARGEST = Constants(
    matmul=0.95, low_precision=1.0, experts=1.0, attention=1.0, memory=0.95, rounding=1.0, exposed=1.0, blocking=1.0,
    narrow=1000.0, waiting=0.1,
)  # fmt: skip
NOISE = 0.05  # assumed standard deviation of the logarithm of predicted over measured durations
FIRST = 2  # steps to leave out: they compile, and wait for the first data
TOPOLOGY, SLICES, OUTPUT = "compile_topology", "compile_topology_num_slices", "calibration"


class Row(NamedTuple):
    """A measured run: the costs of its step, and the median duration of a step."""

    name: str
    costs: Costs
    seconds: float


class Calibration(NamedTuple):
    """Fitted constants, and mean absolute relative errors of predicted step times."""

    constants: Constants
    before: float  # with the default constants
    after: float | None  # each run predicted by constants fitted to the others; None for a single run


def calibrate(argv: Sequence[str]) -> Calibration:
    """Fits the constants to runs, prints the errors before and after, and writes the constants to `calibration=FILE`.

    `argv` are the words after `calibrate`; without a FILE nothing is written. Raises UserError if an argument is wrong,
    no run or no topology is named, a run lacks config.yml or timed steps in metrics.jsonl or was on other devices than
    `compile_topology`, the runs are on several kinds of devices, or the file cannot be written.
    """
    own, folders = separate(argv, (TOPOLOGY, SLICES, OUTPUT))
    if unknown := [word for word in folders if "=" in word]:
        raise UserError(f"calibrate: {unknown[0]} is unknown: it takes RUN_DIR ..., {TOPOLOGY}, {SLICES}, {OUTPUT}")
    if not folders:
        raise UserError("calibrate: name the folders of finished runs, such as runs/a runs/b")
    rows = [read_run(folder, own) for folder in folders]
    if len(kinds := {row.costs.chip.kind for row in rows}) > 1:
        raise UserError(
            f"calibrate: the runs are of different devices ({', '.join(sorted(kinds))}): calibrate each by itself"
        )
    found = calibration(rows)
    for line in lines(rows, found):
        show(line)
    if own[OUTPUT]:
        entry = {"kind": rows[0].costs.chip.kind, **found.constants._asdict()}
        write_output(OUTPUT, own[OUTPUT], (json.dumps(entry, indent=2) + "\n").encode())
    return found


def read_calibration(path: str, device_kind: str) -> Constants:
    """Reads the constants in a file that `calibrate` wrote.

    Raises UserError if it can't be read, is another file, is for another kind of device, or has a value that is not a
    number above 0 and at most its limit in LARGEST.
    """
    entry = read_file(Path(path))
    names = {"kind", *Constants._fields}
    if set(entry) != names:
        raise UserError(
            f"calibration={path}: expected a file that `src.plan calibrate` wrote, with {', '.join(sorted(names))}"
        )
    if entry["kind"] != device_kind:
        raise UserError(f"calibration={path} is of a {entry['kind']}, but this topology has {device_kind}")
    found = dict[str, float]()
    for name, most in LARGEST._asdict().items():
        try:
            found[name] = float(entry[name])
        except (TypeError, ValueError):
            found[name] = math.nan
        if not 0 < found[name] <= most:
            raise UserError(f"calibration={path}: {name}: expected a number above 0 and at most {most}")
    return Constants(**found)


def calibration(rows: Sequence[Row]) -> Calibration:
    """Fits constants to runs on one kind of device, and computes the errors before and after.

    For the error after, each run is predicted by constants fitted to the other runs.
    """
    start = constants_of(rows[0].costs.chip.kind)
    after = [error(row, fitted([*rows[:number], *rows[number + 1 :]], start)) for number, row in enumerate(rows)]
    return Calibration(
        fitted(rows, start),
        statistics.fmean(abs(error(row, start)) for row in rows),
        statistics.fmean(map(abs, after)) if len(rows) > 1 else None,
    )


def lines(rows: Sequence[Row], found: Calibration) -> list[str]:
    """Formats measured and predicted step times, the fitted constants and the mean errors for the console."""
    start = constants_of(rows[0].costs.chip.kind)
    width = max(len(row.name) for row in rows)
    texts = [
        f"{row.name:<{width}}  {row.seconds:8.4g} s  predicted {row.costs.predict(start).step_seconds:8.4g} before, "
        f"{row.costs.predict(found.constants).step_seconds:.4g} after"
        for row in rows
    ]
    values = ", ".join(f"{name} {getattr(start, name):.3g} -> {getattr(found.constants, name):.3g}" for name in FEW)
    texts.append(f"fitted      {values}")
    after = "one run cannot tell" if found.after is None else f"{found.after:.1%} after, each run left out in turn"
    return [*texts, f"mean error  {found.before:.1%} before, {after} ({counted(len(rows), 'run')})"]


def error(row: Row, constants: Constants) -> float:
    """Relative error of a run's predicted step time; positive if it is too long."""
    return row.costs.predict(constants).step_seconds / row.seconds - 1


def fitted(rows: Sequence[Row], start: Constants) -> Constants:
    """Fits the constants in FEW to runs on one kind of device. Their priors are centered on `start`.

    The other constants stay as in `start`.
    """

    def constants(row: Row | None, logs: np.ndarray) -> Constants:
        scaled = zip(FEW, np.exp(logs), strict=True)
        return start._replace(**{name: float(getattr(start, name) * factor) for name, factor in scaled})

    upper = [np.log(getattr(LARGEST, name) / getattr(start, name)) for name in FEW]
    return constants(None, least_errors(rows, constants, list(FEW.values()), upper))


def least_errors(
    rows: Sequence[Row],
    constants: Callable[[Any, np.ndarray], Constants],
    spread: Sequence[float],
    upper: Sequence[float],
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """Fits parameters to the rows' step times: least squares of logarithms, with a soft L1 loss against outliers.

    `constants(row, parameters)` returns the constants that predict a row. The parameters have priors with mean 0 and
    standard deviations `spread`, and are at most `upper`. `weights` multiply the rows' errors; None: 1.
    """
    from scipy.optimize import least_squares

    def residuals(parameters: np.ndarray) -> np.ndarray:
        errors = [np.log(row.costs.predict(constants(row, parameters)).step_seconds / row.seconds) for row in rows]
        weighted = np.array(errors) * (1.0 if weights is None else np.array(weights)) / NOISE
        return np.concatenate([weighted, parameters / np.array(spread)])

    bounds = (-np.inf, np.maximum(upper, 1e-6))
    start = np.minimum(np.zeros(len(spread)), np.array(bounds[1]) - 1e-3)
    return least_squares(residuals, start, bounds=bounds, loss="soft_l1", x_scale="jac").x


def read_run(path: str, own: dict[str, str]) -> Row:
    """Reads a run's config and the median of its step times after the first FIRST; raises UserError like `calibrate`.

    `own` has the values of `compile_topology` and `compile_topology_num_slices`; "": the value in the run's config.
    Also raises as `resolve_config.load` does.
    """
    folder = run_folder(path)
    if folder is None:
        raise UserError(f"{path} is not the folder of a run: it has no config.yml, so its metrics tell nothing")
    config = resolve_config.load([path, *(f"{key}={own[key]}" for key in (TOPOLOGY, SLICES) if own[key])])
    if not config.aot.compile_topology:
        raise UserError(f"{path}: a run's files do not name its devices: add {TOPOLOGY}, such as {TOPOLOGY}=a3")
    topology = parse_topology(config.aot.compile_topology, config.aot.compile_topology_num_slices)
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"{path} has no metrics.jsonl: the run took no step")
    entries = [entry for line in file.read_bytes().splitlines() if (entry := read_entry(line))]
    steps = [entry for entry in entries if entry.get("step_time_seconds") and entry.get("tokens_per_second")][FIRST:]
    if not steps:
        raise UserError(f"{path}: metrics.jsonl has no step after the first {FIRST}, which are left out")
    costs = step_costs(config, topology)
    check_devices(path, steps[-1], costs, topology)
    return Row(path, costs, statistics.median(entry["step_time_seconds"] for entry in steps))


def check_devices(path: str, entry: Any, costs: Costs, topology: Topology) -> None:
    """Raises UserError if a line of metrics shows that the run had other devices than `topology`.

    That is so if the tokens of a step, or the peak rate that the line's mfu implies, differ from those in `costs`, of
    the same step on `topology`, by more than 2%.
    """
    tokens = round(entry["tokens_per_second"] * entry["step_time_seconds"])
    if abs(tokens / costs.tokens_per_step - 1) > 0.02:
        raise UserError(
            f"{path} trained {tokens:,} tokens per step, but on {topology.name} x {topology.slices} it would be "
            f"{costs.tokens_per_step:,}: the run was on another number of devices. Give its {TOPOLOGY} and {SLICES}"
        )
    if entry.get("mfu") and entry.get("tflops_per_device"):
        peak = entry["tflops_per_device"] * 1e12 / entry["mfu"]
        if abs(peak / costs.peak - 1) > 0.02:
            known = [each for each in ("bfloat16", "float32") if peak_flops(costs.chip.kind, each)]
            raise UserError(
                f"{path} ran on devices with a peak of {peak:.4g} operations per second, but a {costs.chip.kind} has "
                f"{costs.peak:.4g} ({', '.join(known)} known): give the run's {TOPOLOGY}"
            )
