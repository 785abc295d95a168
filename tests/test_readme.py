"""The commands and links of README.md and the pages under docs/ are ones that work."""

import importlib
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest

from end_to_end.documented import ELSEWHERE, PAGES, commands_of, files_of, write_other_forms
from src.config.schema import KEYS
from src.config.usage import help_for
from src.extras.datasets import inspect_data
from src.extras.hf import convert, hub
from src.extras.hf.convert import Agreement
from src.model.attention_kernels import choose, cudnn_limits
from src.model.flops import count_active_params, count_params
from src.model.parts import attention_scores
from src.parallel.mesh import make_layout
from src.run import resolve_config
from tests.hf import saved
from tests.runs import BASE, ROOT
from tests.tiny import spec_of

DATA = ROOT / "docs" / "data.md"
PROGRAMS = (
    *("src.train", "src.train_dpo", "src.train_compile", "src.train_tokenizer", "src.evaluate", "src.decode"),
    *("src.inspect_data", "src.tokenize_dataset"),
)
MODELS = ROOT / "docs" / "models" / "README.md"


# Those of forking.md are understood where its diffs are applied: tests/test_forking.py.
COMMANDS = [(page.name, command.words) for page in PAGES if page.stem != "forking" for command in commands_of(page)]


def started(*programs):
    """The arguments that the pages give these programs."""
    return [
        words[words.index("-m") + 2 :]
        for _, words in COMMANDS
        if "-m" in words and words[words.index("-m") + 1] in programs
    ]


def test_a_reason_not_to_run_a_command_is_of_one_that_is_there():
    """end_to_end/docs.sh runs the others; a reason that outlived its commands would hide new ones."""
    commands = [command for page in PAGES for command in commands_of(page)]
    assert {command.elsewhere for command in commands} == {None, *ELSEWHERE.values()}
    assert sum(command.elsewhere is None for command in commands) > 100


def place(link, target):
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory):
    """A folder like the repository's root, and home, with the models, runs and files that the pages name."""
    root = tmp_path_factory.mktemp("root")
    (root / "configs").symlink_to(ROOT / "configs")
    tiny = saved.save(root / "tiny", "llama")
    words = " ".join(word for _, words in COMMANDS for word in words)
    for folder in set(re.findall(r"\bhf/[\w.-]+|~/[\w.-]+|\bruns/first/hf-800", words)):
        place(root / folder.removeprefix("~/"), tiny)
    for run in set(re.findall(r"\bruns/[\w-]+", words)):
        place(root / run / "config.yml", ROOT / "configs" / "base.yml")
    for name, content in files_of(DATA).items():
        (root / name).write_text(content)
    return root


def test_the_readme_begins_with_three_commands():
    """What sets up and trains, what asks the model, and what sets up and tests, on the first screen."""
    readme = [words for page, words in COMMANDS if page == "README.md"]
    assert readme[:5] == [
        ["bash", "setup.sh"],
        [".venv/bin/python", "-m", "src.train", "configs/quickstart.yml", "run_name=first"],
        [".venv/bin/python", "-m", "src.decode", "runs/first", "prompt=import "],
        ["bash", "setup.sh", "dev", "aot", "data", "eval"],
        [".venv/bin/python", "-m", "pytest", "-n", "2", "--dist", "loadfile"],
    ]
    assert "-m pytest" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])


@pytest.mark.parametrize("argv", started(*PROGRAMS), ids=" ".join)
def test_a_command_is_understood(argv, anywhere, monkeypatch):
    monkeypatch.chdir(anywhere)
    monkeypatch.setenv("HOME", str(anywhere))
    monkeypatch.setattr(hub, "_fetched", lambda path, weights: str(anywhere / "tiny"))
    if help_for(argv) is None:
        resolve_config.load(argv, uses_weights="load_ema=true" in argv)  # of src.evaluate and src.decode


