"""Runs the commands of README.md and docs/ as they stand there: `python -m end_to_end.documented [PAGE ...]`.

A page's commands run one after the other in a folder of their own, beside links to this repository's (copies, where the
page applies diffs to them). A run takes six steps at most, and a folder of a published model is a tiny random one of
its family: else nothing is changed. ELSEWHERE says what is not run, and what has it instead. The exit code is 1 if a
command failed.
"""

import dataclasses
import glob
import gzip
import json
import os
import re
import shlex
import shutil
import sqlite3
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "end_to_end" / "README.md"]
STEPS = 6
ELSEWHERE = {  # the first expression that a command has says why it is not run
    r"setup\.sh|-m pytest|bin/ruff": "installs, or is the tests: what .ci/run does",
    r"NAME\.diff|^git (?!apply \S+$)|^mv ": "for a diff of one's own: tests/test_forking.py applies and undoes each",
    r"^bash end_to_end/": "a script beside this one",
    r"^\w+\.\w+=": "a key, not a command",
    r"^(pip|mintext) ": "tests/test_package.py installs and starts the package",
    r"hf download|hf://": "needs huggingface.co: tests/test_hub.py has a server in its place",
    r"evidence/results": "hours, by the commit that each result names: tests/test_results.py has its settings",
    r"report_to=": "trackers.sh",
    r" tasks=": "evaluation.sh",
    "maxtext|my_program|my_versions": "needs an environment of MaxText's, and Python 3.12",
    r"vllm|^curl ": "needs vLLM and a GPU: vllm_config.sh has what can be had without",
    r"coordinator_address=": "needs two hosts: tests/test_multiprocess.py has two processes",
    r"^scripts/(?!.*--dry-run)": "needs a cluster: tests/test_launch.py has stand-ins for its commands",
    r"on_gpu\.sh(?!.*platform cpu)|bench\.py|pgle|quantization=": "needs a GPU or TPU",
    r"^\.venv\S+ -m src\.train configs/(recipes/|base\.yml (?!.*=(hf|runs)/))": "a billion parameters and more",
    r"-m src\.plan": "minutes of compiling: tests/plan searches for a tiny model",
    r"bench_context": "an hour of the TPU's compiler, for figures that docs/performance.md has",
    r"program_memory\.py dump": "reads what XLA_FLAGS made another command write: tests/aot has such folders",
}
BEFORE = {  # what a command takes for granted, and an earlier one of its page makes possible
    "convert_format": ["my_tfds/bin/python", "end_to_end/c4_stand_in.py", "my_data", "tensorflow_datasets"]
}
FAMILIES = {"Llama-2": "llama", "Llama-4": "llama4", "gemma-3": "gemma3", "Mistral": "mistral"}
FAMILIES |= {"DeepSeek-V2-Lite": "deepseek_v2_lite"}


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page's bash blocks: its words without comments, and the variables that it sets for itself."""

    words: list[str]
    environment: dict[str, str]

    @property
    def elsewhere(self) -> str | None:
        """Returns why the command is not run here; None: it is."""
        line = " ".join(self.words)
        return next((reason for expression, reason in ELSEWHERE.items() if re.search(expression, line)), None)


def commands_of(page: Path) -> Iterator[Command]:
    """Yields the commands of a page's bash blocks; a line's end after a backslash does not end one."""
    variables: dict[str, str] = {}
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(string.Template(command).safe_substitute(variables), comments=True)
                assigned = {}
                while words and (found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
                    assigned[found[1]] = found[2]
                    del words[0]
                if words:
                    yield Command(words, assigned)
                else:
                    variables |= assigned


def files_of(page: Path) -> dict[str, str]:
    """Returns the files that a page shows whole, by their names: blocks that begin with the name in a comment."""
    blocks = re.findall(r"```(?:python|yaml)\n(# (my_\w+\.\w+)\n.*?)```", page.read_text(), re.DOTALL)
    return {name: block for block, name in blocks}


def write_other_forms(folder: Path) -> int:
    """Writes the documents of FOLDER/my_data as docs/data.md expects them elsewhere; returns how many there are."""
    lines = [line for file in sorted((folder / "my_data").iterdir()) for line in file.read_text().splitlines()]
    with sqlite3.connect(folder / "my_train.db") as database:
        database.execute("CREATE TABLE pages(id INTEGER PRIMARY KEY, text TEXT NOT NULL)")
        database.executemany("INSERT INTO pages(text) VALUES (?)", [(json.loads(line)["text"],) for line in lines])
    (folder / "my_gzip_files").mkdir()
    file = folder / "my_gzip_files" / "c4-train.00000-of-00001.json.gz"
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return len(lines)


def main(argv: list[str]) -> None:
    """Runs the pages that are named, or all."""
    failed = 0
    for page in [Path(name).resolve() for name in argv] or PAGES:
        commands = list(commands_of(page))
        print(f"---- {page.relative_to(ROOT)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if any(command.elsewhere is None for command in commands):
                _prepare(Path(folder), page, commands)
            failed += sum(not _runs(command, Path(folder)) for command in commands)
    sys.exit(f"{failed} commands failed" if failed else 0)


def _runs(command: Command, folder: Path) -> bool:
    line = shlex.join(command.words)
    if command.elsewhere:
        print(f"not run: {command.elsewhere}: {line}", flush=True)
        return True
    for word, words in BEFORE.items():
        if word in command.words:
            _needed(folder, words)
    start = time.monotonic()
    done = _run(folder, _shortened(command.words), command.environment)
    print(f"{'ok' if done.returncode == 0 else 'FAILED'}, {time.monotonic() - start:.0f} s: {line}", flush=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-20:]), flush=True)
    return done.returncode == 0


