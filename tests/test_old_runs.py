"""Runs that commit f47738a began continue as with that commit: the same batches to the byte, the same losses.

tests/old_runs/make.py made them, and recorded what the commit made of each after it was stopped.
"""

import json
import shutil
import zipfile

import pytest

from tests.old_runs import make
from tests.runs import BASE, main

pytestmark = pytest.mark.usefixtures("steps_built_once")

EXPECTED = json.loads((make.FOLDER / "expected.json").read_text())
NEEDS = {"parquet": "pyarrow", "parquet_book": "pyarrow", "mixture": "pyarrow"}


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """Puts a case's run and its data into a folder, which becomes the current one; returns the run's folder."""

    def place(case):
        if case in NEEDS:
            pytest.importorskip(NEEDS[case], reason="bash setup.sh data installs it")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(make.FOLDER)
        shutil.copytree(make.FOLDER / "data", tmp_path / "data", symlinks=True)
        with zipfile.ZipFile(make.FOLDER / f"{case}.zip") as archive:
            archive.extractall(tmp_path / "runs" / case)
        return tmp_path / "runs" / case

    return place


def resumed(folder, **keys):
    """What the rest of a run did."""
    with make.recording() as recorded:
        result = main([BASE, *make.arguments(folder.name, checkpoint_period=100, **keys)])
    return make.outcome(result.state, folder, *recorded)


@pytest.mark.parametrize("case", make.CASES)
def test_an_old_run_continues_as_it_began(old_run, case):
    outcome, expected = resumed(old_run(case)), EXPECTED[case]
    assert outcome["batches"] == expected["batches"]
    assert outcome["eval_batches"] == expected["eval_batches"]
    assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert [each[:2] for each in outcome["evaluations"]] == [each[:2] for each in expected["evaluations"]]
    losses = [each[2] for each in expected["evaluations"]]
    assert [each[2] for each in outcome["evaluations"]] == pytest.approx(losses, rel=1e-5)
    assert outcome["weights"] == pytest.approx(expected["weights"], rel=1e-5)
