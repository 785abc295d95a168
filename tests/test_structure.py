"""The house: which room of src/ may import which, and how much the core path is to read."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import core_tests
from tests.test_border import tokens

ROOT = Path(__file__).parents[1]
COMMANDS = {path.stem for path in (ROOT / "src").glob("[a-z]*.py")}
FOLDERS = sorted({path.parent.name for path in (ROOT / "src").glob("*/*.py")})
MAX_LEVELS = 10
MAX_LINES = 400
MAX_CORE_LINES = 4_300
MAX_CORE_TOKENS = 30_350  # about 30,000, and room for all edits of docs/forking.md together
MAX_FILES_OF_THE_WHOLE_CONFIG = 13


@functools.cache
def imports():
    """module -> the modules of src/ that it imports, at its top or within a function."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "src").rglob("*.py")}
    found = {}
    for module, path in files.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of_package = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= of_package & set(files) or {node.module}
        found[module] = names & set(files)
    return found


def room(module):
    """The folder of src/ a module is in, or the file at its top."""
    return module.split(".")[1]


@functools.cache
def rooms():
    """room -> the rooms it imports from; of the core without `extras`, which it imports within functions."""
    graph = {room(module): set() for module in imports() if module.count(".")}
    for module, others in imports().items():
        above = {"extras"} - {room(module)} if room(module) not in COMMANDS else set()
        graph[room(module)] |= {room(other) for other in others} - {room(module)} - above
    return graph


def level(name, above=()):
    """1 for a room that imports from none, else one more than the highest of those it imports from."""
    assert name not in above, f"a circle: {' -> '.join([*above, name])}"
    return 1 + max((level(other, (*above, name)) for other in sorted(rooms()[name])), default=0)


def test_rooms_lie_on_few_levels_and_form_no_circle():
    assert max(map(level, rooms())) <= MAX_LEVELS


def imported_at_once(path):
    """The modules that importing a file imports, but for those within functions."""
    pending, names = [ast.parse(path.read_text())], set()
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                pending.append(node)
    return names


def test_the_core_and_the_commands_import_extras_within_functions_alone():
    files = [path for path in (ROOT / "src").rglob("*.py") if "extras" not in path.parts]
    found = {path.name: names for path in files if (names := [x for x in imported_at_once(path) if "src.extras" in x])}
    assert len(files) > 80
    assert found == {}


def test_modules_form_no_circle():
    def visit(module, above=()):
        assert module not in above, f"a circle: {' -> '.join([*above, module])}"
        if module not in visited:
            for other in imports()[module]:
                if room(module) in ("extras", *COMMANDS) or room(other) != "extras":
                    visit(other, (*above, module))
            visited.add(module)

    visited = set()
    for module in imports():
        visit(module)


def test_the_config_knows_only_the_system():
    assert rooms()["config"] == {"system"}
    assert rooms()["system"] == set()


@pytest.mark.parametrize("name", [*FOLDERS, "__init__", "__main__"])
def test_what_is_built_upon_knows_no_command(name):
    assert not rooms()[name] & COMMANDS


def test_data_know_nothing_of_model_and_step():
    assert not rooms()["data"] & {"model", "step"}


def modules_of_model_with(found):
    """The modules of src/model whose syntax tree has a node for which `found` is true."""
    root = ROOT / "src" / "model"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        if any(found(node) for node in ast.walk(ast.parse(path.read_text())))
    }


def called(node):
    """The last name of what a call calls, such as einsum."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def test_weights_are_declared_in_one_way_and_multiplied_in_few_places():
    assert modules_of_model_with(lambda node: called(node) == "Param") == {"params"}
    assert modules_of_model_with(lambda node: called(node) == "Buffer") == {"moe.layer"}
    products = {"einsum", "matmul", "dot", "tensordot", "dot_general", "ragged_dot", "scaled_matmul"}
    doors = modules_of_model_with(
        lambda node: (
            (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in products)
            or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        )
    )
    kernels = {name for name in doors if name.startswith(("attention_kernels.", "moe.grouped_"))}
    # lora merges adapters into weights, which no step does.
    assert doors - kernels == {"matmul", "low_precision", "block_scaled", "lora"}, doors


def test_the_model_takes_sections_of_the_config():
    def takes_config(node):
        return isinstance(node, ast.ImportFrom) and "Config" in [alias.name for alias in node.names]

    assert modules_of_model_with(takes_config) == set()


def reached(program):
    """The modules that a program has imported at its end, in a new process."""
    script = f"import sys; {program}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
    )


def test_training_reaches_nothing_that_its_config_does_not_ask_for():
    modules = reached("import src.train")
    formats = ("src.extras.readers", "src.data.readers.synthetic")
    packages = (
        "torch",
        "transformers",
        "tensorflow",
        "tensorflow_datasets",
        "array_record",
        "pyarrow",
        "sentencepiece",
    )
    assert not [
        name for name in modules if name.startswith(("src.extras.aot", "src.extras.hf", *formats)) or name in packages
    ]


def test_a_config_is_read_without_jax():
    modules = reached("from src.config.load import load; load(['configs/base.yml'])")
    assert not [
        name for name in modules if name.startswith("src.") and not name.startswith(("src.config", "src.system"))
    ]
    assert "jax" not in modules


def test_no_file_is_long():
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert not {str(path): count for path, count in lines.items() if count > MAX_LINES}
    assert lines[ROOT / "src" / "extras" / "preferences" / "train_dpo.py"] < 250  # as docs/forking.md says


def test_scripts_import_what_is_there():
    for script in sorted((ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "src":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or f"{node.module}.{name}" in imports(), (script, name)


@functools.cache
def names_in(module):
    """The names at the top of a module of src/, and the modules in its folder if it is a package."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    pending, names = [ast.parse(path.read_text())], {"__name__", "__file__", "__spec__", "__doc__"}
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif not isinstance(node, ast.Lambda | ast.comprehension):
                pending.append(node)
    return names | {
        name.removeprefix(f"{module}.").partition(".")[0] for name in there() if name.startswith(f"{module}.")
    }


