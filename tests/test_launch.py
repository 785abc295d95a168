"""The launchers under scripts/: what they run, against fake gcloud, sbatch and kubectl that play the other side."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from end_to_end.documented import commands_of
from scripts import jobset
from src.extras.aot.topology import parse_topology
from src.system.errors import UserError
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
        # What a shell starts in the background ignores ctrl-C, and so do its children: these tests may be there.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        last = max((self.repository / "runs" / "tpu" / "pod").iterdir(), key=lambda run: run.stat().st_mtime)
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
    (repository / "setup.sh").write_text(
        'mkdir -p .venv/bin; echo "$* with $PYTHON" >>.venv/asked\n'
        'while [ -e "$FAKE_CLOUD/installs" ]; do /bin/sleep 0.05; done\n'
    )
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
    yield Cloud(repository, folder)
    for wait in ("waits", "installs"):
        (folder / wait).unlink(missing_ok=True)


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


def test_create_need_not_wait(cloud):
    done = cloud.launch("tpu.sh", "create", "pod", "--type", "v4-8", "--no-wait")
    assert done.returncode == 0, done.stderr
    assert [parse(call)[0] for call in cloud.calls("compute")] == [("queued-resources", "create")]


def test_a_dry_run_prints_each_command_of_a_run_and_runs_none(cloud):
    train = ["python", "-m", "src.train", "configs/base.yml", "run_name=job"]
    command = [*train, "prompt=it's a test", "dataset_path=a  b"]
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
        (["create", "pod"], "--type is missing: expected v4-N"),
        (["create", "pod", "--type", "v4-8", "--slices", "two"], "--slices two: expected a number, 1 or more"),
        (["create", "pod", "--type", "v4-8", "--slices", "0"], "--slices 0: expected a number, 1 or more"),
        (["ssh", "pod", "--slice", "two"], "--slice two: expected a number, 0 or more"),
        (["create", "--type", "v4-8"], "scripts/tpu.sh create NAME"),
        (["launch", "pod"], "not one of create, run, stop, status, ssh, delete"),
        (["ssh", "pod", "--slice", "2", "--slices", "2"], "pod has 2, counted from 0"),
        (["run", "pod", "python", "-m", "src.train"], "comes after --"),
        (["run", "pod", "--", "python", "-m", "src.train", "configs/base.yml"], "the command has no run_name=NAME"),
        (["status", "pod", "--chips", "4"], "unknown option --chips"),
    ],
)
def test_a_mistake_is_one_line(cloud, arguments, answer):
    end = arguments.index("--") if "--" in arguments else len(arguments)
    done = cloud.launch("tpu.sh", *arguments[:end], *PLACE, "--dry-run", *arguments[end:])
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
    both = "which zone and project? Give --zone and --project, or once: gcloud config set compute/zone ZONE; "
    assert done.stderr == f"tpu.sh: {both}gcloud config set project PROJECT\n"
    done = cloud.launch("tpu.sh", "delete", "pod", "--yes", "--project", "research")
    assert done.stderr == "tpu.sh: which zone? Give --zone, or once: gcloud config set compute/zone ZONE\n"


def test_without_gcloud_one_line_says_so(cloud, monkeypatch):
    system = cloud.folder / "system"
    system.mkdir()
    for name in ("bash", "dirname", "env"):
        (system / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(system))
    done = cloud.launch("tpu.sh", "status", "pod", *PLACE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gcloud is not installed" in done.stderr
    done = cloud.launch("tpu.sh", "status", "pod", *PLACE, "--dry-run")
    assert done.returncode == 0, done.stderr
    done = cloud.launch("tpu.sh", "status", "pod", "--dry-run")
    assert "which zone and project?" in done.stderr


# ---- Cloud TPU: played through


def test_create_waits_until_the_slices_are_there(cloud):
    (cloud.folder / "states").write_text("ACCEPTED PROVISIONING PROVISIONING ACTIVE")
    done = cloud.launch("tpu.sh", "create", "pod", "--type", "v5litepod-16", "--slices", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["pod: ACCEPTED", "pod: PROVISIONING", "pod: ACTIVE"]
    (cloud.folder / "states").write_text("ACCEPTED FAILED")
    done = cloud.launch("tpu.sh", "create", "pod", "--type", "v5litepod-16")
    assert done.returncode == 1
    assert "see gcloud compute tpus queued-resources describe pod" in done.stderr


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


def test_a_run_on_one_slice(cloud):
    (cloud.folder / "shape").write_text("1 3")
    done = cloud.launch("tpu.sh", "run", "pod", "--", "bash", "job.sh", "alone")
    assert done.returncode == 0, done.stderr
    assert {name for name in cloud.logs() if name.startswith("slice")} == {
        f"slice-0-worker-{j}.{end}" for j in range(3) for end in ("log", "code")
    }
    assert "pod-2: alone\n" in cloud.logs()["slice-0-worker-2.log"]


def test_a_broken_connection_leaves_the_run_alone(cloud):
    (cloud.folder / "broken").write_text("pod-1-1")
    (cloud.folder / "waits").touch()
    process = cloud.start("run", "pod", "--", "bash", "job.sh")
    wait_until(lambda: list(cloud.repository.glob("runs/tpu/pod/*/slice-1-worker-1.code")))
    wait_until(lambda: len(list(cloud.folder.glob("workers/*/mintext/.launched/*/pid"))) == 3)
    (cloud.folder / "waits").unlink()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 255
    assert "slice-1-worker-1: the connection broke, but the run continues" in errors
    logs = cloud.logs()
    assert [logs[f"slice-{i}-worker-{j}.code"] for i in range(2) for j in range(2)] == ["0\n"] * 3 + ["255\n"]


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
    process.communicate(timeout=30)


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
    assert "the same command resumes the run" in output
    assert "failed" not in errors
    logs = cloud.logs()
    assert all("saved" in logs[f"slice-{i}-worker-{j}.log"] for i in range(2) for j in range(2))


def test_ctrl_c_while_it_installs_starts_nothing(cloud):
    (cloud.folder / "installs").touch()
    process = cloud.start("run", "pod", "--", "bash", "job.sh")
    wait_until(lambda: len(list(cloud.folder.glob("workers/*/mintext/.venv/asked"))) == 4)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # nothing that it started holds its output open
    assert process.returncode == 130, errors
    assert not list(cloud.folder.glob("workers/*/mintext/.launched"))


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


# ---- SLURM

SLURM = {
    # Runs a copy of the script, as the job's first node does, until its end.
    "sbatch": """printf '%s\\n' "$@" >"$FAKE_CLOUD/sbatch"
