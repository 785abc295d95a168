"""The commands and links of README.md and the pages under docs/ are ones that work."""

import re
import shlex
import subprocess
import sys

import pytest

from src import config as configuration
from tests.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("src.train", "src.train_tokenizer")


def commands_of(page):
    """The commands of a page's bash blocks, each a list of words; a line's end after a backslash does not end one."""
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(command, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    del words[0]
                if words:
                    yield words


COMMANDS = [(page.name, words) for page in PAGES for words in commands_of(page)]
RUNS = [(page, words) for page, words in COMMANDS if "-m" in words and words[words.index("-m") + 1] in PROGRAMS]


def test_the_readme_begins_with_the_two_commands():
    """What sets up and trains, and what sets up and tests, on the first screen."""
    readme = [words for page, words in COMMANDS if page == "README.md"]
    assert readme[:4] == [
        ["bash", "setup.sh"],
        [".venv/bin/python", "-m", "src.train", "configs/quickstart.yml"],
        ["bash", "setup.sh", "dev"],
        [".venv/bin/python", "-m", "pytest"],
    ]
    assert "-m pytest" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])


@pytest.mark.parametrize(("page", "words"), RUNS, ids=[" ".join(words) for _, words in RUNS])
def test_a_command_is_understood(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = words[words.index("-m") + 2 :]
    if configuration.help_for(argv) is None:
        configuration.load(argv)
    else:
        assert "there is no key" not in configuration.help_for(argv)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_what_a_command_starts_is_there(page, words):
    for word in words:
        if re.fullmatch(r"[\w/]+\.(sh|py|yml)", word) and not word.startswith("my"):
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "end_to_end").glob("*.sh")))
def test_end_to_end_scripts_are_valid_shell(script):
    subprocess.run(["bash", "-n", ROOT / "end_to_end" / script], check=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_answer_help(program):
    shown = subprocess.run([sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "vocab_size" in shown.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
