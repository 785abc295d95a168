"""What a run of training needs: what it imports, and that `src/extras/` and each part of it can be deleted."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize

import pytest

from tests import quick_compilation
from tests.runs import ROOT

MAX_TOKENS = 90_000  # of the project, imported at the end of a run of the quickstart
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"}
SHORT = ("configs/quickstart.yml", "steps=4", "eval_interval=2", "eval_steps=1", "checkpoint_period=2", "run_name=run")
EXTRAS = sorted({path.stem for path in (ROOT / "src" / "extras").iterdir() if not path.name.startswith("__")})


def tokens(path):
    """Counts Python's tokens in a file, without comments, docstrings and what lays it out."""
    text = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings.add(first.lineno)
    counted = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        is_docstring = name == "STRING" and token.start[0] in docstrings
        depth -= name == "FSTRING_END"  # from Python 3.12 on an f-string is several tokens; here it is one
        counted += name not in LAYOUT and not is_docstring and not depth and name != "FSTRING_START"
        depth += name == "FSTRING_START"
    return counted


def train(folder, *keys, root=ROOT, then=""):
    """The output of a short run of the quickstart's model in `folder`, in a process of its own."""
    argv = ["src.train", *SHORT, f"base_output_directory={folder}", *keys]
    program = f"import sys; sys.argv = {argv}; from src.train import main; main(sys.argv[1:]); {then}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """A copy of the code, with its bytecode, which a file that is deleted does not outlive: no .pyc stands for it."""
    shutil.copytree(ROOT / "src", tmp_path / "code" / "src")
    shutil.copytree(ROOT / "configs", tmp_path / "code" / "configs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "code")
    return tmp_path / "code"


def test_a_run_imports_little_of_the_project(tmp_path):
    files = "[m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'src' and m.__file__]"
    output = train(tmp_path, then=f"print('FILES', *{files})")
    loaded = {path for path in output.partition("FILES ")[2].split() if path.endswith(".py")}
    counts = {str(path): tokens(ROOT / path) for path in loaded}
    assert len(counts) > 80
    assert sum(counts.values()) <= MAX_TOKENS, sorted(counts.items(), key=lambda each: -each[1])[:20]


@pytest.mark.long
def test_without_extras_a_run_trains_evaluates_saves_and_resumes(tmp_path, checkout):
    shutil.rmtree(checkout / "src" / "extras")
    said = train(tmp_path, "steps=2", "learning_rate_schedule_steps=4", root=checkout)
    assert "step 2/2  eval" in said
    assert "no sample is generated: src/extras/generation is missing" in said
    again = train(tmp_path, root=checkout)
    assert "step 4/4  eval" in again
    assert "step 2/4" not in again
    whole = train(tmp_path / "whole")
    losses = [re.findall(r"step 4/4  (?:loss|eval) +([\d.]+)", text) for text in (again, whole)]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


COMMANDS = {
    "aot": ["train_compile", "configs/base.yml", "compile_topology=v5e-4"],
    "hf": ["convert", "from-hf", "a", "b"],
    "generation": ["decode", "runs/a"],
    "evaluation": ["evaluate", "runs/a"],
    "preferences": ["train_dpo", "configs/base.yml"],
    "pages": ["report", "runs/a"],
    "datasets": ["inspect_data", "configs/base.yml"],
    "verify": ["verify", "configs/base.yml"],
    "plan": ["plan", "configs/base.yml", "compile_topology=cpu-8"],
    "trackers": ["train", "configs/quickstart.yml", "report_to=[wandb]"],
    "readers": ["train", "configs/base.yml", "dataset_type=parquet", "dataset_path=a.parquet"],
    "stack_traces": ["train", "configs/quickstart.yml", "collect_stack_trace=true"],
    "weights_by_rules": ["train", *SHORT, "load_weights_rules=[{match: .*, path: a}]"],
    "conversations": ["train", *SHORT, "use_sft=true", "dataset_path=a.jsonl"],  # after it has traced a small step
}


QUICK = ("conversations", "generation", "trackers")  # a command, a key and a format


@pytest.mark.parametrize(
    "extra", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in sorted(COMMANDS)]
)
def test_what_needs_a_deleted_extra_says_so_in_a_sentence(extra, checkout):
    path = checkout / "src" / "extras" / extra
    shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    command, *arguments = COMMANDS[extra]
    words = [sys.executable, "-m", f"src.{command}", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, cwd=checkout, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stdout + done.stderr
    assert f"this needs src/extras/{extra}" in done.stderr


LARGE = """
import sys
from src.extras.aot import report, train_compile

parts = {"needed": 20 * 2**30, "capacity": 15 * 2**30, "left": -5 * 2**30, "fits": False}
make_report = report.make_report
report.make_report = lambda *a: (found := make_report(*a)) | {"memory": found["memory"] | parts}
sys.exit(train_compile.command(sys.argv[1:]))
"""  # on CPUs, whose memory has no limit


def test_without_the_planner_a_step_that_does_not_fit_is_still_an_answer(checkout, tmp_path):
    shutil.rmtree(checkout / "src" / "extras" / "plan")
    written = tmp_path / "report.json"
    words = ["configs/quickstart.yml", "compile_topology=cpu-2", f"compile_report={written}"]
    environment = {**os.environ, **quick_compilation.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", LARGE, *words],
        env=environment,
        capture_output=True,
        text=True,
        cwd=checkout,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "does not fit: 20.00 GiB of 15.00 GiB per device" in done.stdout
    assert "no changes that would help are sought: src/extras/plan is missing" in done.stdout
    assert json.loads(written.read_text())["memory"]["fits"] is False


def test_without_hints_an_unknown_key_is_still_refused(checkout):
    (checkout / "src" / "extras" / "migration_hints.py").unlink()
    words = [sys.executable, "-m", "src.train", "configs/base.yml", "stepz=3"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=checkout, check=False)
    assert done.returncode == 2
    assert "unknown key stepz" in done.stderr
    assert "Did you mean steps?" in done.stderr


def test_the_page_lists_each_extra_and_what_it_needs():
    """The needs by the imports at the top of its files: within functions an extra may use others."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition("### Extras and what they need")[2]
    rows = dict(re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \| .* \| ([^|]*) \|$", page, re.MULTILINE))
    assert sorted(rows) == EXTRAS
    for extra, needs in rows.items():
        path = ROOT / "src" / "extras" / extra
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        found = {
            name
            for file in files
            for name in re.findall(r"^(?:from|import) src\.extras\.(\w+)", file.read_text(), re.M)
        }
        assert found - {extra} <= set(re.findall(r"\w+", needs)), extra
