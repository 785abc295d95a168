"""The launchers under scripts/: what they run, against fake gcloud, sbatch and kubectl that play the other side."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fake_gcloud import parse
from tests.runs import ROOT

PLACE = ("--zone", "us-west4-a", "--project", "research")
WHERE = {"--zone": "us-west4-a", "--project": "research"}

# What a worker runs in these tests: it says who it is, and, where a file says so, fails or waits for SIGTERM.
JOB = """
trap 'echo saved; exit 143' TERM
who=$(basename "$HOME")
echo "$who: $*"
if [ -e "$FAKE_CLOUD/fails-$who" ]; then echo "broken" >&2; exit 7; fi
while [ -e "$FAKE_CLOUD/waits" ]; do /bin/sleep 0.05; done
"""


class Cloud(NamedTuple):
    """A repository with the launchers, and the folder of a fake cloud (tests/fake_gcloud.py)."""

    repository: Path
    folder: Path

    def launch(self, script, *arguments):
        return subprocess.run([f"scripts/{script}", *map(str, arguments)], **self.options(), timeout=60, check=False)

    def start(self, *arguments):
        return subprocess.Popen(["scripts/tpu.sh", *arguments], **self.options(), start_new_session=True)

    def options(self):
        return {"cwd": self.repository, "text": True, "stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1}

    def calls(self, *words):
        """What gcloud was asked for that begins with these words."""
        calls = [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]
        return [call for call in calls if call[: len(words)] == list(words)]

    def worker(self, name):
        return self.folder / "workers" / name

    def logs(self):
        """The last run's logs and exit codes, by file name."""
        last = max((self.repository / "runs" / "tpu" / "pod").iterdir())
        return {path.name: path.read_text() for path in last.iterdir()}


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A repository with the launchers and the job, and a cloud behind a fake gcloud: its state is files in a folder."""
    repository, folder, programs = tmp_path / "repository", tmp_path / "cloud", tmp_path / "bin"
    for each in (repository, folder, programs):
        each.mkdir()
    shutil.copytree(ROOT / "scripts", repository / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (repository / "job.sh").write_text(JOB)
    (repository / "old name.txt").write_text("gone by the second run")
    (repository / "setup.sh").write_text('mkdir -p .venv/bin; echo "$* with $PYTHON" >>.venv/asked\n')
    (repository / ".gitignore").write_text("/runs/\n.venv\n")
    (folder / "settings.json").write_text(json.dumps({"compute/zone": "us-west4-a", "project": "research"}))
    (folder / "states").write_text("ACTIVE")
    (folder / "shape").write_text("2 2")
    program(programs / "gcloud", f'exec {sys.executable} {ROOT / "tests" / "fake_gcloud.py"} "$@"')
    program(programs / "sleep", "exec /bin/sleep 0.05")
    program(programs / "python3", 'if [ "$4" = find ]; then echo /fake/python3.12; fi')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for command in ("init -q", "add -A"):
        subprocess.run(["git", *command.split()], cwd=repository, check=True)
    return Cloud(repository, folder)


def program(path, script):
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def tpu_commands(output):
    """The gcloud commands that a dry run printed, read as a shell would and by gcloud's own flags."""
    lines = [shlex.split(line) for line in output.splitlines()]
    return [parse(words[1:]) for words in lines if words[0] == "gcloud"]


# ---- Cloud TPU: what a dry run prints


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["--type", "v5litepod-16"], {"--node-id": "pod", "--runtime-version": "v2-alpha-tpuv5-lite"}),
        (
            ["--type=v5p-128", "--reserved"],
            {"--node-id": "pod", "--runtime-version": "v2-alpha-tpuv5", "--reserved": ""},
        ),
        (
            ["--type", "v6e-256", "--slices", "4", "--spot"],
            {"--node-count": "4", "--node-prefix": "pod", "--runtime-version": "v2-alpha-tpuv6e", "--spot": ""},
        ),
        (
            ["--type", "v4-8", "--on-demand", "--version", "my-runtime"],
            {"--node-id": "pod", "--runtime-version": "my-runtime"},
        ),
    ],
)
def test_create_asks_for_a_queued_resource(cloud, arguments, flags):
    done = cloud.launch("tpu.sh", "create", "pod", *arguments, *PLACE, "--dry-run")
    assert done.returncode == 0, done.stderr
    create, describe = tpu_commands(done.stdout)
    kind = arguments[0].partition("=")[2] or arguments[1]
    assert create == (("queued-resources", "create"), ["pod"], {"--accelerator-type": kind, **flags, **WHERE})
    assert describe[:2] == (("queued-resources", "describe"), ["pod"])
    assert not (cloud.folder / "calls.jsonl").exists()


