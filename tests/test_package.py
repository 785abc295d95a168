"""What pip installs: the package `mintext`, beside other packages, with its configs, that runs as a checkout does."""

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from src.__main__ import COMMANDS
from tests import runs
from tests.test_structure import COMMANDS as COMMAND_MODULES

PROJECT = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())
TINY = {**runs.TINY, "base_output_directory": "runs", "steps": 2, "max_target_length": 64, "per_device_batch_size": 2}

# Every module under either name is one module, and a package `src` of the user's is not shadowed in silence.
ONE_COPY = """
import sys
import mintext.train, mintext.errors
from src.system.errors import UserError
assert UserError is mintext.errors.UserError and UserError.__module__ == "mintext.system.errors"
copies = [name for name in sys.modules if name.startswith("src.")
          and sys.modules[name] is not sys.modules["mintext" + name[3:]]]
assert not copies, copies
assert mintext.errors.__spec__.name == "mintext.system.errors"
from src.extras.hf import family
assert family is sys.modules["mintext.extras.hf.family"]
try:
    import src.my_model
except ModuleNotFoundError as error:
    print(error)
"""
SHADOWED = "import sys, types; sys.modules['src'] = types.ModuleType('src'); import mintext"


def test_every_folder_of_code_is_a_package_of_the_wheel():
    folders = {path.parent.relative_to(runs.ROOT / "src") for path in (runs.ROOT / "src").rglob("__init__.py")}
    names = {".".join(("mintext", *folder.parts)) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names | {"mintext.configs"}


def test_it_needs_what_the_checkout_installs_or_newer():
    def first_part(name):
        text = (runs.ROOT / "requirements" / f"{name}.txt").read_text().partition("# What those need.")[0]
        lines = [line.partition(" ;")[0] for line in text.splitlines() if line and not line.startswith("#")]
        return sorted({line.partition("==")[0]: line for line in reversed(lines)}.values())  # of the oldest Python

    project = PROJECT["project"]
    extras = {"base": project["dependencies"], **project["optional-dependencies"]}
    for name, needs in extras.items():
        assert sorted(need.replace(">=", "==") for need in needs) == first_part(name), name


def test_each_command_has_its_name():
    assert set(COMMANDS) == COMMAND_MODULES | {"report"}
    for name in COMMANDS:
        assert importlib.util.find_spec(f"src.{name}")


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "src", *arguments], cwd=runs.ROOT, capture_output=True, text=True, check=False
    )


def test_the_command_runs_the_command_that_is_named():
    said = run_command("report", "--help")
    assert said.stdout.startswith("usage: python -m src.report RUN_DIR")
    usage = "usage: mintext COMMAND ...\n\nCOMMAND is one of train, train_compile, "
    helped, none, wrong = run_command("--help"), run_command(), run_command("trian", "configs/base.yml")
    assert (helped.returncode, none.returncode, wrong.returncode) == (0, 2, 2)
    assert helped.stdout.startswith(usage)
    assert none.stderr.startswith(usage)
    assert wrong.stderr.startswith(f"error: unknown command trian. Did you mean train?\n\n{usage}")


INSTALLING = "import sys, mintext; print(mintext.installing(sys.argv[1]), end='')"


def test_an_installed_package_names_what_pip_installs(tmp_path):
    code = "".join(path.read_text() for path in sorted((runs.ROOT / "src").rglob("*.py")))
    names = set(re.findall(r"\binstalling\([\"'](\w+)", code))
    names |= set(*re.findall(r'extra = "(\w+)" if .* else "(\w+)"', code))  # of the package that a reader lacks
    extras = names - {"aot"}  # its compilers have a folder of their own in a checkout
    assert {"data", "eval", "tpu"} < extras <= set(PROJECT["project"]["optional-dependencies"])
    (tmp_path / "mintext").symlink_to(runs.ROOT / "src")
    for name in names:
        said = subprocess.run(
            [sys.executable, "-c", INSTALLING, name], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        how = f'pip install "mintext[{name}]"' if name in extras else "a checkout's `bash setup.sh aot`"
        assert said == how


# ---- In an environment of its own


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository's files, for pip builds in place."""
    folder = tmp_path_factory.mktemp("package") / "checkout"
    command = [
        "git",
        "ls-files",
        "-co",
        "--exclude-standard",
        "-z",
        "--",
        *("src", "configs", "docs", "*.toml", "*.md"),
    ]
    for name in subprocess.run(command, cwd=runs.ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (runs.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((runs.ROOT / name).read_bytes())
    return folder


def fresh_environment(folder, *what):
    """A virtual environment into which pip has installed `what`, and that finds this one's packages beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # setuptools among them
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-build-isolation", *what], check=True)
    return folder / "bin"


def run(folder, *command, code=0):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTHON"))}
    env |= {"JAX_PLATFORMS": "cpu", "HOME": str(folder)}
    ended = subprocess.run([str(word) for word in command], cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["installed", "editable"])
def test_what_pip_installs_trains_beside_other_packages(how, checkout, tmp_path):
    programs = fresh_environment(tmp_path / "venv", *["-e"] * (how == "editable"), checkout)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not list(packages.glob("src*")), "no package of this name could live beside it"
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_loss.py").write_text(
        "from src.step.loss import next_token_loss\n\n"
        "def loss(model, batch, plan):\n    print('my loss')\n    return next_token_loss(model, batch, plan)\n"
    )
    keys = [f"{key}={value}" for key, value in TINY.items()]
    output = run(here, programs / "mintext", "train", "configs/quickstart.yml", *keys, "loss=my_loss:loss")
    assert "my loss" in output
    assert [step for step, _ in runs.losses(here / "runs" / "run")] == [1, 2]
    (ask,) = re.findall(r"^ask it: +(.*)$", output, re.MULTILINE)
    assert " -m mintext.decode runs/run" in ask
    python = programs / "python"
    run(here, python, "-m", "mintext.decode", "runs/run", "prompt=x", "sample_length=2")
    run(here, python, "-m", "mintext.report", "runs/run")
    assert run(here, python, "-m", "mintext.report", "--help").startswith("usage: python -m mintext.report RUN_DIR")
    # From the table of other trainers' names in docs/.
    assert "Google Cloud's monitoring" in run(here, python, "-m", "mintext.train", "--help", "goodput_upload")
    assert "no module src.my_model" in run(here, python, "-c", ONE_COPY)
    assert "mintext needs the name src" in run(here, python, "-c", SHADOWED, code=1)
    facts = (here / "runs" / "run" / "environment.json").read_text()
    version = PROJECT["project"]["version"]
    assert f'"MinText": "{version}' in facts
    for path in (Path("configs") / "base.yml", Path("configs") / "recipes"):
        assert how == "editable" or (packages / "mintext" / path).exists()
