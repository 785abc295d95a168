"""`python -m src.verify` raises no false alarm on a config that ships."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.extras.verify.command import DEFAULT

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/models/*.yml")) + sorted(ROOT.glob("configs/recipes/*.yml"))


@pytest.mark.long
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_has_no_false_alarm(path, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    words = [f"model_name={path.stem}"] if path.parent.name == "models" else []
    config = ROOT / "configs" / "base.yml" if words else path
    command = [sys.executable, "-m", "src.verify", str(config), *words, f"report={tmp_path / 'report.json'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["check"] for row in rows if row["status"] == "PASS"} == set(DEFAULT)
    assert max(row["figure"] / row["bound"] for row in rows if row["bound"]) <= 1 / 3
