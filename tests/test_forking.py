"""The edits of docs/forking.md: each applies to a copy of the checkout, and passes its own tests there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "forking.md").read_text()
EDITS = sorted(path.stem for path in (ROOT / "docs" / "forking").glob("*.diff"))
# Of git's own, such as a hook's, which would make it apply the diff to another folder.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


class File(NamedTuple):
    """What a diff does to a file: its head, and its hunks, each of whole lines."""

    name: str
    head: str
    hunks: list[str]

    @property
    def is_new(self):
        return "\nnew file mode" in self.head

    @property
    def is_test(self):
        return self.name.startswith("tests/")

    def lines(self, sign="+"):
        return sum(line.startswith(sign) for hunk in self.hunks for line in hunk.splitlines())


def files_of(edit):
    """The files of an edit's diff, in its order."""
    text = (ROOT / "docs" / "forking" / f"{edit}.diff").read_text()
    files = []
    for part in re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^(?=@@ )", part, flags=re.MULTILINE)
        files.append(File(re.match(r"diff --git a/(\S+) b/\1\n", head)[1], head, hunks))
    return files


def copied(folder):
    """A copy of the checkout's code in a new folder, which is no repository and lies in none."""
    for name in ("src", "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    return folder


def apply(text, folder, *options):
    """git's complaints, empty where the diff `text` applies; git takes no line for one that only resembles it."""
    environment = {**ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, "-"]
    return subprocess.run(
        command, input=text, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, check=False
    ).stderr


def check(files, folder):
    """Runs the tests of an edit in the folder it was applied to."""
    tests = [file.name for file in files if file.is_test and file.is_new]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("edit", EDITS)
def test_it_applies_and_passes_its_check(edit, tmp_path):
    files, folder = files_of(edit), copied(tmp_path / "copy")
    before = {file.name: (folder / file.name).exists() for file in files}
    assert before == {file.name: not file.is_new for file in files}
    complaints = apply((ROOT / "docs" / "forking" / f"{edit}.diff").read_text(), folder)
    assert not complaints, (
        f'docs/forking/{edit}.diff no longer applies:\n{complaints}docs/forking.md, "Keeping the diffs", has the '
        "commands that bring it up to date"
    )
    ended = check(files, folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"^(\d+) passed", ended.stdout, re.MULTILINE)
    assert section(edit).count(f"`{found[1]} passed") == 1, found[0]


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_each_hunk_is_needed(edit, tmp_path):
    """Without any one of the hunks that an edit makes in our files, its check fails."""
    files, folder = files_of(edit), copied(tmp_path / "copy")
    for left_out in [(file.name, number) for file in files if not file.is_new for number in range(len(file.hunks))]:
        kept = [
            (file.head, [hunk for number, hunk in enumerate(file.hunks) if (file.name, number) != left_out])
            for file in files
        ]
        text = "".join(head + "".join(hunks) for head, hunks in kept if hunks)
        assert not apply(text, folder)
        assert check(files, folder).returncode == 1, f"{edit}: nobody misses hunk {left_out[1]} of {left_out[0]}"
        assert not apply(text, folder, "--reverse")


# ---- What the page says of them


def section(edit):
    """The part of the page that is about an edit."""
    (found,) = [part for part in PAGE.split("\n## ") if f"git apply docs/forking/{edit}.diff" in part]
    return found


def rows(text):
    """The cells of a table's rows, without its head."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in found if not set(cells[0]) <= set("-:") and cells[0] not in ("file", "edit")]


def test_the_page_counts_files_and_lines():
    table = {re.search(r"forking/(\w+)\.diff", cells[0])[1]: cells[1:5] for cells in rows(PAGE.split("\n## ")[0])}
    assert list(table) == re.findall(r"git apply docs/forking/(\w+)\.diff", PAGE.partition("## Keeping")[0])
    assert sorted(table) == EDITS
    for edit, found in table.items():
        files = files_of(edit)
        ours = [file for file in files if not file.is_new]
        own = [file for file in files if file.is_new and not file.is_test]
        counts = [len(ours), sum(map(File.lines, ours)), sum(map(File.lines, own))]
        counts.append(sum(file.lines() for file in files if file.is_new and file.is_test))
        assert found == [str(count) for count in counts], edit


@pytest.mark.parametrize("edit", EDITS)
def test_a_section_has_the_reason_of_each_change(edit):
    said = [(re.sub("[`]", "", name), lines) for name, lines, _ in rows(section(edit))]
    assert said == [
        (file.name, f"+{file.lines()}" + f" -{file.lines('-')}" * (file.lines("-") > 0)) for file in files_of(edit)
    ]