@pytest.fixture(scope="module")
def my_data(anywhere):
    """What the page on data makes or expects beside its own files; returns how many documents there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(anywhere)
        runpy.run_path("my_docstrings.py")
    return write_other_forms(anywhere)


@pytest.mark.parametrize(
    "argv",
    [argv for argv in started("src.inspect_data") if {"dataset_path=my_data/", "dataset_type=custom"} & {*argv}],
    ids=" ".join,
)
def test_the_sources_on_the_page_of_data_work(argv, anywhere, my_data, monkeypatch, capsys):
    monkeypatch.chdir(anywhere)
    monkeypatch.syspath_prepend(anywhere)
    monkeypatch.setattr(inspect_data, "_MEASURED_SECONDS", 0.1)  # of two, in which batches are made
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)  # of the same name, in another test's folder
    inspect_data.main([*argv, "eval_interval=-1"])
    shown = capsys.readouterr().out
    assert f" {my_data:,} documents" in shown
    assert re.search(r"(\d+) of \1 documents decode to text that encodes to the same ids", shown)


@pytest.mark.parametrize("argv", started("src.convert"), ids=" ".join)
def test_a_conversion_is_understood(argv, monkeypatch):
    called = []
    monkeypatch.setattr(hub, "_fetched", lambda path, weights: "tiny")
    for name in ("from_hf", "to_hf", "to_peft"):
        monkeypatch.setattr(convert, name, lambda *arguments: called.append(arguments))
    monkeypatch.setattr(convert, "compare", lambda *folders: called.append(folders) or Agreement(0, 0, 0, 1))
    convert.main(argv)
    assert len(called) == 1


@pytest.mark.parametrize("argv", started("end_to_end.tiny_model"), ids=" ".join)
def test_a_tiny_models_family_is_there(argv):
    assert argv[0] == "make"
    assert argv[1] in saved.CONFIGS


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_what_a_command_starts_is_there(page, words):
    for word in words:
        if re.fullmatch(r"[\w/]+\.(sh|py|yml)", word) and not word.startswith(("my", "runs/")):
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "end_to_end").glob("*.sh")))
def test_end_to_end_scripts_are_valid_shell(script):
    subprocess.run(["bash", "-n", ROOT / "end_to_end" / script], check=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_answer_help(program, capsys):
    assert importlib.import_module(program).main(["--help"]) is None
    shown = capsys.readouterr().out
    assert f"python -m {program} CONFIG" in shown.partition("\n\n")[2].partition("\n\n")[0]
    assert "vocab_size" in shown


def test_a_programs_help_ends_well():
    shown = subprocess.run([sys.executable, "-m", "src.train", "--help"], cwd=ROOT, capture_output=True, check=True)
    assert b"vocab_size" in shown.stdout


def test_the_small_model_is_as_small_as_the_readme_says():
    said = re.search(r"small\.yml.* ([\d.]+) million parameters", (ROOT / "README.md").read_text())
    count = count_params(spec_of(resolve_config.load([str(ROOT / "configs" / "small.yml")])))
    assert f"{count / 1e6:.1f}" == said[1]


RULES = ROOT / "AGENTS.md"
FOR_EDITORS = (RULES, ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "README.md")


@pytest.mark.parametrize("page", [*PAGES, *FOR_EDITORS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_rules_names_files_that_are_there():
    words = [word for span in re.findall(r"`([^`]+)`", RULES.read_text()) for word in span.split()]
    paths = [word for word in words if re.fullmatch(r"(src|tests|configs|docs|scripts|end_to_end)/[\w/.]*", word)]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    letters = re.search(r"^B batch, .* L layers", (ROOT / "docs" / "architecture.md").read_text(), re.M | re.S)[0]
    assert " ".join(letters.split()) in " ".join(RULES.read_text().split())


def test_what_the_promises_name_is_there():
    """Each row of docs/promises.md says by what it is shown, or why not; files, modules, tests and keys exist."""
    lines = (ROOT / "docs" / "promises.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| (?!---)", line) and "| here |" not in line]
    assert len(rows) > 130
    for _, shown in rows:
        assert re.search(r"`|\]\(|^No: |^not yet", shown), shown
        for words in (span.split() for span in re.findall(r"`([^`]+)`", shown)):
            for before, word in zip(["", *words], words, strict=False):
                path, _, test = word.partition("::")
                if before == "-m" and words[0] != "pytest":  # whose -m is a mark
                    assert find_spec(word), word
                elif re.fullmatch(r"(src|tests|configs|scripts|end_to_end)/[\w/.-]*", path):
                    assert (ROOT / path).exists(), path
                    assert not test or f"def {test}(" in (ROOT / path).read_text(), word
                elif key := re.match(r"([a-z][a-z0-9_]+)(\.\w+)?=", word):
                    assert key[1] in KEYS, word


def test_others_beside_it_have_the_measured_ratios():
    """The figures of docs/scope.md and the README are those of docs/performance.md's tables."""
    measured = (ROOT / "docs" / "performance.md").read_text()
    of_gpt, of_50m = (
        re.search(rf"^\| {row}, .* ([\d.]+) \|$", measured, re.MULTILINE)[1] for row in ("nanoGPT's setting", "50M")
    )
    of_gpt2, of_1b = (
        re.search(rf"^  \| {row}.* \| \**([\d.]+)\** \| [^|]* \|$", measured, re.MULTILINE)[1]
        for row in ("GPT-2 of 124M", "base.yml's 1.1B")
    )
    speed, mfu = re.search(r"^\| bfloat16: 8 rows, .* \| ([\d,]+) \| \*\*([\d.]+%)", measured, re.MULTILINE).groups()
    scope, readme = (" ".join((ROOT / page).read_text().split()) for page in ("docs/scope.md", "README.md"))
    assert f"GPT-2 124M on an H100 {of_gpt2}, its CPU setting {of_gpt}" in scope
    assert f"1.1B on an H100, compiled, {of_1b}; 50M on a CPU, transformers', {of_50m}" in scope
    assert f"train at {round(int(speed.replace(',', '')), -3):,} tokens per second, an MFU of {mfu}" in readme
    assert (
        f"a step takes {of_1b} times as long as the same model in compiled PyTorch; GPT-2's takes {of_gpt2}" in readme
    )


