"""Data and code that are others than a run began with: named when it is resumed, and while it goes on."""

import hashlib
import itertools
import os
import re
import shutil
import sys
import textwrap
import zipfile

import pytest

from src.system.code_digests import code_digests
from tests import runs

pytestmark = pytest.mark.usefixtures("steps_built_once")

MODULES = {
    "my_data.py": """
        def documents(config, split):
            from my_helpers import repeated
            return [repeated(f"{split} {n} ") for n in range(40)]
        """,
    "my_helpers.py": """
        def repeated(text):
            return 9 * text
        """,
    "my_transform.py": """
        def late(batch):
            batch["loss_mask"][batch["positions"] < 2] = 0
            return batch
        """,
    "my_loss.py": """
        from src.step.loss import next_token_loss

        def loss(model, batch, plan):
            return next_token_loss(model, batch, plan)
        """,
    "my_metrics.py": """
        import jax.numpy as jnp

        def of_logits(logits, batch):
            return {"tokens": (jnp.sum(batch["loss_mask"]), jnp.ones(()))}

        def of_texts(lines):
            return {"count": float(len(lines))}
        """,
}
FUNCTIONS = {
    "dataset_type": "custom",
    "dataset_factory": "my_data:documents",
    "batch_transform": "my_transform:late",
    "loss": "my_loss:loss",
    "eval_metrics": "my_metrics:of_logits",
}


