"""How messages word lists and numbers."""

import importlib
import re
from pathlib import Path

import pytest

from src.run.resolve_config import load
from src.system.errors import UserError, counted, first_few
from src.system.version import title


def test_a_list_stops_at_five():
    assert first_few("abcde") == "a, b, c, d, e"
    assert first_few("abcdefg") == "a, b, c, d, e and 2 more"
    assert first_few("abcdef", "\n  ") == "a\n  b\n  c\n  d\n  e\n  and 1 more"
    assert first_few([]) == ""


def test_what_is_most_alike_comes_first():
    assert first_few(["zebra", "query", "key", "keys", "value", "out"], near="kez").startswith("key, keys, ")


@pytest.mark.parametrize(("count", "said"), [(0, "0 rows"), (1, "1 row"), (2000, "2,000 rows")])
def test_one_is_no_plural(count, said):
    assert counted(count, "row") == said


def test_a_config_that_is_not_there_is_answered_with_few_names():
    with pytest.raises(UserError, match=r"^there is no file zzz/qqq\. There are ([^,]+, ){4}[^,]+ and \d+ more\.$"):
        load(["zzz/qqq"])


def test_a_file_beside_the_one_that_is_not_there_is_named(tmp_path):
    (tmp_path / "model.yml").touch()
    with pytest.raises(UserError, match=rf"Did you mean {tmp_path}/model\.yml\?"):
        load([f"{tmp_path}/modle.yml"])


ROOT = Path(__file__).parents[1]
OLD_UNIT = re.compile(
    r"\b(nats|tokens|rows|bytes|FLOPs|GiB) an? (byte|token|second|device|step|chip|host)\b"
    r"(?! (sees|sends|has|is)\b)"
)


@pytest.mark.parametrize("pattern", ["README.md", "docs/**/*.md", "configs/**/*.yml", "src/**/*.py"])
def test_units_are_per_what_they_are_measured_by(pattern):
    files = [file for file in ROOT.glob(pattern) if file.name != "log.md"]  # which is history
    assert files
    found = [f"{file}: {unit[0]}" for file in files for unit in OLD_UNIT.finditer(file.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize(
    "command", ["src.extras.plan.command", "src.extras.hf.convert", "src.extras.datasets.train_tokenizer"]
)
def test_commands_without_a_run_begin_with_the_version_too(command, capsys):
    with pytest.raises(UserError):
        importlib.import_module(command).main(["configs/base.yml", "no_such_key=1"])
    assert capsys.readouterr().out.startswith(f"{title()}\n")