def _run(folder: Path, words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HOME": str(folder), **variables}
    environment["GIT_CEILING_DIRECTORIES"] = str(folder.parent)  # a repository there is none of the page's
    words = [sys.executable if word in (".venv/bin/python", "python") else word for word in words]
    words = [each for word in words for each in ("*" in word and sorted(glob.glob(word, root_dir=folder))) or [word]]
    return subprocess.run(
        [word.replace("gs://bucket", str(folder)).replace("$PWD", str(folder)) for word in words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _shortened(words: list[str]) -> list[str]:
    if "src.evaluate" in words and "configs/base.yml" in words:  # whose batches are an accelerator's
        return [*words, "per_device_batch_size=1", "eval_steps=1"]
    if not {"src.train", "src.train_dpo"} & {*words} or "--help" in words:
        return words
    kept = [word for word in words if not word.startswith("steps=")]
    return [*kept, f"steps={STEPS}"]


def _prepare(folder: Path, page: Path, commands: list[Command]) -> None:
    """Writes what the page takes for granted: data, models, and runs that no command of it made."""
    applies = any(command.words[:2] == ["git", "apply"] for command in commands)
    for name in ("README.md", "pyproject.toml", "configs", "docs", "end_to_end", "scripts", "src", "tests"):
        copies = applies and name in ("configs", "docs", "src", "tests")
        shutil.copytree(ROOT / name, folder / name) if copies else (folder / name).symlink_to(ROOT / name)
    for name, content in files_of(page).items():
        (folder / name).write_text(content)
    if (folder / "my_docstrings.py").exists():
        _needed(folder, ["python", "my_docstrings.py"])
        write_other_forms(folder)
        shutil.rmtree(folder / "my_data")  # the page's first command makes it
    (folder / "my_text").mkdir()
    for number, source in enumerate(sorted((ROOT / "docs").glob("*.md"))):
        (folder / "my_text" / f"{number}.txt").write_text(source.read_text())
    (folder / "my_texts.txt").write_text("def main():\nimport numpy\n")
    _write_rows(folder / "my_chats.jsonl", [{"prompt": f"{a} + {a} =", "completion": f" {2 * a}"} for a in range(999)])
    _write_rows(folder / "my_test.jsonl", [{"prompt": f"{a} + 1 =", "completion": f" {a + 1}"} for a in range(9)])
    pairs = [{"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a}"} for a in range(99)]
    _write_rows(folder / "my_pairs.jsonl", pairs)
    np.save(folder / "my_ids.npy", np.arange(64, dtype=np.int32).reshape(2, 32))
    words = [word for command in commands if command.elsewhere is None for word in command.words]
    made = {words[i + 2] for i, word in enumerate(words) if word in ("to-hf", "from-hf", "make")}
    runs = {found[1] for word in words if (found := re.fullmatch(r"run_name=(.*)", word))}
    for model in sorted(set(re.findall(r"(?:hf|~)/[\w.-]+", " ".join(words))) - made):
        family = next((family for name, family in FAMILIES.items() if name in model), "llama3")
        _needed(folder, ["python", "-m", "end_to_end.tiny_model", "make", family, model.replace("~", str(folder))])
    for run in sorted(set(re.findall(r"runs/([\w-]+)", " ".join(words))) - runs):
        keys = ["ema_decay=0.9", f"run_name={run}", f"steps={STEPS}"]
        _needed(folder, ["python", "-m", "src.train", "configs/quickstart.yml", *keys])


def _needed(folder: Path, words: list[str]) -> None:
    done = _run(folder, words, {})
    if done.returncode:
        sys.exit(f"{shlex.join(words)}\n{done.stdout}")


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