@pytest.fixture
def my_modules(tmp_path, monkeypatch):
    """Writes the user's modules; the function it returns replaces a text in one of them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(file, text):
        (tmp_path / file).write_text(textwrap.dedent(text))
        for name in MODULES:  # as in a new process
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)

    def change(file, old, new):
        text = (tmp_path / file).read_text()
        assert old in text
        write(file, text.replace(old, new))

    for file, text in MODULES.items():
        write(file, text)
    return change


def keys_of(folder, **changes):
    """The keys of a run that saves and evaluates at steps 2 and 4."""
    periods = {"checkpoint_period": 2, "eval_interval": 2, "eval_steps": 1}
    return {"base_output_directory": folder, "steps": 4, "learning_rate_schedule_steps": 9, **periods, **changes}


def refusal(monkeypatch, capsys, **keys):
    return runs.refusal(monkeypatch, capsys, runs.arguments(**keys))


# ---- Which files are a function's code


def test_code_is_a_module_and_what_it_imports_of_the_users(tmp_path, monkeypatch):
    """At the top, in functions, relative, from folders without __init__.py; nothing is imported for that."""
    files = {
        "of_test_main.py": """
            import json, os.path
            import numpy as np
            from of_test_constants import SIZE
            from of_test_package import inner as renamed
            try:
                from .of_test_absent import nothing
            except ImportError:
                pass

            def f():
                import of_test_late
                from of_test_folder.deep.module import g
                from src.data.types import Source
            """,
        "of_test_constants.py": "from of_test_second import *; SIZE = 3",
        "of_test_second.py": "import of_test_main",
        "of_test_package/__init__.py": "from . import beside",
        "of_test_package/beside.py": "",
        "of_test_package/inner.py": "from .sub.other import x",
        "of_test_package/sub/__init__.py": "",
        "of_test_package/sub/other.py": "from .. import third; x = 1",
        "of_test_package/third.py": "",
        "of_test_package/unused.py": "",
        "of_test_late.py": "this is not Python",
        "of_test_folder/deep/module.py": "",
        "of_test_unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    found = code_digests("of_test_main:f", "loss")
    expected = [name for name in files if "unused" not in name]
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in expected]
    assert sorted(found) == sorted(names)
    assert "of_test_late" not in sys.modules
    (tmp_path / "of_test_unused.py").write_text("x = 1")
    assert code_digests("of_test_main:f", "loss") == found
    for name, module in zip(expected, names, strict=True):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{text}\n# changed")
        changed = code_digests("of_test_main:f", "loss")
        assert [each for each in found if changed[each] != found[each]] == [module]
        (tmp_path / name).write_text(text)


def test_code_is_read_where_it_was_imported_from_a_zip(tmp_path, monkeypatch):
    file = tmp_path / "code.zip"
    texts = {"of_zip_main.py": "def f(): from of_zip_package import inner", "of_zip_package/inner.py": "x = 1"}
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in {**texts, "of_zip_package/__init__.py": ""}.items():
            archive.writestr(name, text)
    monkeypatch.syspath_prepend(file)
    found = code_digests("of_zip_main:f", "loss")
    assert found.keys() == {"of_zip_main", "of_zip_package", "of_zip_package.inner"}
    assert found["of_zip_main"] == hashlib.sha256(texts["of_zip_main.py"].encode()).hexdigest()[:8]


def test_a_function_of_an_installed_package_counts_with_its_own_file_alone():
    assert list(code_digests("json.decoder:JSONDecoder", "loss")) == ["json.decoder"]


# ---- Resumed with other code


def test_other_code_is_named_and_refused_until_it_is_accepted(my_modules, tmp_path, monkeypatch, capsys):
    """Code that changes figures alone is named, and refuses nothing."""
    keys = keys_of(tmp_path, eval_dataset_path="any", **FUNCTIONS)
    runs.run_here(**keys | {"steps": 2})
    before = runs.contents(tmp_path / "run")
    changes = [
        (("my_data.py", "range(40)", "range(1, 41)"), "source code my_data", "dataset_factory"),
        (("my_helpers.py", "9 * text", "8 * text"), "source code my_helpers", "dataset_factory"),
        (("my_transform.py", "< 2", "< 3"), "code batch_transform my_transform", "batch_transform"),
        (("my_loss.py", "return next", "return  next"), "code loss my_loss", "loss"),
        (("my_metrics.py", "jnp.ones(())", "2 * jnp.ones(())"), "evaluation code eval_metrics my_metrics", ""),
    ]
    for (file, old, new), entry, key in changes:
        my_modules(file, old, new)
        if key:
            said = refusal(monkeypatch, capsys, **keys)
            assert re.search(rf"^  {entry}: \w{{8}} -> \w{{8}}$", said, re.MULTILINE)
            assert said.count(" -> ") == 2  # with the heading's
            assert f"accept_changes=[{key}]" in said
            assert runs.contents(tmp_path / "run") == before
            my_modules(file, new, old)
    runs.run_here(**keys)
    said = capsys.readouterr().out
    assert re.findall(r"(?:accepted|changed): (.*?): ", said) == ["evaluation code eval_metrics my_metrics"]
    assert "resumed from step 2" in said
    for change, *_ in changes[:-1]:
        my_modules(*change)
    runs.run_here(**keys | {"steps": 6}, accept_changes="[dataset_factory, batch_transform, loss]")
    entries = [entry for _, entry, key in changes if key]
    entries += [f"evaluation source code {module}" for module in ("my_data", "my_helpers")]
    assert sorted(re.findall(r"(?:accepted|changed): (.*?): ", capsys.readouterr().out)) == sorted(entries)
    runs.run_here(**keys | {"steps": 8})  # the new checkpoints know the new code
    assert not re.findall(r"(?:accepted|changed): ", capsys.readouterr().out)


@pytest.mark.long
def test_other_code_of_decode_metrics_is_named(my_modules, tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = keys_of(tmp_path, dataset_path=corpus, decode_metrics="my_metrics:of_texts", decode_samples=1)
    runs.run_here(**keys | {"steps": 2})
    my_modules("my_metrics.py", "len(lines)", "2 * len(lines)")
    runs.run_here(**keys)
    assert "changed: evaluation code decode_metrics my_metrics: " in capsys.readouterr().out


# ---- Other data to evaluate on


@pytest.mark.parametrize("entries", [pytest.param("", marks=pytest.mark.long), "[{name: pages, dataset_path: PATH}]"])
def test_replaced_evaluation_data_are_named_and_refused_where_they_may_end_the_run(
    entries, tmp_path, monkeypatch, capsys
):
    held_out = runs.write_corpus(tmp_path / "held_out", documents=8, seed=1)
    named = {"eval_datasets": entries.replace("PATH", str(held_out))} if entries else {"eval_dataset_path": held_out}
    keys = keys_of(tmp_path, dataset_path=runs.write_corpus(tmp_path / "corpus"), **named)
    runs.run_here(**keys | {"steps": 2})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    file = held_out / "003.txt"
    file.write_text("x" * file.stat().st_size)
    capsys.readouterr()
    entry = "evaluation source pages contents" if entries else "evaluation source contents"
    said = refusal(monkeypatch, capsys, **keys, target_eval_loss=99.0)
    assert f"  {entry}: " in said
    assert "accept_changes=[eval_dataset_path]" in said
    key = "eval_datasets" if entries else "eval_dataset_path"
    runs.run_here(**keys, target_eval_loss=99.0, accept_changes=f"[{key}]")
    assert f"changed: {entry}: " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    runs.run_here(**keys)
    assert f"changed: {entry}: " in capsys.readouterr().out


# ---- A file that is written to while a run reads it


@pytest.fixture
def while_it_runs(monkeypatch, tmp_path):
    """Has `act()` happen while the first batch after step 4 is made ahead; returns keys for that."""

    def at(act):
        calls = itertools.count()

        def transform(batch):
            if next(calls) == 16:  # two in which the step's fields are found, and some ahead
                act()
            return batch

        module = type(sys)("my_spy")
        module.transform = transform
        monkeypatch.setitem(sys.modules, "my_spy", module)
        return {"batch_transform": "my_spy:transform", "steps": 30, "checkpoint_period": 5}

    return at


def swap(file):
    data, size = file.read_bytes(), file.stat().st_size
    file.write_bytes(data.swapcase())
    assert file.stat().st_size == size


def replaced(file):
    """As by rsync: another file of the same size and time is put in its place."""
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().swapcase())
    shutil.copystat(file, other)
    other.rename(file)


@pytest.mark.parametrize("change", [pytest.param(swap, marks=pytest.mark.long), replaced])
def test_a_file_rewritten_at_the_same_size_ends_the_run_before_it_is_saved(
    change, while_it_runs, tmp_path, monkeypatch, capsys
):
    corpus = runs.write_corpus(tmp_path / "corpus")
    spied = while_it_runs(lambda: change(corpus / "007.txt"))
    keys = {"base_output_directory": tmp_path, "dataset_path": corpus, **spied}
    said = refusal(monkeypatch, capsys, **keys)
    saved = runs.steps_saved(tmp_path / "run")
    assert saved[-1] in (5, 10)
    assert f"{corpus}/007.txt changed while the run reads it" in said
    assert f"the checkpoint of step {saved[-1]} in {tmp_path}/run is intact" in said
    said = refusal(monkeypatch, capsys, **keys)
    assert "source contents: " in said
    (corpus / "007.txt").write_bytes((corpus / "007.txt").read_bytes().swapcase())
    runs.run_here(**keys)
    assert f"resumed from step {saved[-1]}" in capsys.readouterr().out
    runs.run_here(**{**keys, "base_output_directory": tmp_path / "whole"})
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole" / "run")


def test_a_file_rewritten_so_that_it_cannot_be_read_has_the_state_not_saved_either(
    while_it_runs, tmp_path, monkeypatch, capsys
):
    """After other errors between steps a run saves its state."""
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f'{{"text": "{n:03} {"words " * 40}"}}\n' for n in range(60)))
    spied = while_it_runs(lambda: file.write_bytes(b"x" * file.stat().st_size))
    said = refusal(monkeypatch, capsys, base_output_directory=tmp_path, dataset_path=file, **spied)
    assert "not JSON" in said or "changed while the run reads it" in said
    assert runs.steps_saved(tmp_path / "run")[-1] in (5, 10)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda file: os.utime(file), marks=pytest.mark.long),
        lambda file: file.write_bytes(file.read_bytes()),
    ],
)
def test_a_file_that_is_touched_ends_nothing(act, while_it_runs, tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    spied = while_it_runs(lambda: act(corpus / "007.txt"))
    runs.run_here(base_output_directory=tmp_path, dataset_path=corpus, **spied)
    assert runs.last_step(tmp_path / "run") == 30
    assert capsys.readouterr().out.count(f"{corpus}/007.txt was written, with no change in size") == 1


def test_a_file_that_grew_or_is_gone_ends_the_run(while_it_runs, tmp_path, monkeypatch, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    for number, act in enumerate([lambda file: file.write_bytes(2 * file.read_bytes()), lambda file: file.unlink()]):
        spied = while_it_runs(lambda act=act: act(corpus / "007.txt"))
        keys = {"base_output_directory": tmp_path / str(number), "dataset_path": corpus, **spied}
        assert f"{corpus}/007.txt " in refusal(monkeypatch, capsys, **keys)
        assert runs.steps_saved(tmp_path / str(number) / "run")[-1] <= 10


def test_evaluation_data_rewritten_in_mid_run_are_a_line_and_end_a_run_that_they_may_end(
    while_it_runs, tmp_path, monkeypatch, capsys
):
    corpus, held_out = (runs.write_corpus(tmp_path / name, seed=seed) for seed, name in enumerate(("corpus", "held")))
    keys = {"dataset_path": corpus, "eval_dataset_path": held_out, "eval_interval": 15, "eval_steps": 1}
    keys |= while_it_runs(lambda: swap(held_out / "007.txt"))
    runs.run_here(base_output_directory=tmp_path / "a", **keys)
    assert f"{held_out}/007.txt changed while the run reads it" in capsys.readouterr().out
    assert runs.steps_saved(tmp_path / "a" / "run")[-1] == 30
    keys |= while_it_runs(lambda: swap(held_out / "007.txt"))
    said = refusal(monkeypatch, capsys, base_output_directory=tmp_path / "b", target_eval_loss=0.1, **keys)
    assert f"{held_out}/007.txt changed while the run reads it" in said
