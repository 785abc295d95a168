"""The set-up, without running it: what is pinned, that it is complete, and that it names all that is imported."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = {path.stem: path for path in (REPOSITORY / "requirements").glob("*.txt")}
SETUP, CI = ((REPOSITORY / name).read_text() for name in ("setup.sh", ".ci/run"))
PYTHONS = re.search(r'^PYTHONS="(.*)"$', SETUP, re.MULTILINE)[1].split()  # the first is taken first


def requirements(name):
    lines = FILES[name].read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins(name, python=f"{sys.version_info.major}.{sys.version_info.minor}"):
    """Canonical name -> version, as one Python takes them from a file."""
    chosen = [
        each for each in requirements(name) if each.marker is None or each.marker.evaluate({"python_version": python})
    ]
    versions = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in chosen}
    assert len(versions) == len(chosen), f"a package stands twice in {name}.txt for Python {python}"
    return versions


def third_party_imports(folder):
    """Top-level packages that the Python files of a folder import, wherever in the file."""
    found = set()
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    helpers = {path.stem for path in (REPOSITORY / "tests").rglob("*.py")}  # pytest puts their folders on the path
    return found - set(sys.stdlib_module_names) - helpers - {"src", "tests", "scripts", "end_to_end"}


def test_there_is_a_file_for_each_name_of_setup_sh():
    assert set(FILES) == {"base", "tpu", "gpu", "aot", "data", "streams", "trackers", "eval", "dev"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_requirements_are_plain_pins(name):
    pin = re.compile(r"""[\w.-]+==[\w.]+( ; python_version (<|>=) "3\.12")?""")
    for line in FILES[name].read_text().splitlines():
        assert line == "" or line.startswith("# ") or pin.fullmatch(line), line


@pytest.mark.parametrize("python", PYTHONS)
def test_files_agree_on_what_they_share(python):
    base = pins("base", python)
    others = [pins(name, python) for name in ("tpu", "gpu", "aot", "data", "streams", "trackers", "eval", "dev")]
    for other in others:
        assert not base.keys() & other.keys()
    versions = {}
    for package, version in (item for other in others for item in other.items()):
        assert versions.setdefault(package, version) == version, package


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_gets_one_matching_jax(python):
    base = pins("base", python)
    assert base["jaxlib"] == base["jax"]
    for name in ("gpu", "aot"):
        assert {pins(name, python)[package] for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt")} == {base["jax"]}
    assert {"libtpu"} <= pins("tpu", python).keys() & pins("aot", python).keys()


def test_every_line_of_jax_has_a_lane_in_ci_and_the_main_one_is_what_setup_takes_first():
    """A Python that setup.sh takes first, and that CI never ran, once failed at the README's second command."""
    made = re.findall(r'^PYTHON="([\d. ]+)" (?:VENV=(\S+) )?bash setup\.sh ', CI, re.MULTILINE)
    lanes = {environment or ".venv": pythons.split() for pythons, environment in made}
    jax = {python: pins("base", python)["jax"] for python in PYTHONS}
    newest = max(jax.values(), key=Version)
    assert lanes[".venv"] == PYTHONS[: len(lanes[".venv"])] == [each for each in PYTHONS if jax[each] == newest]
    assert ".venv/bin/python -m pytest -n 2 --dist loadfile\n" in CI  # of all tests
    for pythons in lanes.values():  # whichever of them the machine has, the packages are the same
        for name in FILES:
            assert len({frozenset(pins(name, python).items()) for python in pythons}) == 1
    run = set(re.findall(r"^lane (\S+)/bin/python \w+$", CI, re.MULTILINE))
    pinned = {str(each.specifier).removeprefix("==") for each in requirements("base") if each.name == "jax"}
    assert {jax[lanes[environment][0]] for environment in run} == pinned


