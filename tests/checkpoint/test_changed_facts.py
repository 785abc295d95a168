"""Data and code that are others than a run began with: named when it is resumed, and while it goes on."""

import re
import shutil
import sys
import textwrap

import pytest

from src.user_code import code_digest
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
    found = [part.split(" ")[0] for part in code_digest("of_test_main:f", "loss").split(", ")]
    expected = [name for name in files if "unused" not in name]
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in expected]
    assert found == sorted(names)
    assert "of_test_late" not in sys.modules
    before = code_digest("of_test_main:f", "loss")
    (tmp_path / "of_test_unused.py").write_text("x = 1")
    assert code_digest("of_test_main:f", "loss") == before
    for name in expected:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{text}\n# changed")
        assert code_digest("of_test_main:f", "loss") != before, name
        (tmp_path / name).write_text(text)


def test_a_function_of_an_installed_package_counts_with_its_own_file_alone():
    assert [part.split(" ")[0] for part in code_digest("json.decoder:JSONDecoder", "loss").split(", ")] == [
        "json.decoder"
    ]


# ---- Resumed with other code


def test_other_code_is_named_and_refused_until_it_is_accepted(my_modules, tmp_path, monkeypatch, capsys):
    """Code that changes figures alone is named, and refuses nothing."""
    keys = keys_of(tmp_path, eval_dataset_path="any", **FUNCTIONS)
    runs.run_here(**keys | {"steps": 2})
    before = runs.contents(tmp_path / "run")
    changes = [
        (("my_data.py", "range(40)", "range(1, 41)"), "source code", "dataset_factory"),
        (("my_helpers.py", "9 * text", "8 * text"), "source code", "dataset_factory"),
        (("my_transform.py", "< 2", "< 3"), "batch_transform code", "batch_transform"),
        (("my_loss.py", "return next", "return  next"), "loss code", "loss"),
        (("my_metrics.py", "jnp.ones(())", "2 * jnp.ones(())"), "evaluation eval_metrics code", ""),
    ]
    for (file, old, new), entry, key in changes:
        my_modules(file, old, new)
        if key:
            said = refusal(monkeypatch, capsys, **keys)
            (listed,) = re.findall(rf"^  {entry}: (.*)", said, re.MULTILINE)
            assert re.fullmatch(r"(\w+) \w{8} -> \1 \w{8}", listed)[1] == file.removesuffix(".py")
            assert f"accept_changes=[{key}]" in said
            assert runs.contents(tmp_path / "run") == before
            my_modules(file, new, old)
    runs.run_here(**keys)
    said = capsys.readouterr().out
    assert re.findall(r"accepted: (.*?): ", said) == ["evaluation eval_metrics code"]
    assert "resumed from step 2" in said
    for change, *_ in changes[:-1]:
        my_modules(*change)
    runs.run_here(**keys | {"steps": 6}, accept_changes="[dataset_factory, batch_transform, loss]")
    entries = ["source code", "batch_transform code", "loss code", "evaluation source code"]
    assert sorted(re.findall(r"accepted: (.*?): ", capsys.readouterr().out)) == sorted(entries)
    runs.run_here(**keys | {"steps": 8})  # the new checkpoints know the new code
    assert "accepted: " not in capsys.readouterr().out


@pytest.mark.long
def test_other_code_of_decode_metrics_is_named(my_modules, tmp_path, capsys):
    corpus = runs.write_corpus(tmp_path / "corpus")
    keys = keys_of(tmp_path, dataset_path=corpus, decode_metrics="my_metrics:of_texts", decode_samples=1)
    runs.run_here(**keys | {"steps": 2})
    my_modules("my_metrics.py", "len(lines)", "2 * len(lines)")
    runs.run_here(**keys)
    assert "accepted: evaluation decode_metrics code: my_metrics " in capsys.readouterr().out


# ---- Other data to evaluate on


@pytest.mark.parametrize("entries", ["", "[{name: pages, dataset_path: PATH}]"])
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
    assert f"accepted: {entry}: " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    runs.run_here(**keys)
    assert f"accepted: {entry}: " in capsys.readouterr().out
