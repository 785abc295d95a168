"""Runs `src.verify` on every config that ships, and prints a table: python scripts/evidence/verify_shipped.py FOLDER.

Configs whose small versions and meshes are equal are run once. FOLDER takes a report and the costs of each; an
interrupted run continues, because configs whose costs are there are not run again. `--checks abde` chooses the checks;
names of configs choose the configs and their order, also `quickstart`. `--seeds 3` verifies each with three seeds of
weights and batches, and prints each check's largest figure; the second and third use the first's compiled programs, so
they cost less.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from src.config.yaml import dump
from src.extras.verify.command import USAGE, prepared
from src.run.run_setup import configured

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("run_name", "model_name", "base_output_directory")  # keys that most checks do not read


def words(path: Path) -> list[str]:
    """The arguments of src.verify for a config file; a file of configs/models is given as a model_name."""
    return ["configs/base.yml", f"model_name={path.stem}"] if path.parent.name == "models" else [str(path)]


def alike(paths: list[Path], checks: str) -> list[list[Path]]:
    """Groups configs that are equal for these checks: their small versions, their meshes, and dtypes."""
    groups: dict[str, list[Path]] = {}
    for path in paths:
        with contextlib.redirect_stdout(io.StringIO()):  # not into the table
            config = configured(words(path), USAGE, joins=False)
        assert config
        small, *meshes = prepared(config, "", checks)
        keys = {key: value for key, value in small.config.items() if key not in NAMES}
        # What else some checks need of the whole config.
        further = (config.step.dtype, config.step.weight_dtype, config.mesh)
        groups.setdefault(f"{dump(keys)} {meshes} {further}", []).append(path)
    return list(groups.values())


class Costs(NamedTuple):
    """The time and memory that a command took."""

    seconds: float
    cpu_seconds: float
    peak_gib: float  # of resident memory


def run(command: list[str], log: Path, keeps_all: bool) -> tuple[int, Costs]:
    """Runs a command that prints to a file; returns its exit code and costs.

    keeps_all: the command's compilation cache keeps quickly compiled programs too.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if keeps_all else {}
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    used = usage.ru_utime + usage.ru_stime
    return process.returncode, Costs(time.monotonic() - begun, used, usage.ru_maxrss / 2**20)


def shares(report: dict) -> dict[tuple[str, str], float]:
    """The figures of rows that passed, relative to their bounds, by the check's letter and the row's name."""
    rows = [row for row in report["rows"] if row["bound"] and row["status"] == "PASS"]
    return {(row["check"], row["name"]): row["figure"] / row["bound"] for row in rows}


def line(names: str, report: dict, costs: Costs) -> str:
    """A row of the table: counts of outcomes, the share that applied, the largest clean figure and its row, costs."""
    rows, figures = report["rows"], shares(report)
    passed, failed = (sum(row["status"] == status for row in rows) for status in ("PASS", "FAIL"))
    most = max(figures, key=figures.__getitem__, default=("", "none"))
    cells = names, passed, failed, len(rows), f"{passed / len(rows):.0%}", f"{figures.get(most, 0):.2f}", most[1]
    return f"| {' | '.join(map(str, cells))} | {costs.seconds:.0f} | {costs.cpu_seconds:.0f} | {costs.peak_gib:.1f} |"


def largest(reports: dict[str, dict]) -> Iterator[str]:
    """A table of each check's largest clean figure in `reports`, which have the config's name and seed as keys."""
    found = [(share, *row, name) for name, report in reports.items() for row, share in shares(report).items()]
    yield "\n| check | rows with a bound | largest figure of its bound | its row | config |\n|---|---|---|---|---|"
    for check in sorted({letter for _, letter, *_ in found}):
        rows = [each for each in found if each[1] == check]
        share, _, row, name = max(rows)
        yield f"| {check} | {len(rows)} | {share:.3f} | {row} | {name} |"


def main() -> int:
    """Runs the command; returns 1 if a config could not be verified."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checks", default="abde")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("names", nargs="*")
    given, exit_code, reports = parser.parse_intermixed_args(), 0, {}
    jax.config.update("jax_platforms", "cpu")
    os.chdir(ROOT)
    given.folder.mkdir(parents=True, exist_ok=True)
    every = {path.stem: path for kind in ("models", "recipes") for path in sorted(Path("configs", kind).glob("*.yml"))}
    also = {"quickstart": Path("configs", "quickstart.yml")}
    heads = "config", "pass", "fail", "rows", "share that applies", "largest figure of its bound", "its row"
    heads += "seconds", "CPU seconds", "peak GiB"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for paths in alike([(every | also)[name] for name in given.names or every], given.checks):
        for seed in range(given.seeds):
            name = f"{paths[0].stem}{f' seed {seed}' * (given.seeds > 1)}"
            report, costs = (given.folder / f"{name.replace(' ', '_')}.{kind}" for kind in ("json", "costs"))
            if not costs.exists():
                command = [sys.executable, "-m", "src.verify", *words(paths[0]), f"checks={given.checks}"]
                command += [f"init_weights_seed={seed}", f"report={report}"]
                command += [f"jax_cache_dir={given.folder.resolve() / paths[0].stem}.programs"]
                code, took = run(command, log := report.with_suffix(".log"), keeps_all=given.seeds > 1)
                if code not in (0, 3):
                    print(f"{paths[0]}: exit code {code}, see {log}", flush=True)
                    exit_code = 1
                    continue
                costs.write_text(json.dumps(took._asdict()))
            reports[name] = json.loads(report.read_text())
            names = name if given.seeds > 1 else ", ".join(path.stem for path in paths)
            print(line(names, reports[name], Costs(**json.loads(costs.read_text()))), flush=True)
    if given.seeds > 1:
        print(*largest(reports), sep="\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
