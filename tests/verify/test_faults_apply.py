"""The table of planted faults fits the sources: every diff still applies, and every entry of faults.yml has its own."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from src.config.schema import KEYS

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "verify" / "faults"
TABLE = yaml.safe_load((FAULTS / "faults.yml").read_text())
AXES = {"data", "stage", "fsdp", "context", "expert", "tensor"}
REQUIRED, OPTIONAL = {"fault", "check", "model", "mesh", "where"}, {"source", "note", "unnamed", "missed", "clean"}
MOST_LINES = 8  # that a diff adds and removes


def hunks(diff):
    """Yields the file of each hunk of a unified diff, its lines before and after, and the number of changed ones."""
    for part in re.split(r"^diff --git .*\n", diff, flags=re.MULTILINE)[1:]:
        file = re.search(r"^\+\+\+ b/(.*)$", part, re.MULTILINE)[1]
        for hunk in re.split(r"^@@ .* @@.*\n", part, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+")
            yield file, before, after, sum(line[0] != " " for line in lines)


def test_every_entry_has_a_diff():
    assert {path.stem for path in FAULTS.glob("*.diff")} == TABLE.keys()
    assert {path.name for path in FAULTS.iterdir() if path.suffix != ".diff"} == {"faults.yml"}


@pytest.mark.parametrize("name", TABLE)
def test_entry(name):
    entry = TABLE[name]
    assert entry.keys() - OPTIONAL == REQUIRED
    assert all(entry[key] for key in REQUIRED - {"model"})
    assert set(entry["check"]) <= set("abcdefghijklm")
    keys = [assignment.partition("=")[0].partition(".")[0] for assignment in shlex.split(entry["model"])]
    assert not [key for key in keys if key not in KEYS]
    axes = [] if entry["mesh"] == "none" else entry["mesh"].split(",")
    assert {axis.partition("=")[0] for axis in axes} <= AXES
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", entry.get("source", "owner/repo#1"))


@pytest.mark.parametrize("name", TABLE)
def test_diff_applies_and_changes_the_program(name):
    sources, changed = {}, 0
    for file, before, after, lines in hunks((FAULTS / f"{name}.diff").read_text()):
        assert file.startswith("src/")
        text = sources.setdefault(file, (ROOT / file).read_text())
        assert text.count(before) == 1, f"{file} has changed: make {name}.diff again"
        sources[file], changed = text.replace(before, after), changed + lines
    assert 1 <= changed <= MOST_LINES
    for file, text in sources.items():
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / file).read_text()))


def test_every_check_is_needed():
    assert {entry["check"][0] for entry in TABLE.values()} == set("abcdefghijklm")