def test_a_dry_run_prints_each_command_of_a_run_and_runs_none(cloud):
    command = ["python", "-m", "src.train", "configs/base.yml", "prompt=it's a test", "dataset_path=a  b"]
    done = cloud.launch("tpu.sh", "run", "pod", *PLACE, "--dry-run", "--slices", 2, "--workers", 3, "--", *command)
    assert done.returncode == 0, done.stderr
    parsed = tpu_commands(done.stdout)
    assert [words for (_, verb), words, _ in parsed if verb == "scp"] == [
        [f"{cloud.repository.parent}/mintext-pod.tgz", f"pod-{i}:mintext.tgz"] for i in range(2)
    ]
    starts = [(words, flags) for (_, verb), words, flags in parsed if verb == "ssh" and " start " in flags["--command"]]
    assert [(words, flags["--worker"]) for words, flags in starts] == [
        ([f"pod-{i}"], str(j)) for i in range(2) for j in range(3)
    ]
    for _, flags in starts:
        sent = " ".join(flags["--command"].split(" "))  # as gcloud does
        assert shlex.split(sent)[-len(command) :] == command
    assert len({flags["--command"] for _, flags in starts}) == 1
    assert not (cloud.folder / "calls.jsonl").exists()
    assert not (cloud.repository / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["create", "pod", "--type", "v5e-256"], "v5litepod-256"),
        (["create", "pod", "--type", "tpu7x-8"], "scripts/gke.sh"),
        (["create", "pod", "--type", "h100"], "expected v4-N, v5litepod-N, v5p-N or v6e-N"),
        (["create", "pod"], "expected v4-N"),
        (["create", "pod", "--type", "v4-8", "--slices", "two"], "--slices two is no number"),
        (["create", "--type", "v4-8"], "scripts/tpu.sh create NAME"),
        (["launch", "pod"], "none of create, run, stop, status, ssh, delete"),
        (["ssh", "pod", "--slice", "2", "--slices", "2"], "pod has 2, counted from 0"),
        (["run", "pod", "python", "-m", "src.train"], "comes after --"),
        (["status", "pod", "--chips", "4"], "no option --chips"),
    ],
)
def test_a_mistake_is_one_line(cloud, arguments, answer):
    done = cloud.launch("tpu.sh", *arguments, *PLACE, "--dry-run")
    assert done.returncode == 2
    assert answer in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_zone_and_project_are_gclouds_own_if_not_given(cloud):
    done = cloud.launch("tpu.sh", "delete", "pod", "--yes", "--force")
    assert done.returncode == 0, done.stderr
    [call] = cloud.calls("compute")
    assert parse(call)[2] == {**WHERE, "--quiet": "", "--force": ""}
    (cloud.folder / "settings.json").write_text("{}")
    done = cloud.launch("tpu.sh", "delete", "pod", "--yes")
    assert done.returncode == 2
    assert done.stderr == "tpu.sh: which zone? Give --zone, or once: gcloud config set compute/zone VALUE\n"