def test_pre_commit_runs_the_checks_of_ci():
    """All but the tests as a whole, by programs that setup.sh installed."""
    (repository,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded
    entries = {hook["entry"] for hook in repository["hooks"]}
    whole = re.search(r"^whole\(\) {\n(.*?)^}", CI, re.MULTILINE | re.DOTALL)[1]
    checks = {command.strip().removesuffix(" --check") for command in whole.replace("\\\n", " ").split("&&")}
    (tests,) = {command for command in checks if " pytest " in command}
    assert len(checks) > 2
    assert checks - {tests} <= entries
    files = {word for entry in entries for word in entry.split() if word.startswith("tests/")}
    assert files >= {"tests/test_prose.py", "tests/test_structure.py", "tests/test_border.py"}
    assert all((REPOSITORY / file).is_file() for file in files)


def test_ci_checks_the_types_of_src_and_scripts():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pyrefly"]
    assert settings["project-includes"] == ["src", "scripts", "end_to_end"]
    shells = [path for path in settings["project-includes"] for path in (REPOSITORY / path).rglob("*.sh")]
    assert len(shells) > 20
    # Python within shell scripts is not checked, so it calls nothing of src/.
    assert not [path.name for path in shells if re.search(r"^\s*from src", path.read_text(), re.MULTILINE)]
    assert "pyrefly" in pins("dev")
    assert "&& .venv/bin/pyrefly check &&" in CI
    # A reason for each place that it is not to look at, with the kind of error.
    comments = [line for path in (REPOSITORY / "src").rglob("*.py") for line in path.read_text().splitlines()]
    ignored = [line for line in comments if re.search("# *(type|pyrefly): *ignore", line)]
    assert all(re.search(r"# pyrefly: ignore\[[a-z-]+\]  \w+", line) for line in ignored)
    assert len(ignored) < 5


def test_what_installs_a_python_installs_the_one_that_the_tests_run_on():
    assert f"FROM python:{PYTHONS[0]}-slim\n" in (REPOSITORY / "scripts" / "Dockerfile").read_text()
    assert f"uv python install --quiet {PYTHONS[0]}\n" in (REPOSITORY / "scripts" / "tpu_worker.sh").read_text()


TOOLS = ("bash", "cat", "cmp", "cp", "dirname", "mkdir", "rm")
SHIM = "echo 'pyenv: the command exists in other versions' >&2; exit 127"
# A Python of a version, as far as setup.sh asks one: which it is, for an environment, and to install something there.
PYTHON = """
case "$*" in
  -) echo VERSION ;;
  --version) echo Python VERSION ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """Runs setup.sh in a folder whose programs, pyenv's and uv's versions are all that the machine has."""
    for folder in ("bin", "requirements"):
        (tmp_path / folder).mkdir()
    (tmp_path / "setup.sh").write_text(SETUP)
    (tmp_path / "requirements" / "base.txt").write_text("jax==1.0\n")
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))

    def run(programs, **variables):
        for place, version in programs.items():
            path = tmp_path / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!{shutil.which('bash')}\n" + (PYTHON.replace("VERSION", version) if version else SHIM))
            path.chmod(0o755)
        environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
        environment |= {"PYENV_ROOT": str(tmp_path / "pyenv"), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "uv")}
        command = ["bash", str(tmp_path / "setup.sh")]
        return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)

    return run


NEW, SECOND, OLD = PYTHONS[0], PYTHONS[1], PYTHONS[-1]


@pytest.mark.parametrize(
    ("programs", "variables", "chosen"),
    [
        ({f"bin/python{OLD}": OLD, f"bin/python{SECOND}": SECOND, "bin/python3": NEW}, {}, NEW),
        ({"bin/python3": OLD}, {}, OLD),
        # A shim that is not active is no Python; the version that it names is in pyenv's folder.
        ({f"bin/python{NEW}": None, "bin/python3": OLD, f"pyenv/versions/{NEW}.0/bin/python3": NEW}, {}, NEW),
        ({f"bin/python{NEW}": None, "bin/python3": SECOND}, {}, SECOND),
        ({"bin/python3": "3.9", f"uv/cpython-{NEW}.4-linux-x86_64-gnu/bin/python3": NEW}, {}, NEW),
        # PyPy, and a Python without its lock, have other wheels: such a one answers nothing.
        ({f"pyenv/versions/{NEW}.0t/bin/python3": "", "bin/python3": OLD}, {}, OLD),
        ({"bin/python3": NEW, f"bin/python{OLD}": OLD}, {"PYTHON": OLD}, OLD),
        ({"bin/python3": SECOND, f"bin/python{OLD}": OLD}, {"PYTHON": f"{NEW} {SECOND}"}, SECOND),
        ({"bin/python3": NEW, "bin/my_python": OLD}, {"PYTHON": "my_python"}, OLD),
    ],
)
def test_setup_takes_the_first_of_its_pythons_that_is_anywhere(machine, programs, variables, chosen):
    done = machine(programs, **variables)
    assert done.returncode == 0, done.stderr
    assert f"installing requirements/base.txt for Python {chosen};" in done.stdout


@pytest.mark.parametrize(
    ("programs", "variables", "message"),
    [
        ({"bin/python3": "3.9"}, {}, f"has a Python of these versions: {' '.join(PYTHONS)}; python3 is Python 3.9"),
        # CI's main lane, where only the old one is there.
        ({"bin/python3": OLD}, {"PYTHON": f"{NEW} {SECOND}"}, f"neither PATH nor pyenv nor uv has .*: {NEW} {SECOND};"),
        ({"bin/python3": NEW}, {"PYTHON": "3.9"}, "PYTHON=3.9 is not one of the versions"),
        ({"bin/python3": NEW, "bin/old": "3.9"}, {"PYTHON": "old"}, "PYTHON=old is not a Python of these versions"),
        (
            {"bin/python3": NEW, ".venv/bin/python": OLD},
            {"PYTHON": NEW},
            f".venv has Python {OLD}, but PYTHON={NEW} asks",
        ),
    ],
)
def test_setup_says_in_a_sentence_why_it_takes_none(machine, programs, variables, message):
    done = machine(programs, **variables)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert done.stdout == ""


def test_setup_makes_a_second_environment_beside_the_first(machine, tmp_path):
    assert machine({f"bin/python{NEW}": NEW, f"bin/python{OLD}": OLD}).returncode == 0
    assert machine({}, PYTHON=OLD, VENV=f".venv-{OLD}").returncode == 0
    made = {folder: (tmp_path / folder / "bin" / "python").read_text() for folder in (".venv", f".venv-{OLD}")}
    assert made == {
        ".venv": (tmp_path / "bin" / f"python{NEW}").read_text(),
        f".venv-{OLD}": (tmp_path / "bin" / f"python{OLD}").read_text(),
    }
    assert (tmp_path / f".venv-{OLD}" / "installed" / "base.txt").exists()


@pytest.mark.parametrize("name", ["base", "aot", "data", "streams", "trackers", "eval", "dev"])
def test_what_pinned_packages_need_is_pinned_too(name):
    """By the installed packages' own metadata, so for the Python and system that this runs on.

    What only the CUDA build of torch needs is left out: the tests use its CPU part.
    """
    packages = {
        "aot": "libtpu",
        "data": "tensorflow_datasets",
        "streams": "datasets",
        "trackers": "wandb",
        "eval": "lm_eval",
    }
    if (missing := packages.get(name)) and util.find_spec(missing) is None:
        pytest.skip(f"bash setup.sh {name} installs them")
    pinned = pins("base") | pins(name)
    for package in pins(name):
        for requirement in map(Requirement, metadata.requires(package) or []):
            if package == "torch" and requirement.name.startswith(("nvidia-", "cuda-", "triton")):
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                version = pinned.get(canonicalize_name(requirement.name))
                assert version is not None, f"{package} needs {requirement}, which {name}.txt does not pin"
                assert requirement.specifier.contains(version, prereleases=True), f"{package} needs {requirement}"


@pytest.fixture(scope="module")
def providers():
    """The packages that provide each module."""
    return metadata.packages_distributions()


@pytest.mark.parametrize(("folder", "names"), [("src", ["base", "data"]), ("tests", ["base", "data", "dev"])])
def test_every_import_is_pinned(folder, names, providers):
    pinned = {package for name in names for package in pins(name)}
    imports = third_party_imports(folder)
    assert "jax" in imports
    # A package that is not installed provides, as far as is known here, the module of its own name.
    packages = {name: {canonicalize_name(each) for each in providers.get(name, [name])} for name in imports}
    unpinned = {name for name in imports if not packages[name] & pinned}
    # What a user installs for `convert check`, for dataset_type=hf and on TPU VMs; streams.txt, trackers.txt,
    # eval.txt and tpu.txt need not be installed where the tests run.
    trackers = {"wandb", "mlflow"}  # a test compares calls with the packages' own signatures where they are
    others = {"torch", "transformers", "datasets", "lm_eval", "cloud_tpu_diagnostics"} if folder == "src" else set()
    assert unpinned == trackers | others


@pytest.mark.parametrize("script", ["setup.sh", ".ci/run"])
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", REPOSITORY / script], check=True)


def test_setup_refuses_a_name_it_does_not_know():
    done = subprocess.run(["bash", REPOSITORY / "setup.sh", "cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'cuda' is not one of tpu, gpu, aot, data, streams, trackers, eval, dev" in done.stderr


def test_the_changelog_has_the_version_of_pyproject():
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
