"""scripts/on_gpu.sh where there is no GPU: the same path in tiny sizes, and what needs a GPU says so."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import on_gpu
from tests import runs
from tests.test_setup import pins

GOOD = {
    "bfloat16": {"mfu": 0.6},
    "kernels": {"greatest_difference": 0.01},
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
    assert on_gpu.judged({"fp8": {"skipped": "takes about 90 s, but only 4 s remain"}}) == {}


def machine_whose_runs_say(monkeypatch, tmp_path, lines):
    """A machine on which a run takes 2 s a step, 1 s with a profile's file, and prints `lines` for a key of pgle."""

    def inside(self, function, *arguments):
        assert function == "train"
        name, key = arguments[1].partition("=")[2], arguments[-1].partition("=")[0]
        (tmp_path / name / "pgle").mkdir(parents=True)
        (tmp_path / name / "pgle" / "0.profile").touch()
        metrics = {"step_time_seconds": 1.0 if key == "pgle_profile" else 2.0, "loss": 3.0}
        (tmp_path / name / "metrics.jsonl").write_text(20 * (json.dumps(metrics) + "\n"))
        printed = ["attention   cudnn_flash", "step 1 of 20", *lines.get(arguments[-1].partition("/")[0], [])]
        return printed, {"peak_bytes": 30 * 2**30}

    monkeypatch.setattr(on_gpu.Machine, "inside", inside)
    return on_gpu.Machine("cpu", tmp_path)


def test_what_a_run_says_of_its_profile_is_kept(monkeypatch, tmp_path):
    used = "compiled with the profile p: 40 of its 42 instructions are in the program"
    again = "pgle=auto: compiled again with times for 42 instructions"
    lines = {"pgle=auto": [again], "pgle_profile=": [used]}
    found = on_gpu.pgle(machine_whose_runs_say(monkeypatch, tmp_path, lines))
    assert (found["auto"]["said"], found["by_the_file"]["said"]) == ([again], [used])
    assert found["step_time_times_none"] == 0.5


def test_a_profile_that_no_run_says_it_used_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="no line reports that a profile was used: auto, by_the_file of"):
        on_gpu.pgle(machine_whose_runs_say(monkeypatch, tmp_path, {}))


def test_memory_and_time_are_beside_what_was_stated_ahead_of_time(monkeypatch, tmp_path):
    machine = machine_whose_runs_say(monkeypatch, tmp_path, {})
    report = {"memory": {"needed": 24 * 2**30}, "prediction": {"step_seconds": 1.6}, "replay": {"step_seconds": 2.5}}
    machine.shared["ahead"] = report
    found = on_gpu.prediction(machine)
    assert found["memory"]["peak_times_verdict"] == 1.25
    assert found["measured_times"] == {"prediction": 1.25, "replay": 0.8}
    assert machine.plain()["attention"] == "cudnn_flash"