@functools.cache
def there():
    """The modules and packages of src/."""
    return {name.removesuffix(".__init__") for name in imports()}


def missing_names(tree):
    """What a test imports, reads or replaces in modules of src/ that they do not have."""
    nodes, modules, used = list(ast.walk(tree)), {}, set()
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in there():
            used |= {(node.module, alias.name) for alias in node.names}
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in bound:
            used.add((modules.get(node.value.id), node.attr))
        elif called(node) in ("setattr", "object") and len(node.args) > 1 and isinstance(node.args[0], ast.Name):
            used.add((modules.get(node.args[0].id), getattr(node.args[1], "value", "__name__")))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"src(\.\w+)+", str(node.value)):
            parts = node.value.split(".")
            module = next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in there())
            used |= {(module, name) for name in parts[module.count(".") + 1 :][:1]}
    return sorted({f"{module}.{name}" for module, name in used if module in there() and name not in names_in(module)})


def test_names_that_long_tests_use_are_there():
    """CI leaves these tests out, so it is here that a name is noticed which has moved."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.long" in path.read_text()]
    files.remove(Path(__file__))
    assert len(files) > 50
    assert not {path.name: names for path in files if (names := missing_names(ast.parse(path.read_text())))}
    stale = "from src.extras.aot import train_compile as x\nfrom src.train import gone\nx._compile\n'src.train.no'"
    found = ("src.extras.aot.train_compile._compile", "src.train.gone", "src.train.no")
    assert missing_names(ast.parse(stale)) == [*found]


def test_the_core_that_the_architecture_lists_is_there_and_small():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The core")[2]
    core = re.findall(r"src/[\w/]+\.py", text)
    assert len(core) == len(set(core)) >= 24
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in core)
    assert lines <= MAX_CORE_LINES, (
        f"the core, what one reads to train a dense model, has {lines:,} lines. What such a reader does not need "
        "belongs in a file beside it; in a fork, raise MAX_CORE_LINES in tests/test_structure.py."
    )
    counted = sum(tokens(ROOT / name) for name in core)
    assert counted <= MAX_CORE_TOKENS, (
        f"the core has {counted:,} tokens of Python. Move what a dense model does not need to a file beside it, and "
        "import it on use; in a fork, raise MAX_CORE_TOKENS in tests/test_structure.py."
    )


def names_whole_config(path):
    """Whether a file names `Config`, or has a parameter `config`: other functions take sections or keys."""
    return any(
        (isinstance(node, ast.Name) and node.id == "Config")
        or (isinstance(node, ast.Attribute) and node.attr == "Config")
        or (isinstance(node, ast.alias) and node.name == "Config")
        or (isinstance(node, ast.arg) and node.arg == "config")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_few_files_take_the_whole_config():
    # A reader of one's own gets the whole: `dataset_factory` is called with it.
    apart = [ROOT / "src" / "config", ROOT / "src" / "data" / "readers"]
    # verify shrinks a whole config, and plan tries values of many sections.
    apart += [ROOT / "src" / "extras" / name for name in ("readers", "verify", "plan")]
    files = [path for path in (ROOT / "src").rglob("*.py") if path.parent not in apart]
    names = sorted(str(path.relative_to(ROOT)) for path in files if names_whole_config(path))
    assert len(names) <= MAX_FILES_OF_THE_WHOLE_CONFIG, (
        f"{len(names)} files name Config or have a parameter `config`, of at most {MAX_FILES_OF_THE_WHOLE_CONFIG}: "
        f"{', '.join(names)}. Take the sections of it that a file reads, such as config.step; in a fork, raise "
        "MAX_FILES_OF_THE_WHOLE_CONFIG in tests/test_structure.py."
    )


def test_the_fast_loop_has_tests_of_each_core_folder(request):
    folders = {
        path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists() or any(path.glob("*.py"))
    }
    assert set(core_tests.FOLDERS) == folders - {"extras"}
    for folder, names in core_tests.FOLDERS.items():
        for name in names:
            source = (ROOT / "tests" / name).read_text()
            assert f"from src.{folder}" in source or f"from src import {folder}" in source, (folder, name)
    assert request.node.get_closest_marker("core")  # as this file is one of them
