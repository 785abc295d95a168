"""The set-up, without running it: what is pinned, that it is complete, and that it names all that is imported."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = {path.stem: path for path in (REPOSITORY / "requirements").glob("*.txt")}
PYTHONS = ("3.11", "3.12", "3.13")


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


@pytest.mark.parametrize(("python", "jax"), [("3.11", "0.10."), ("3.12", "0.11."), ("3.13", "0.11.")])
def test_each_python_gets_one_matching_jax(python, jax):
    base = pins("base", python)
    assert base["jax"].startswith(jax)
    assert base["jaxlib"] == base["jax"]
    for name in ("gpu", "aot"):
        assert {pins(name, python)[package] for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt")} == {base["jax"]}
    assert {"libtpu"} <= pins("tpu", python).keys() & pins("aot", python).keys()


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


@pytest.mark.parametrize(("folder", "names"), [("src", ["base", "data"]), ("tests", ["base", "data", "dev"])])
def test_every_import_is_pinned(folder, names):
    pinned = {package for name in names for package in pins(name)}
    providers = metadata.packages_distributions()
    imports = third_party_imports(folder)
    assert "jax" in imports
    unpinned = {name for name in imports if not {canonicalize_name(each) for each in providers.get(name, [])} & pinned}
    # What a user installs for `convert check` (src/convert.py), for dataset_type=hf and on TPU VMs; streams.txt,
    # trackers.txt, eval.txt and tpu.txt need not be installed where the tests run, and without a package nobody knows
    # what it provides.
    trackers = {"wandb", "mlflow"}  # a test compares calls with the packages' own signatures where they are
    others = {"torch", "transformers", "datasets", "lm_eval", "cloud_tpu_diagnostics"} if folder == "src" else set()
    assert unpinned == trackers | others


@pytest.mark.parametrize("script", ["setup.sh", ".ci/run"])
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", REPOSITORY / script], check=True)


def test_setup_refuses_a_name_it_does_not_know():
    done = subprocess.run(["bash", REPOSITORY / "setup.sh", "cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'cuda' is none of tpu, gpu, aot, data, streams, trackers, eval, dev" in done.stderr


def test_the_changelog_has_the_version_of_pyproject():
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