@pytest.fixture
def checks(monkeypatch):
    """Checks on a clock of their own: a takes 100 s, b fails, c would take 300 s, d takes 100 s and is the last."""
    clock, seen = [0.0], {}
    monkeypatch.setattr(on_gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(on_gpu, "described", lambda machine: {"device": "a clock"})

    def a(machine):
        """The first."""
        clock[0] += 100
        return {"figure": 1}

    def b(machine):
        """Fails, as one without compilers does."""
        raise RuntimeError("compile_topology=a3:1 needs the package jax-cuda12-plugin, which is not installed here")

    def c(machine):
        """Takes long."""
        raise AssertionError("there is no time for it")

    def d(machine):
        """The last."""
        seen.update(json.loads(seen.pop("out").read_text()))
        return a(machine)

    made = [on_gpu.Check(a, 1, ()), on_gpu.Check(b, 0.1, ()), on_gpu.Check(c, 3, ()), on_gpu.Check(d, 1, ())]
    monkeypatch.setattr(on_gpu, "CHECKS", {check.make.__name__: check for check in made})
    return seen


def test_no_check_begins_that_would_not_end_in_time_and_each_result_is_kept(checks, tmp_path, capsys):
    checks["out"] = out = tmp_path / "out.json"
    assert on_gpu.main([str(out), "--platform", "cpu", "--minutes", "5"]) == 0
    found = json.loads(out.read_text())["checks"]
    error = "compile_topology=a3:1 needs the package jax-cuda12-plugin, which is not installed here"
    assert found["b"] == {"error": error}
    assert found["c"] == {"skipped": "takes about 300 s, but only 200 s remain"}
    assert found["a"] == found["d"] == {"figure": 1, "seconds": 100.0}
    assert checks["checks"] == {name: found[name] for name in "abc"}  # as the last check found the file
    printed = capsys.readouterr().out
    assert "a: The first. About 20 s.\n" in printed  # a guess, then what was measured
    assert "d: The last. About 100 s.\n" in printed
    assert printed.endswith(f"written: {out}; failed: b; skipped: c; asked: {{}}\n")


def test_a_process_that_would_outlast_the_minutes_is_ended(tmp_path):
    machine = on_gpu.Machine("cpu", tmp_path, minutes=1 / 60)
    with pytest.raises(RuntimeError, match=r"did not finish in the remaining 1 s"):
        machine.python("-c", "import time; time.sleep(600)")


def test_packages_that_are_not_there_are_named_in_one_line_before_anything_runs(monkeypatch, tmp_path, capfd):
    there = [SimpleNamespace(name=name.replace("_", "-")) for name in on_gpu.NEEDED if name != "tensorboardX"]
    monkeypatch.setattr(on_gpu.metadata, "distributions", lambda: there)
    assert on_gpu.main([str(tmp_path / "out.json")]) == 2
    assert capfd.readouterr() == ("", f"on_gpu: not installed for {sys.executable}: tensorboardX\n")
    bare = subprocess.run([sys.executable, "-S", "scripts/on_gpu.py"], cwd=runs.ROOT, capture_output=True, text=True)
    assert bare.returncode == 2
    assert bare.stderr.endswith(f": {', '.join(on_gpu.NEEDED)}\n")
    assert bare.stderr.count("\n") == 1


def test_a_machine_without_a_gpu_is_one_line(monkeypatch, tmp_path, capsys):
    facts = {"facts": {"devices": "1 x cpu", "platform": "cpu"}, "compilers": {}}
    monkeypatch.setattr(on_gpu.Machine, "inside", lambda self, name: ([], facts[name]))
    assert on_gpu.main([str(tmp_path / "out.json")]) == 2
    without = "JAX finds no GPU, but 1 x cpu (--platform cpu tries the checks without one)"
    assert capsys.readouterr() == ("", f"on_gpu: {without}\n")


def test_the_chosen_python_finds_pure_wheels_that_lie_beside(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/false")
    shutil.copy(runs.ROOT / "scripts" / "on_gpu.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "on_gpu.py").write_text("import sys; print(sys.argv[1:], *sys.path, sep='\\n')")
    for wheel in ("a-1.0-py3-none-any.whl", "b-1.0-py3-none-any.whl", "c-1.0-cp312-cp312-linux_x86_64.whl"):
        (tmp_path / ".whl" / wheel).touch()
    printed = subprocess.run(
        ["bash", tmp_path / "scripts" / "on_gpu.sh", "out.json"],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable}, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    assert printed[0] == "['out.json']"
    wheels = [line for line in printed if line.endswith(".whl")]
    assert wheels == [f"{tmp_path}/.whl/{name}-1.0-py3-none-any.whl" for name in "ab"]


@pytest.mark.long
def test_a_run_imports_what_is_needed_and_nothing_else(tmp_path):
    """Each of NEEDED, with all other packages out of reach but those that these need."""
    needed = {canonicalize_name(name) for name in on_gpu.NEEDED}
    queue, closure = list(needed), set()
    while queue:
        if (name := queue.pop()) not in closure:
            closure.add(name)
            each = [Requirement(line) for line in metadata.requires(name) or []] if name in pins("base") else []
            queue += [canonicalize_name(r.name) for r in each if not r.marker or r.marker.evaluate({"extra": ""})]
    code = """
import sys
from importlib import metadata
allowed, keys = set(sys.argv[1].split(",")), sys.argv[2:]
provided = metadata.packages_distributions()
provided = {top: {each.lower().replace("_", "-") for each in names} for top, names in provided.items()}

class Bar:
    def find_spec(self, name, path=None, target=None):
        if allowed.isdisjoint(provided.get(name.partition(".")[0], allowed)):
            raise ModuleNotFoundError(f"barred: {name}", name=name)

sys.meta_path.insert(0, Bar())
from scripts import on_gpu_inside
on_gpu_inside.main("train", *keys)
tops = {name.partition(".")[0] for name in sys.modules}
print(*{name for top in tops for name in provided.get(top, ())})
"""
    closure.remove("packaging")  # tensorboardX's, for parts that no run uses; a bare environment lacks it
    assert closure.isdisjoint({"tokenizers", "sentencepiece", "jinja2"})
    keys = [*on_gpu.TINY, "dataset_type=synthetic", "enable_checkpointing=false", "steps=2"]
    command = [
        sys.executable,
        "-c",
        code,
        ",".join(closure),
        *keys,
        f"base_output_directory={tmp_path}",
        "run_name=run",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Orbax is not imported if no checkpoint is written, but its version is reported.
    assert needed - {"orbax-checkpoint"} <= set(done.stdout.splitlines()[-1].split())


def checked(tmp_path, *only):
    """The JSON of some checks on this machine's CPU."""
    out = tmp_path / "out.json"
    command = ["bash", "scripts/on_gpu.sh", out, "--platform", "cpu", *(["--only", *only] if only else [])]
    subprocess.run(command, cwd=runs.ROOT, env=os.environ | {"PYTHON": sys.executable}, check=True, capture_output=True)
    return json.loads(out.read_text())["checks"]


@pytest.mark.long
def test_kernels_are_held_to_plain_ones(tmp_path):
    found = checked(tmp_path, "kernels")["kernels"]
    assert 0 < found["greatest_difference"] < 0.02
    attention = [f"attention_{name}{of}" for name in ("packed", "unpacked", "window") for of in ("", "_grouped")]
    attention += ["attention_pieces", "attention_latent"]
    assert found["greatest_difference"] == max(found[name] for name in (*attention, "grouped_products"))


@pytest.mark.long
def test_all_checks_run_or_say_that_they_need_a_gpu(tmp_path):
    found = checked(tmp_path)
    assert list(found) == list(on_gpu.CHECKS)
    assert found["bfloat16"]["tokens_per_second"] > 0
    assert found["saved_step"]["loss_differs_by"] == 0
    assert min(found["decoding"]["tokens_per_second"].values()) > 0
    assert found["prediction"]["memory"]["verdict_bytes"] > 0
    for other in ("fp8", "unpacked", "experts", "window", "soft_cap", "head_dim_256"):
        assert found[other]["times_bfloat16"] > 0, found[other]
    assert max(found["head_dim_256"]["kernel"].values()) < 0.02
    assert [name for name in found if "error" in found[name]] == ["pgle"]
    assert "pgle=auto needs an NVIDIA GPU, but the platform is cpu" in found["pgle"]["error"]