def test_the_table_of_models_has_each_file_and_its_numbers():
    rows = re.findall(
        r"^\| `([\w.-]+)` \| ([\d,]+) \| ([\d,]+|all) \| ([\d,.]+) GB \|", MODELS.read_text(), re.MULTILINE
    )
    files = {path.stem for path in (ROOT / "configs" / "models").glob("*.yml")}
    assert len(rows) == len(set(rows))
    expected = set()
    for name in files:
        spec = spec_of(resolve_config.load([BASE, f"model_name={name}"]))
        count = count_params(spec)
        sparse = spec.has_experts
        active = f"{count_active_params(spec):,}" if sparse else "all"
        expected.add((name, f"{count:,}", active, f"{2 * count / 1e9:,.1f}"))
    lacks, has = sorted(expected - set(rows)), sorted(set(rows) - expected)
    assert not lacks + has, f"docs/models/README.md lacks the rows {lacks}, and has {has}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == MODELS.parent and page != MODELS], ids=lambda page: page.stem
)
def test_a_familys_page_has_the_rows_of_that_table(page):
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert rows
    assert set(rows) <= set(MODELS.read_text().splitlines())


# The model files of each row of the table of attention kernels.
OF_KERNELS = {
    "Llama 2 to 4": "llama|mi[sx]tral|qwen2.5|qwen3-(?!next)|olmo|phi|glm|granite|smollm|gpt3",
    "Gemma 1 and 3": "gemma-|gemma3-(?!27b)|qwen3-next",
    "Gemma 3 27B": "gemma3-27b",
    "DeepSeek": "deepseek|kimi",
    "Gemma 2": "gemma2|gpt-oss|gemma4",
}
OF_DEVICES = [("tpu", 0.0), ("gpu", 9.0), ("gpu", 8.0), ("cpu", 0.0)]  # its columns: platforms, compute capabilities


def test_the_table_of_kernels_is_what_is_chosen(monkeypatch):
    table = re.search(r"\| family \| TPU .*\n\|[-|]+\n((?:\|.*\n)+)", MODELS.read_text())[1]
    rows = [[cell.strip("` ") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    files, seen = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml")), []
    for (start, pattern), (families, *kernels) in zip(OF_KERNELS.items(), rows, strict=True):
        assert families.startswith(start)
        for name in (name for name in files if re.match(pattern, name)):
            config = resolve_config.load([BASE, f"model_name={name}"])
            spec, layout = spec_of(config), make_layout(config.mesh, jax.devices()[:1])
            scores = attention_scores(spec)
            for (platform, capability), kernel in zip(OF_DEVICES, kernels, strict=True):
                monkeypatch.setattr(cudnn_limits, "compute_capability", lambda device, it=capability: it)
                chosen = choose.choose_kernel("autoselected", platform, scores, "bfloat16", 8192, layout)
                assert chosen.name == kernel, (name, platform, capability)
            seen.append(name)
    assert sorted(seen) == files


def test_what_adding_a_family_quotes_is_in_the_code():
    code = "\n".join(
        (ROOT / file).read_text()
        for file in (
            "src/extras/hf/families/qwen3.py",
            "src/extras/hf/tensors.py",
            "tests/hf/saved.py",
            "configs/models/qwen3-0.6b.yml",
        )
    )
    quoted = re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / "docs" / "adding_a_family.md").read_text(), re.DOTALL)
    assert len(quoted) == 4
    for block in quoted:
        assert block in code


# Of their figures some are of time, memory or loss, which another Python or JAX changes.
PAGES_OF_FIGURES = (
    *("README.md", "docs/performance.md", "docs/results/README.md", "docs/aot.md", "docs/recipes.md"),
    *("docs/forking.md", "docs/dpo.md", "docs/quantization.md", "docs/parallelism.md"),
)


@pytest.mark.parametrize("page", PAGES_OF_FIGURES)
def test_a_page_of_figures_says_which_python_and_jax_made_them(page):
    words = " ".join((ROOT / page).read_text().split())
    assert re.search(r"Python (is )?3\.\d+(,| and) JAX 0\.\d+\.\d+", words)