while [[ $1 == --* ]]; do shift; done
cp "$1" "$FAKE_CLOUD/spooled"
shift
export SLURM_JOB_ID=77
(
  code=0
  bash -c 'echo $$ >"$FAKE_CLOUD/batch"; exec bash "$FAKE_CLOUD/spooled" "$@"' batch "$@" || code=$?
  echo $code >"$FAKE_CLOUD/code"
) >"$FAKE_CLOUD/job.log" 2>&1 &""",
    # Two tasks; the worst exit code is its own.
    "srun": """printf '%s\\n' "$@" >"$FAKE_CLOUD/srun"
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do HOME=task-$task "$@" & echo $! >>"$FAKE_CLOUD/tasks"; done
worst=0
for task in $(<"$FAKE_CLOUD/tasks"); do wait $task || worst=$?; done
exit $worst""",
    "scancel": """echo "scancel $*" >>"$FAKE_CLOUD/asked"; kill -TERM $(<"$FAKE_CLOUD/tasks")""",
    "squeue": """cat "$FAKE_CLOUD/state" """,
    "scontrol": """echo "scontrol $*" >>"$FAKE_CLOUD/asked" """,
}


@pytest.fixture
def slurm(cloud):
    for name, script in SLURM.items():
        program(cloud.repository.parent / "bin" / name, script)
    (cloud.folder / "state").write_text("RUNNING\n")
    yield cloud
    (cloud.folder / "waits").unlink(missing_ok=True)


def submit(slurm):
    """Submits a job that waits; returns the process of its batch script."""
    (slurm.folder / "waits").touch()
    done = slurm.launch("slurm.sh", "--nodes", 4, "--partition=long", "--", "bash", "job.sh", "run_name=x", "a  b")
    assert done.returncode == 0, done.stderr
    job = slurm.folder / "job.log"
    wait_until(lambda: job.exists() and job.read_text().count("a  b") == 2)
    return int((slurm.folder / "batch").read_text())


def tasks(slurm):
    return [int(process) for process in (slurm.folder / "tasks").read_text().split()]


def ended(slurm):
    """The exit code of the batch script, and what it asked SLURM for."""
    code, asked = slurm.folder / "code", slurm.folder / "asked"
    wait_until(lambda: code.exists() and code.read_text())
    return int(code.read_text()), asked.read_text().splitlines() if asked.exists() else []


def test_a_slurm_job_has_a_process_a_gpu(slurm):
    submit(slurm)
    (slurm.folder / "waits").unlink()
    assert ended(slurm) == (0, [])
    command = ["bash", "job.sh", "run_name=x", "a  b"]
    assert (slurm.folder / "sbatch").read_text().splitlines() == [
        *("--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=8", "--partition=long"),
        *("scripts/slurm.sh", "in-job", *command),
    ]
    *options, _, _, _, _ = (slurm.folder / "srun").read_text().splitlines()
    assert options == ["--kill-on-bad-exit=1", "--cpu-bind=none", "--gpu-bind=none"]
    directives = re.findall(r"^#SBATCH (.*)", (ROOT / "scripts" / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@300", "--exclusive", "--open-mode=append"} <= {*directives}
    assert (slurm.repository / "runs").is_dir()  # or SLURM could not write its log there


def test_a_slurm_job_whose_time_is_up_saves_and_is_in_the_queue_again(slurm):
    os.kill(submit(slurm), signal.SIGUSR1)
    assert ended(slurm) == (143, ["scancel --signal=TERM 77", "scontrol requeue 77"])
    assert (slurm.folder / "job.log").read_text().count("saved") == 2


def test_a_cancelled_slurm_job_saves_and_stays_out_of_the_queue(slurm):
    batch = submit(slurm)
    (slurm.folder / "state").write_text("COMPLETING\n")
    for process in [batch, *tasks(slurm)]:
        os.kill(process, signal.SIGTERM)
    assert ended(slurm) == (143, [])
    assert (slurm.folder / "job.log").read_text().count("saved") == 2


def test_a_slurm_job_preempted_with_time_to_save_is_in_the_queue_again(slurm):
    """SLURM's own requeue comes at the end of GraceTime, when the job has ended already."""
    submit(slurm)
    for process in tasks(slurm):
        os.kill(process, signal.SIGTERM)
    assert ended(slurm) == (143, ["scontrol requeue 77"])


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--", "python", "-m", "src.train", "configs/base.yml"], "has no run_name=NAME"),
        (["--nodes", "0", "--", "true"], "--nodes 0: expected a number, 1 or more"),
        (["--partition", "gpu", "--", "true"], "'--partition' needs a value: --partition=VALUE"),
        (["-N", "2", "--", "true"], "'-N' is not an option of the form --NAME=VALUE"),
        (["--nodes", "2"], "no command"),
    ],
)
def test_a_mistake_for_slurm_is_one_line(cloud, arguments, answer):
    done = cloud.launch("slurm.sh", "--dry-run", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert answer in done.stderr


def test_a_dry_run_for_slurm_prints_what_would_be_submitted(cloud):
    done = cloud.launch("slurm.sh", "--dry-run", "--nodes=2", "--gpus-per-node", 4, "--", "echo", "it's")
    assert shlex.split(done.stdout) == [
        *("sbatch", "--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=4"),
        *("scripts/slurm.sh", "in-job", "echo", "it's"),
    ]
    assert not (cloud.repository / "runs").exists()


# ---- GKE

COMMAND = ["python", "-m", "src.train", "configs/base.yml", "run_name=job", 'prompt=it\'s "a"  test: $HOME']


def pods(kind, slices):
    """The manifest's one group of Jobs, the Job, and the pod."""
    [group] = yaml.safe_load(jobset.manifest("job", kind, slices, "image:1", COMMAND))["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    return group, job, job["template"]["spec"]


# Slices, their chips a node and nodes, of docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
@pytest.mark.parametrize(
    ("kind", "accelerator", "topology", "chips", "hosts"),
    [
        ("v5e-1", "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5litepod-8", "tpu-v5-lite-podslice", "2x4", 8, 1),
        ("v5e-256", "tpu-v5-lite-podslice", "16x16", 4, 64),
        ("v4-128", "tpu-v4-podslice", "4x4x4", 4, 16),
        ("v5p:2x2x2", "tpu-v5p-slice", "2x2x2", 4, 2),
        ("V6E-16", "tpu-v6e-slice", "4x4", 4, 4),
        ("tpu7x-128", "tpu7x", "4x4x4", 4, 16),
    ],
)
@pytest.mark.parametrize("slices", [1, 3])
def test_a_jobset_has_a_job_a_slice_and_a_pod_a_host(kind, accelerator, topology, chips, hosts, slices):
    group, job, pod = pods(kind, slices)
    assert group["replicas"] == slices
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (hosts, hosts, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert slices * hosts * chips * parse_topology(kind, 1).devices_per_chip == parse_topology(kind, slices).num_devices
    assert container["command"] == COMMAND
    annotations = yaml.safe_load(jobset.manifest("job", kind, slices, "i", COMMAND))["metadata"]["annotations"]
    assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


@pytest.mark.parametrize(
    ("kind", "accelerator"), [("a3", "nvidia-h100-80gb"), ("a3-ultra", "nvidia-h200-141gb"), ("a4", "nvidia-b200")]
)
def test_a_jobset_of_gpus_has_a_pod_a_host_which_finds_the_others(kind, accelerator):
    group, job, pod = pods(kind, 4)
    assert (group["replicas"], job["parallelism"], job["completions"]) == (1, 4, 4)
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": accelerator}
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    # JobSet's name of a pod: JOBSET-GROUP-JOB-POD.JOBSET
    assert container["command"] == [
        *COMMAND,
        f"coordinator_address=job-{group['name']}-0-0.job:1234",
        "num_processes=4",
        "process_id=$(JOB_COMPLETION_INDEX)",
    ]
    mounts, volumes = {each["name"] for each in container["volumeMounts"]}, {each["name"] for each in pod["volumes"]}
    assert mounts == volumes


@pytest.mark.parametrize("kind", ["v5e-256", "a3"])
def test_a_jobset_restarts_what_was_interrupted_but_no_mistake(kind):
    spec = yaml.safe_load(jobset.manifest("job", kind, 2, "i", COMMAND))["spec"]
    _, job, pod = pods(kind, 2)
    assert spec["failurePolicy"]["maxRestarts"] > 0
    [policy] = spec["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["name"]  # JobSet's schema requires it
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [2]  # src/system/errors.py
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy needs


@pytest.mark.parametrize("name", ["Job", "my_job", "-job", "j" * 41])
def test_a_jobsets_name_is_one_of_kubernetes(name):
    with pytest.raises(UserError, match="Kubernetes takes"):
        jobset.manifest(name, "v5e-8", 1, "i", COMMAND)


@pytest.fixture
def gke(cloud):
    """The launchers in a repository with what scripts/jobset.py needs, beside fake kubectl and docker."""
    (cloud.repository / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "scripts" / "jobset.py", cloud.repository / "scripts")
    programs = cloud.repository.parent / "bin"
    (programs / "python3").unlink()
    (programs / "python3").symlink_to(sys.executable)
    for name in ("kubectl", "docker"):
        record = f'echo "{name} $*" >>"$FAKE_CLOUD/asked"'
        program(programs / name, record + '\nif [[ "$*" == *- ]]; then cat >"$FAKE_CLOUD/stdin"; fi')
    return cloud


def test_a_run_on_gke_is_the_manifest_given_to_kubectl(gke):
    arguments = ["run", "job", "--type", "v5e-256", "--slices", "2", "--image", "image:1"]
    done = gke.launch("gke.sh", *arguments, "--", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert (gke.folder / "asked").read_text() == "kubectl create --filename=-\n"
    assert (gke.folder / "stdin").read_text() == jobset.manifest("job", "v5e-256", 2, "image:1", COMMAND)
    for path in ("asked", "stdin"):
        (gke.folder / path).unlink()
    printed = gke.launch("gke.sh", *arguments, "--dry-run", "--", *COMMAND).stdout
    assert not (gke.folder / "asked").exists()
    subprocess.run(printed, shell=True, cwd=gke.repository, check=True)
    assert (gke.folder / "stdin").read_text() == jobset.manifest("job", "v5e-256", 2, "image:1", COMMAND)


def test_an_image_holds_the_files_that_git_tracks(gke):
    (gke.repository / "old name.txt").unlink()
    (gke.repository / "untracked.txt").touch()
    done = gke.launch("gke.sh", "image", "registry/mintext:1", "tpu")
    assert done.returncode == 0, done.stderr
    build, push = (gke.folder / "asked").read_text().splitlines()
    assert build == (
        "docker build --platform=linux/amd64 --file=scripts/Dockerfile --build-arg=DEVICES=tpu "
        "--tag=registry/mintext:1 -"
    )
    assert push == "docker push registry/mintext:1"
    with tarfile.open(gke.folder / "stdin") as archive:
        names = set(archive.getnames())
    assert {"job.sh", "setup.sh", "scripts/Dockerfile"} <= names
    assert not {"old name.txt", "untracked.txt"} & names


def test_what_the_image_copies_is_there():
    copied = re.findall(r"^COPY (\S+)", (ROOT / "scripts" / "Dockerfile").read_text(), re.MULTILINE)
    assert copied == ["setup.sh", "requirements", "."]
    assert all((ROOT / each).exists() for each in copied)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run", "job", "--type", "v5e-257", "--image", "i"], "--type v5e-257: no v5e slice has 257 chips"),
        (["run", "job", "--type", "h100", "--image", "i"], "Did you mean a3?"),
        (["run", "job", "--type", "cpu-8", "--image", "i"], "expected a TPU slice or a GPU host"),
        (["run", "job", "--type", "v5e-8"], "--image is missing"),
        (["run", "job", "--image", "i"], "--type is missing"),
        (["run", "job", "--type", "v5e-8", "--image", "i", "--slices", "0"], "--slices 0: expected a number"),
        (["logs"], "logs what?"),
        (["image", "registry/mintext"], "is the wrong number of names"),
        (["image", "registry/mintext", "cpu"], "'cpu' is neither tpu nor gpu"),
        (["stop", "job"], "not one of image, run, logs, status, delete"),
    ],
)
def test_a_mistake_for_gke_is_one_line(gke, arguments, answer):
    done = gke.launch("gke.sh", *arguments, "--dry-run", *(["--", *COMMAND] if arguments[0] == "run" else []))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert answer in done.stderr


# ---- All of them


@pytest.mark.parametrize("script", ["tpu.sh", "slurm.sh", "gke.sh"])
def test_help_is_the_scripts_first_comment(script):
    done = subprocess.run([ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True)
    comment = (ROOT / "scripts" / script).read_text().split("\n\n")[0].splitlines()[1:]
    assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in comment]
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize(("script", "arguments"), [("tpu.sh", ["status", "pod", *PLACE]), ("gke.sh", ["logs", "job"])])
def test_dry_run_may_come_first(gke, script, arguments):
    first, last = gke.launch(script, "--dry-run", *arguments), gke.launch(script, *arguments, "--dry-run")
    assert (first.returncode, first.stdout, first.stderr) == (0, last.stdout, "")
    assert first.stdout


DOCUMENTED = [it.words for it in commands_of(ROOT / "docs" / "launch.md") if it.words[0].startswith("scripts/")]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_a_documented_command_is_understood(words, gke):
    end = words.index("--") if "--" in words else len(words)
    place = PLACE if words[0] == "scripts/tpu.sh" else ()
    slices = ("--slices", "2") if "my-pods" in words and "create" not in words else ()
    script, *arguments = [*words[:end], "--dry-run", *place, *slices, *words[end:]]
    done = gke.launch(script.removeprefix("scripts/"), *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""
    assert not (gke.folder / "calls.jsonl").exists()
    assert not (gke.folder / "asked").exists()
