"""The edits of docs/forking.md: each applies to a copy of the checkout, and passes its own tests there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
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

    def lines(self, sign="+"):
        return sum(line.startswith(sign) for hunk in self.hunks for line in hunk.splitlines())


def diff(edit):
    return (ROOT / "docs" / "forking" / f"{edit}.diff").read_text()


def files_of(edit):
    """The files of an edit's diff, in its order."""
    files = []
    for part in re.split(r"^(?=diff --git )", diff(edit), flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^(?=@@ )", part, flags=re.MULTILINE)
        files.append(File(re.match(r"diff --git a/(\S+) b/\1\n", head)[1], head, hunks))
    return files


def section(edit):
    """The part of the page that is about an edit."""
    (found,) = [part for part in PAGE.split("\n## ") if f"\ngit apply docs/forking/{edit}.diff\n" in part]
    return found


def commands(edit, module):
    """The arguments of the section's commands `.venv/bin/python -m module`, in order."""
    (block,) = re.findall(r"\n```bash\n(.*?)```", section(edit), re.DOTALL)
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    return [words[3:] for words in lines if words[:3] == [".venv/bin/python", "-m", module]]


# ---- In a copy


def copied(folder):
    """A copy of the checkout's code in a new folder, which is no repository and lies in none."""
    for name in ("src", "tests", "configs", "docs", "scripts", "end_to_end"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder)
    return folder


def apply(text, folder, *options):
    """git's complaints, empty where the diff `text` applies; git takes no line for one that only resembles it."""
    environment = {**ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, "-"]
    return subprocess.run(
        command, input=text, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, check=False
    ).stderr


def python(folder, *arguments):
    """Runs a module or a script in the copy."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # of which more spin where a core is not theirs
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def complaint(edit, folder):
    """What is wrong where the tests that the page names do not pass, as many as it says; else empty."""
    (arguments,) = commands(edit, "pytest")
    ended = python(folder, "-m", "pytest", "-p", "no:cacheprovider", *arguments)
    passed = re.findall(r"^(\d+ passed)", ended.stdout, re.MULTILINE)
    said = re.findall(r"The tests print `(\d+ passed)`", section(edit))
    return "" if ended.returncode == 0 and passed == said else f"{ended.stdout}{ended.stderr}expected {said}"


# A whole run, twice: test_it_applies_and_passes_its_tests has it.
TAKES_LONG = "tests/test_distillation.py::test_a_student_approaches_its_teacher_and_resumes_exactly"


def assert_passes(folder, *tests):
    ended = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--deselect={TAKES_LONG}", *tests)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"


@pytest.mark.long  # `test_all_apply_together` applies all of them and runs their tests
@pytest.mark.parametrize("edit", EDITS)
def test_it_applies_and_passes_its_tests(edit, tmp_path):
    files, folder = files_of(edit), copied(tmp_path / "copy")
    complaints = apply(diff(edit), folder)
    assert not complaints, (
        f'docs/forking/{edit}.diff no longer applies:\n{complaints}docs/forking.md, "Keeping the diffs", has the '
        "commands that bring it up to date"
    )
    assert all((folder / file.name).exists() and file.is_new != (ROOT / file.name).exists() for file in files)
    wrong = complaint(edit, folder)
    assert not wrong, wrong
    assert_passes(folder, "tests/test_structure.py")
    for argv in [*commands(edit, "src.train"), *commands(edit, "src.inspect_data")]:
        understood = python(folder, "-c", "import sys; from src.config.load import load; load(sys.argv[1:])", *argv)
        assert understood.returncode == 0, understood.stderr


@pytest.mark.parametrize("order", [EDITS, EDITS[::-1]], ids=["in their order", "backwards"])
def test_all_apply_together(order, tmp_path):
    folder = copied(tmp_path / "copy")
    assert not [complaints for edit in order if (complaints := apply(diff(edit), folder))]
    if order is EDITS:
        new = [file.name for edit in EDITS for file in files_of(edit) if file.is_new]
        assert_passes(folder, "tests/test_structure.py", *(name for name in new if name.startswith("tests/")))


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_each_hunk_is_needed(edit, tmp_path):
    """Without any one of the hunks that an edit makes in our files, its tests fail, or some of them are not there."""
    files, folder = files_of(edit), copied(tmp_path / "copy")
    changed = [file for file in files if not file.is_new]
    for left_out in [(file.name, number) for file in changed for number in range(len(file.hunks))]:
        kept = [
            (file.head, [hunk for number, hunk in enumerate(file.hunks) if (file.name, number) != left_out])
            for file in files
        ]
        text = "".join(head + "".join(hunks) for head, hunks in kept if hunks)
        assert not apply(text, folder)
        assert complaint(edit, folder), f"{edit}: hunk {left_out[1]} of {left_out[0]} is not missed"
        assert not apply(text, folder, "--reverse")


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_the_runs_come_to_the_losses_that_the_page_says(edit, tmp_path):
    folder = copied(tmp_path / "copy")
    assert not apply(diff(edit), folder)
    with tarfile.open(folder / "my_pages.tar", "w") as archive:
        for page in sorted((folder / "docs").glob("*.md")):
            archive.add(page, page.name)
    found = []
    for argv in commands(edit, "src.train"):
        ended = python(folder, "-m", "src.train", *argv)
        assert ended.returncode == 0, ended.stderr
        found += re.findall(r"^step 200/200  eval  ([\d.]+) ", ended.stdout, re.MULTILINE)
    # Other text, of another Python or of the pages as they are now, and other CPUs move them a little.
    said = re.findall(r"`eval\s+(\d+\.\d+)`|near\s+(\d+\.\d+)", section(edit))
    assert [float(one or other) for one, other in said] == pytest.approx(list(map(float, found)), abs=0.1)
    for argv in commands(edit, "src.convert"):
        ended = python(folder, "-m", "src.convert", *argv)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_run_made_with_a_diff_is_refused_without_it(tmp_path):
    folder = copied(tmp_path / "copy")
    assert not apply(diff("gated_attention"), folder)
    command = ["-m", "src.train", "configs/quickstart.yml", "run_name=gated", "max_target_length=64"]
    assert python(folder, *command, "steps=1", "attention_head_gate=true").returncode == 0
    assert not apply(diff("gated_attention"), folder, "--reverse")
    resumed, decoded = python(folder, *command, "steps=2"), python(folder, "-m", "src.decode", "runs/gated")
    assert [resumed.returncode, decoded.returncode] == [2, 2]
    assert "attention.head_gate: [4, 128, 2] in the checkpoint, absent in the configuration" in resumed.stderr
    (answer,) = re.findall(r"`(unknown key [^`]*)`", PAGE)
    assert answer in decoded.stderr


# ---- What the page says of them


def rows(text):
    """The cells of a table's rows, without its head."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in found if not set(cells[0]) <= set("-:") and cells[0] not in ("file", "edit")]


def test_the_page_counts_files_and_lines():
    table = {re.search(r"forking/(\w+)\.diff", cells[0])[1]: cells[1:5] for cells in rows(PAGE.split("\n## ")[0])}
    assert sorted(table) == EDITS
    for edit, found in table.items():
        ours, own, tests = [], [], []
        for file in files_of(edit):
            (tests if file.name.startswith("tests/") else own if file.is_new else ours).append(file.lines())
        assert found == [str(count) for count in (len(ours), sum(ours), sum(own), sum(tests))], edit


@pytest.mark.parametrize("edit", EDITS)
def test_a_section_has_the_reason_of_each_change(edit):
    said = [(name.strip("`"), lines) for name, lines, why in rows(section(edit)) if why]
    assert said == [
        (file.name, f"+{file.lines()}" + f" -{file.lines('-')}" * (file.lines("-") > 0)) for file in files_of(edit)
    ]
