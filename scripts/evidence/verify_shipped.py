"""Runs `src.verify` on every config that ships, and prints a table: python scripts/evidence/verify_shipped.py FOLDER.

Configs whose small versions and meshes are equal are run once. FOLDER takes a report per config; an interrupted run
continues, because configs with a report are not run again. `--checks abde` chooses the checks; names of configs choose
the configs.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from src.config.yaml import dump
from src.extras.verify.command import USAGE, prepared
from src.run.run_setup import configured

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("run_name", "model_name", "base_output_directory")  # keys without an effect on what is checked


def words(path: Path) -> list[str]:
    """The arguments for a config file, or for a model's."""
    return ["configs/base.yml", f"model_name={path.stem}"] if path.parent.name == "models" else [str(path)]


def alike(paths: list[Path], checks: str) -> list[list[Path]]:
    """Groups configs that verify sees as the same."""
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


def line(paths: list[Path], report: dict, seconds: str) -> str:
    """A row of the table: counts of outcomes, the share that applied, and the largest clean figure."""
    rows = report["rows"]
    passed, failed = (sum(row["status"] == status for row in rows) for status in ("PASS", "FAIL"))
    shares = [row["figure"] / row["bound"] for row in rows if row["bound"] and row["status"] == "PASS"]
    names = ", ".join(path.stem for path in paths)
    return f"| {names} | {passed} | {failed} | {passed / len(rows):.0%} | {max(shares, default=0):.2f} | {seconds} |"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checks", default="abde")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    os.chdir(ROOT)
    given.folder.mkdir(parents=True, exist_ok=True)
    every = [path for kind in ("models", "recipes") for path in sorted(Path("configs", kind).glob("*.yml"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    print("| config | pass | fail | share that applied | largest figure of its bound | seconds |", flush=True)
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for paths in alike([path for path in every if path.stem in given.names or not given.names], given.checks):
        report, start, seconds = given.folder / f"{paths[0].stem}.json", time.monotonic(), "-"
        if not report.exists():
            command = [sys.executable, "-m", "src.verify", *words(paths[0]), f"checks={given.checks}"]
            done = subprocess.run(
                [*command, f"report={report}"], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode not in (0, 3):
                sys.exit(f"{paths[0]}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
            seconds = f"{time.monotonic() - start:.0f}"
        print(line(paths, json.loads(report.read_text()), seconds), flush=True)


if __name__ == "__main__":
    main()
