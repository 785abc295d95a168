"""scripts/on_gpu.sh where there is no GPU: the same path in tiny sizes, and what needs a GPU says so."""

import json
import subprocess

import pytest

from scripts import on_gpu
from tests import runs

GOOD = {
    "kernels": {"greatest_difference": 0.01},
    "bfloat16": {"mfu": 0.6},
    "fp8": {"times_bfloat16": 1.4},
    "saved_step": {"loss_differs_by": 0.0},
    "pgle": {"step_time_times_none": 0.99},
    "decoding": {"tokens_per_second": {"prompts_1": 1.0}},
}


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("kernels", {"greatest_difference": 0.03}),
        ("bfloat16", {"mfu": 0.5}),
        ("fp8", {"times_bfloat16": 1.2}),
        ("fp8", {"times_bfloat16": float("nan")}),
        ("saved_step", {"loss_differs_by": 0.02}),
        ("pgle", {"step_time_times_none": 1.1}),
        ("pgle", {"error": "the profile of the step is empty"}),
    ],
)
def test_each_figure_is_judged_and_a_missing_one_is_not_good(check, found):
    assert list(on_gpu.judged(GOOD).values()) == [True] * 5
    judged = on_gpu.judged(GOOD | {check: found})
    assert [name.partition(".")[0] for name, is_good in judged.items() if not is_good] == [check]
    assert set(on_gpu.judged({"fp8": GOOD["fp8"]})) == {"fp8.times_bfloat16 from 1.3 to 2.0"}


def machine_whose_runs_say(monkeypatch, tmp_path, lines):
    """A machine on which a run takes 2 s a step, 1 s by a profile's file, and prints `lines` for a key of pgle."""

    def run(self, module, *arguments):
        name, key = arguments[1].partition("=")[2], arguments[-1].partition("=")[0]
        (tmp_path / name / "pgle").mkdir(parents=True)
        (tmp_path / name / "pgle" / "0.profile").touch()
        metrics = {"step_time_seconds": 1.0 if key == "pgle_profile" else 2.0, "loss": 3.0}
        (tmp_path / name / "metrics.jsonl").write_text(20 * (json.dumps(metrics) + "\n"))
        return "step 1 of 20\n" + lines.get(arguments[-1].partition("/")[0], "")

    monkeypatch.setattr(on_gpu.Machine, "run", run)
    return on_gpu.Machine("cpu", tmp_path)


def test_what_a_run_says_of_its_profile_is_kept(monkeypatch, tmp_path):
    used = "compiled by the profile p: 40 of its 42 instructions are in the program"
    again = "pgle=auto: compiled again by times of 42 instructions"
    lines = {"pgle=auto": f"{again}\n", "pgle_profile=": f"{used}\n"}
    found = on_gpu.pgle(machine_whose_runs_say(monkeypatch, tmp_path, lines))
    assert (found["auto"]["said"], found["by_the_file"]["said"]) == ([again], [used])
    assert found["step_time_times_none"] == 0.5


def test_a_profile_that_no_run_says_it_used_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="no line says that a profile was used: auto, by_the_file of"):
        on_gpu.pgle(machine_whose_runs_say(monkeypatch, tmp_path, {}))


def checked(tmp_path, *only):
    """The JSON of some checks on this machine's CPU."""
    out = tmp_path / "out.json"
    command = ["bash", "scripts/on_gpu.sh", out, "--platform", "cpu", *(["--only", *only] if only else [])]
    subprocess.run(command, cwd=runs.ROOT, check=True, capture_output=True)
    return json.loads(out.read_text())["checks"]


@pytest.mark.long
def test_kernels_are_held_to_plain_ones(tmp_path):
    found = checked(tmp_path, "kernels")["kernels"]
    assert 0 < found["greatest_difference"] < 0.02
    attention = [f"attention_{name}{of}" for name in ("packed", "unpacked", "window") for of in ("", "_grouped")]
    assert found["greatest_difference"] == max(found[name] for name in (*attention, "grouped_products"))


@pytest.mark.long
def test_all_checks_run_or_say_that_they_need_a_gpu(tmp_path):
    found = checked(tmp_path)
    assert found["bfloat16"]["tokens_per_second"] > 0
    assert found["saved_step"]["loss_differs_by"] == 0
    assert min(found["decoding"]["tokens_per_second"].values()) > 0
    assert "pgle=auto is for NVIDIA GPUs, and this is cpu" in found["pgle"]["error"]
