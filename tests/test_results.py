"""What scripts/results.py makes of runs, and that docs/results says what it made."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from scripts import results

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"


def test_a_power_law_is_found_with_its_standard_error():
    sizes = np.array([1e5, 3e5, 1e6, 3e6, 1e7])
    law = results.power_law(sizes, 7 * sizes**-0.076)
    assert law == pytest.approx({"factor": 7, "exponent": 0.076, "standard_error": 0}, abs=1e-9)
    noise = np.random.default_rng(0).normal(size=5) * 0.01
    law = results.power_law(sizes, 7 * sizes**-0.076 * np.exp(noise))
    (slope, _), covariance = np.polyfit(np.log(sizes), np.log(7 * sizes**-0.076) + noise, 1, cov=True)
    assert law["exponent"] == pytest.approx(-slope)
    assert law["standard_error"] == pytest.approx(math.sqrt(covariance[0, 0]))


def test_the_steps_to_a_loss_lie_between_the_runs_about_it():
    assert results.crossing([100, 200, 300], [2.0, 1.6, 1.5], 1.7) == pytest.approx(175)
    assert results.crossing([100, 200, 300], [2.0, 1.6, 1.5], 2.1) == 100
    assert math.isnan(results.crossing([100, 200, 300], [2.0, 1.6, 1.5], 1.4))


def test_a_thinned_curve_keeps_the_mean_of_every_step():
    curve = [(step, 1 / step) for step in range(1, 601)]
    thinned = results.thinned(curve)
    assert len(thinned) == results.POINTS
    assert thinned[0] == (4, round((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, 4))
    assert thinned[-1][0] == 600


def test_held_out_paragraphs_are_no_training_paragraphs(tmp_path):
    lines = [f"paragraph {i}\n" for i in range(20_000)]
    (tmp_path / "botocore.txt").write_text("".join(lines))
    out = results.split(tmp_path, tmp_path / "out")
    train, held = ((out / part / "text.txt").read_text().splitlines(keepends=True) for part in ("train", "held_out"))
    assert sorted(train + held) == sorted(lines)
    assert len(held) == 4 * 64  # blocks 0, 100, 200 and 300


@pytest.mark.parametrize("argv", [["quickstart", "text"], ["optimizers"], ["nothing", "text"]])
def test_what_does_not_go_together_is_answered(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        results.main(argv)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_page_says_what_was_recorded():
    """Every line of every table of docs/results/*.json stands in the page, and each picture beside its file."""
    page = " ".join((FOLDER / "README.md").read_text().split())
    recorded = sorted(FOLDER.glob("*.json"))
    assert {path.stem for path in recorded} <= set(results.EXPERIMENTS)
    for path in recorded:
        found = json.loads(path.read_text())
        missing = [line for line in found["table"] if " ".join(line.split()) not in page]
        assert not missing, path.name
        assert f"scripts/results.py {path.stem}" in page
        for version in found.get("versions", [run["version"] for run in found.get("runs", [])]):
            assert version in page
    for picture in FOLDER.glob("*.svg"):
        assert f"({picture.name})" in page
