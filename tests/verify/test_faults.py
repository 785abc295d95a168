"""`python -m src.verify` finds each fault of faults.yml, planted into a copy, and names where it is."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import quick_compilation

ROOT = Path(__file__).parents[2]
FAULTS = yaml.safe_load((ROOT / "tests" / "verify" / "faults" / "faults.yml").read_text())
QUICK = ("window_off_by_one",)


def verify(root, fault, report, is_quick):
    """The rows of the checks that `fault` names, run on the code in `root`, and the exit code.

    is_quick: compile without optimisations that users have.
    """
    mesh = (
        ""
        if fault["mesh"] == "none"
        else ",".join(axis if "=" in axis else f"{axis}=2" for axis in fault["mesh"].replace(" ", "").split(","))
    )
    words = [*shlex.split(fault["model"]), f"checks={''.join(fault['check'][:1])}", f"report={report}"]
    command = [sys.executable, "-m", "src.verify", "configs/base.yml", *words, *([f"mesh={mesh}"] if mesh else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= quick_compilation.ENVIRONMENT if is_quick else {}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    return json.loads(Path(report).read_text())["rows"], done.returncode


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_named(name, tmp_path):
    fault = FAULTS[name]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    patch = ROOT / "tests" / "verify" / "faults" / f"{name}.diff"
    subprocess.run(
        ["git", "apply", str(patch)], cwd=tmp_path, check=True, env=os.environ | {"GIT_DIR": str(tmp_path / "none")}
    )
    rows, code = verify(tmp_path, fault, tmp_path / "report.json", name in QUICK)
    failed = [row for row in rows if row["status"] == "FAIL"]
    if "missed" in fault:
        assert code == 0, "it is found now: remove `missed`"
        return
    assert code == 3, rows
    assert fault.get("unnamed") or fault["where"] in " ".join(f"{row['name']} {row['note']}" for row in failed), failed
    figures = [float(row["figure"]) / float(row["bound"]) for row in failed if row["bound"]]
    assert not figures or max(figures) >= 3
    rows, code = verify(ROOT, fault, tmp_path / "clean.json", name in QUICK)
    assert code == 0, rows
    assert fault.get("clean", "PASS") in {row["status"] for row in rows}, rows
    assert max((float(row["figure"]) / float(row["bound"]) for row in rows if row["bound"]), default=0) <= 1 / 3