def test_without_gcloud_one_line_says_so(cloud, monkeypatch):
    system = cloud.folder / "system"
    system.mkdir()
    for name in ("bash", "dirname", "env"):
        (system / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(system))
    done = cloud.launch("tpu.sh", "status", "pod", *PLACE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gcloud is not installed" in done.stderr


# ---- Cloud TPU: played through


def test_create_waits_until_the_slices_are_there(cloud):
    (cloud.folder / "states").write_text("ACCEPTED PROVISIONING PROVISIONING ACTIVE")
    done = cloud.launch("tpu.sh", "create", "pod", "--type", "v5litepod-16", "--slices", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["pod: ACCEPTED", "pod: PROVISIONING", "pod: ACTIVE"]
    (cloud.folder / "states").write_text("ACCEPTED FAILED")
    done = cloud.launch("tpu.sh", "create", "pod", "--type", "v5litepod-16")
    assert done.returncode == 1
    assert "describe pod says why" in done.stderr


def test_delete_asks(cloud):
    done = cloud.launch("tpu.sh", "delete", "pod", *PLACE)
    assert done.returncode == 1
    assert not (cloud.folder / "calls.jsonl").exists()


def test_a_run_is_on_all_workers_of_all_slices(cloud):
    workers = [f"pod-{i}-{j}" for i in range(2) for j in range(2)]
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh", "it's", "a  b", "$HOME")
    assert done.returncode == 0, done.stderr
    assert "slice 0 worker 0 | pod-0-0: it's a  b $HOME" in done.stdout.splitlines()
    logs = cloud.logs()
    for name in workers:
        slice_, worker = name.split("-")[1:]
        assert f"{name}: it's a  b $HOME\n" in logs[f"slice-{slice_}-worker-{worker}.log"]
        assert logs[f"slice-{slice_}-worker-{worker}.code"] == "0\n"
        copy = cloud.worker(name) / "mintext"
        assert (copy / "job.sh").read_text() == JOB
        assert (copy / "old name.txt").exists()
        assert (copy / ".venv" / "asked").read_text() == "tpu with /fake/python3.12\n"

    (cloud.repository / "old name.txt").unlink()
    (cloud.repository / "job.sh").write_text("echo another")
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh")
    assert "slice 0 worker 0 | another" in done.stdout
    for name in workers:
        assert not (cloud.worker(name) / "mintext" / "old name.txt").exists()
        assert (cloud.worker(name) / "mintext" / "setup.sh").exists()


def test_a_worker_that_fails_ends_the_run_everywhere(cloud):
    (cloud.folder / "fails-pod-1-0").touch()
    (cloud.folder / "waits").touch()
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh")
    assert done.returncode == 7
    assert re.search(r"slice-1-worker-0 failed with exit code 7: runs/tpu/pod/.*/slice-1-worker-0.log", done.stderr)
    logs = cloud.logs()
    assert "broken" in logs["slice-1-worker-0.log"]
    assert {logs[f"slice-{i}-worker-{j}.code"] for i, j in ((0, 0), (0, 1), (1, 1))} == {"137\n"}
    assert done.stderr.count("failed") == 1


@pytest.fixture
def waiting(cloud):
    """A run that waits on all of its workers."""
    (cloud.folder / "waits").touch()
    process = cloud.start("run", "pod", "--", "bash", "job.sh")
    wait_until(lambda: len(list(cloud.folder.glob("workers/*/mintext/.launched/*/pid"))) == 4)
    time.sleep(0.2)  # the job's trap
    yield process
    (cloud.folder / "waits").unlink(missing_ok=True)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_until(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it took longer than 20 seconds")


def test_ctrl_c_has_all_workers_save_and_end(cloud, waiting):
    os.killpg(waiting.pid, signal.SIGINT)  # as the terminal sends it: to the script, and all of its process group
    output, errors = waiting.communicate(timeout=30)
    assert waiting.returncode == 143, errors
    assert "slice 0 worker 0 | saved" in output
    assert "the same command goes on" in output
    assert "failed" not in errors
    logs = cloud.logs()
    assert all("saved" in logs[f"slice-{i}-worker-{j}.log"] for i in range(2) for j in range(2))


def test_a_second_ctrl_c_kills(cloud, waiting):
    for copy in cloud.folder.glob("workers/*/mintext/.launched/*/pid"):
        os.kill(int(copy.read_text()), signal.SIGSTOP)  # does not hear SIGTERM
    os.killpg(waiting.pid, signal.SIGINT)
    time.sleep(1)
    assert waiting.poll() is None
    os.killpg(waiting.pid, signal.SIGINT)
    assert waiting.wait(timeout=30) == 137


def test_a_run_outlives_its_launcher_and_is_found_again(cloud, waiting):
    os.killpg(waiting.pid, signal.SIGKILL)
    waiting.wait()
    done = cloud.launch("tpu.sh", "status", "pod")
    assert done.stdout.startswith("pod: ACTIVE\npod-0\tREADY\tHEALTHY\npod-1\tREADY\tHEALTHY\n")
    assert re.fullmatch(r" *4 run [\d-]+ is alive", done.stdout.splitlines()[-1])
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh")
    assert done.returncode == 2
    assert "is alive on this worker" in done.stderr
    following = cloud.start("run", "pod")
    wait_until(lambda: len(list(cloud.repository.glob("runs/tpu/pod/*/slice-*.log"))) >= 8)
    assert cloud.launch("tpu.sh", "stop", "pod").returncode == 0
    output, errors = following.communicate(timeout=30)
    assert following.returncode == 143, errors
    assert "slice 0 worker 0 | saved" in output
    done = cloud.launch("tpu.sh", "status", "pod")
    assert re.fullmatch(r" *4 run [\d-]+ ended with exit code 143", done.stdout.splitlines()[-1])


def test_a_command_that_gcloud_repeats_starts_no_second_run(cloud):
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh")
    assert done.returncode == 0, done.stderr
    [[*_, sent]] = cloud.calls("compute", "tpus", "tpu-vm", "ssh", "pod-1", "--worker=1")
    again = subprocess.run(
        sent.removeprefix("--command="), shell=True, cwd=cloud.worker("pod-1-1"), capture_output=True, text=True
    )
    assert (again.returncode, again.stdout.count("pod-1-1: ")) == (0, 1)
